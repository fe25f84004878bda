"""Trains a predictor on texts (TokenButler, arXiv 2503.07518): AdamW, cosine with a warm-up.

Each step is one lesson. What a step reads follows from the seed and its number alone, so that a
training that was stopped goes on from its checkpoint as if it had not been, to the bit. A tenth of
each text, its end, is never trained on: recall is measured there.
"""

from __future__ import annotations

import json
import math
import random
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from longread import textfile
from longread.atomic import write_atomic
from longread.butler.lessons import Kept, Lesson, losses, read_lesson, recall
from longread.errors import DocumentError, UsageError
from longread.events import Progress, ProgressFn
from longread.model import Decoder
from longread.policies.predictor import Origin, Predictor, Shape, fitting_width
from longread.tokenizer import Tokenizer

_WARM_UP = 0.1
_CHARS_A_TOKEN = 8  # more than texts have, so that a piece is long enough
_TRAINED_SHARE = 0.9  # of each text
_NUM_TESTS = 4  # pieces that recall is measured on
_SAVE_EVERY_S = 60.0


@dataclass(frozen=True)
class Recipe:
    """How a predictor is trained. length: tokens of a lesson; num_queries: of them, that teach;
    limit_s: seconds after which it is done, where the steps have not been (0: none); width: of the
    inner layers (0: what one percent of the model's parameters allows).
    """

    steps: int = 2000
    length: int = 8192
    num_queries: int = 256
    seed: int = 0
    limit_s: float = 0.0
    width: int = 0
    learning_rate: float = 1e-3
    sink_size: int = 4
    window_size: int = 256

    @property
    def kept(self) -> Kept:
        return Kept(self.sink_size, self.window_size)


class Texts:
    """Pieces of texts by number, the same for the same seed."""

    def __init__(self, texts: Sequence[str], tokenizer: Tokenizer, length: int, seed: int) -> None:
        self._texts, self._tokenizer, self._length, self._seed = texts, tokenizer, length, seed

    def piece(self, number: int, *, held_out: bool = False) -> torch.Tensor:
        """Token ids, [length] int64 or fewer where a text is short."""
        draw = random.Random(f"{self._seed} {number} {held_out}")
        text = draw.choices(self._texts, [len(text) for text in self._texts])[0]
        cut = int(_TRAINED_SHARE * len(text))
        part = text[cut:] if held_out else text[:cut]
        num_chars = self._length * _CHARS_A_TOKEN
        start = draw.randrange(max(1, len(part) - num_chars // 2))
        return torch.tensor(self._tokenizer.encode(part[start : start + num_chars])[: self._length])


def read_texts(sources: Sequence[Path]) -> list[str]:
    """The texts of files, and of all files below folders that hold text. Raises DocumentError."""
    texts = []
    for source in sources:
        files = sorted(path for path in source.rglob("*") if path.is_file())
        for path in files if source.is_dir() else [source]:
            try:
                texts.append(textfile.decode(path.read_bytes(), str(path))[0])
            except OSError as error:
                raise DocumentError(f"cannot read {path}: {error.strerror}") from error
            except DocumentError:
                if not source.is_dir():
                    raise
    if not any(texts):
        raise DocumentError(f"no text in {', '.join(map(str, sources))}")
    return [text for text in texts if text]


class Trainer:
    """A predictor on its way."""

    def __init__(
        self, decoder: Decoder, tokenizer: Tokenizer, texts: Sequence[str], recipe: Recipe
    ) -> None:
        config = decoder.config
        if recipe.length > config.window:
            raise UsageError(f"--length is {recipe.length:,}, over the window of {config.name}")
        self.recipe, self.step, self.seconds = recipe, 0, 0.0
        self._decoder = decoder
        self._texts = Texts(texts, tokenizer, recipe.length, recipe.seed)
        shape = Shape.of(config)
        num_parameters = sum(tensor.numel() for tensor in decoder.network.tensors.values())
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(recipe.seed)
            predictor = Predictor(shape, recipe.width or fitting_width(shape, num_parameters))
        self.predictor = predictor.to(decoder.device)
        self.optimizer = torch.optim.AdamW(self.predictor.parameters(), lr=recipe.learning_rate)
        self.losses: list[float] = []
        self._is_whole = True  # but while an update is made

    @property
    def share_done(self) -> float:
        """Of the steps or of the time, whichever is further."""
        by_time = self.seconds / self.recipe.limit_s if self.recipe.limit_s else 0.0
        return min(1.0, max(self.step / self.recipe.steps, by_time))

    def lesson(self, number: int, *, held_out: bool = False) -> Lesson:
        token_ids = self._texts.piece(number, held_out=held_out)
        num_least = 2 * (self.recipe.sink_size + self.recipe.window_size + 1)
        if token_ids.shape[0] < num_least:
            raise DocumentError(f"the texts are too short: a piece takes {num_least:,} tokens")
        return read_lesson(self._decoder, token_ids, self.recipe.num_queries, number)

    def train_step(self) -> float:
        """One lesson; returns its loss in the mean over layers."""
        started = time.perf_counter()
        lesson = self.lesson(self.step)
        if self.step == 0:
            self._learn_spread(lesson)
        shape, found = self.predictor.shape, []
        for producer in range(len(shape.groups)):  # memory for one at a time
            loss = torch.stack(losses(self.predictor, lesson, self.recipe.kept, producer)).sum()
            (loss / shape.num_layers).backward()
            found.append(loss.detach())
        done = self.share_done
        rate = done / _WARM_UP if done < _WARM_UP else _cosine((done - _WARM_UP) / (1 - _WARM_UP))
        for group in self.optimizer.param_groups:
            group["lr"] = self.recipe.learning_rate * max(rate, 1e-3)
        self.losses.append(float(torch.stack(found).sum()) / shape.num_layers)
        self._is_whole = False
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.step += 1
        self.seconds += time.perf_counter() - started
        self._is_whole = True
        return self.losses[-1]

    def run(self, checkpoint: Path, progress: ProgressFn) -> None:
        """Train to the end, from the checkpoint on where there is one; it stays."""
        if checkpoint.exists():
            self.load_checkpoint(checkpoint)
        saved_s = self.seconds
        try:
            while self.share_done < 1:
                self.train_step()
                if self.recipe.limit_s:
                    done, total = min(self.seconds, self.recipe.limit_s), self.recipe.limit_s
                    progress(Progress("train", int(done), int(total), "seconds"))
                else:
                    progress(Progress("train", self.step, self.recipe.steps, "steps"))
                if self.seconds - saved_s > _SAVE_EVERY_S:
                    self.save_checkpoint(checkpoint)
                    saved_s = self.seconds
        finally:
            if self._is_whole and self.step:
                self.save_checkpoint(checkpoint)

    def recall(self) -> list[tuple[float, float]]:
        """As lessons.recall, the mean over texts that are not trained on."""
        kept, shares = self.recipe.kept, []
        for number in range(_NUM_TESTS):
            shares.append(recall(self.predictor, self.lesson(number, held_out=True), kept))
        return [tuple(mean) for mean in torch.tensor(shares).mean(dim=0).tolist()]

    def save_checkpoint(self, path: Path) -> None:
        from safetensors.torch import save

        tensors = {f"predictor.{name}": t for name, t in self.predictor.state_dict().items()}
        for number, state in self.optimizer.state_dict()["state"].items():
            tensors |= {f"optimizer.{number}.{name}": value for name, value in state.items()}
        about = {"recipe": self._recipe_text(), "step": str(self.step)}
        about["seconds"] = repr(self.seconds)
        cpu = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
        write_atomic(path, [save(cpu, about)], mode=0o644)

    def load_checkpoint(self, path: Path) -> None:
        """Go on from there. Raises UsageError where it is of another training."""
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(path, framework="pt") as file:
                about = file.metadata() or {}
                if about.get("recipe") != self._recipe_text():
                    raise UsageError(f"{path} is of another training: remove it to begin anew")
                tensors = {name: file.get_tensor(name) for name in file.keys()}
        except (SafetensorError, OSError) as error:
            raise UsageError(f"{path} is damaged ({error}): remove it to begin anew") from error
        states: dict[int, dict[str, torch.Tensor]] = {}
        own = {}
        for name, tensor in tensors.items():
            kind, _, rest = name.partition(".")
            if kind == "predictor":
                own[rest] = tensor
            else:
                number, _, key = rest.partition(".")
                states.setdefault(int(number), {})[key] = tensor
        self.predictor.load_state_dict(own)
        groups = self.optimizer.state_dict()["param_groups"]
        self.optimizer.load_state_dict({"state": states, "param_groups": groups})
        self.step, self.seconds = int(about["step"]), float(about["seconds"])

    def origin(self, texts: str) -> Origin:
        """texts: what they are called. Measures recall."""
        config, shares = self._decoder.config, self.recall()
        return Origin(
            config.name,
            config.identity,
            texts,
            self.recipe.seed,
            self.step,
            self.step * self.recipe.length,
            round(self.seconds, 1),
            *(tuple(round(value, 4) for value in row) for row in zip(*shares, strict=True)),
        )

    def _learn_spread(self, lesson: Lesson) -> None:
        for producer, layers in enumerate(self.predictor.shape.groups):
            self.predictor.scale_queries(producer, lesson.plain_queries(layers.start))
            for layer_idx in layers:
                self.predictor.scale_keys(layer_idx, lesson.plain_keys(layer_idx))

    def _recipe_text(self) -> str:
        return json.dumps(asdict(self.recipe) | {"identity": self._decoder.config.identity})


def _cosine(share: float) -> float:
    return (1 + math.cos(math.pi * share)) / 2
