"""Many cells in one run: every task at every length, each sample under all variants at once.

Owns the order of the work and what of it is already there. The n-th samples of all tasks come
before any task's next one, so that a run that is stopped has about as many samples of each.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch

from longread import __version__
from longread.errors import ContextError, UsageError
from longread.evaluate.cells import Cell, CellFolder, CellKey, Result
from longread.evaluate.divergence import compare
from longread.evaluate.runner import Prompt, Prompts, Runner, Said
from longread.evaluate.task import ANSWER_ROOM, Question, Sample, Task
from longread.evaluate.tasks import COMPARED
from longread.evaluate.variants import Variant
from longread.events import Notice, NoticeFn, Progress, ProgressFn
from longread.model import Decoder
from longread.plain_text import count_text
from longread.prompt import ChatFormat
from longread.tokenizer import Tokenizer

_WRITE_INTERVAL_S = 5.0
_WORK_PER_WRITE = 50  # times as long as the last write took, where that is more


@dataclass(frozen=True)
class Request:
    """What is to be there in the end. limit_s: begin no sample after so many seconds."""

    tasks: tuple[Task, ...]
    lengths: tuple[int, ...]
    variants: tuple[Variant, ...]
    num_samples: int
    seed: int
    limit_s: float | None = None
    command: str = ""


@dataclass
class Outcome:
    """The cells that were asked for, as far as they are there, and how the run went."""

    cells: list[Cell]
    num_done: int = 0  # samples of this run
    num_missing: int = 0
    times: dict[str, float] = field(default_factory=dict)

    def add_time(self, name: str, seconds: float) -> None:
        """Count seconds of a kind of work."""
        self.times[name] = self.times.get(name, 0.0) + seconds

    def check_found(self) -> None:
        """Raise UsageError where there was nothing to do and is nothing to show."""
        if not self.cells and not self.num_missing:
            raise UsageError("no task has a sample of these lengths; see the lines above")


@dataclass(frozen=True)
class _Work:
    task: Task
    prompt: Prompt
    variants: tuple[Variant, ...]


class Grid:
    """Fills the cells of a folder with one model."""

    def __init__(
        self,
        decoder: Decoder,
        tokenizer: Tokenizer,
        chat: ChatFormat,
        folder: CellFolder,
        progress: ProgressFn,
        notice: NoticeFn,
        *,
        context: str = "dense",
    ) -> None:
        """context: how the decoder reads, a part of the cells' identity."""
        self._decoder = decoder
        self._tokenizer = tokenizer
        self._chat = chat
        self._folder = folder
        self._progress = progress
        self._notice = notice
        self._prompts = Prompts(tokenizer, chat)
        self._context = context

    def run(self, request: Request, earlier: Outcome | None = None) -> Outcome:
        """Answer what the folder lacks. A task's samples end where it has no more.

        earlier: an outcome that this one is added to. Every sample is made before the model reads
        the first. Raises ContextError for samples that do not fit the window, and UsageError where
        no task has a sample of any length.
        """
        started = time.perf_counter()
        keys = [
            self._key(task, length, variant, request.seed)
            for length in request.lengths
            for task in request.tasks
            for variant in request.variants
        ]
        outcome = Outcome([]) if earlier is None else earlier
        with self._folder.locked():
            try:
                works = self._works(request)
                outcome.num_missing += sum(map(len, works.values()))
                outcome.add_time("prompts_s", time.perf_counter() - started)
                for length, own in works.items():
                    self._run_length(request, length, own, started, outcome)
                self._compare(keys)
            except KeyboardInterrupt:
                self._notice(Notice("interrupted; what was answered is stored for the next run"))
                raise
        outcome.cells += [cell for key in keys if (cell := self._folder.cell(key)).results]
        outcome.add_time("total_s", time.perf_counter() - started)
        if earlier is None:
            outcome.check_found()
        return outcome

    def _run_length(
        self,
        request: Request,
        length: int,
        works: Sequence[_Work],
        started: float,
        outcome: Outcome,
    ) -> None:
        if not works or (outcome.num_done and _is_late(request, started)):
            return
        runner = Runner(self._decoder, self._tokenizer, request.variants, length)
        run = self._run_record(request.command)
        write_at = time.perf_counter() + _WRITE_INTERVAL_S
        for number, work in enumerate(works, 1):
            for variant, answers in runner.answers(work.prompt, work.variants).items():
                key = self._key(work.task, length, variant, request.seed)
                self._folder.add(key, _result(work.prompt.sample, answers), run)
            outcome.num_done += 1
            outcome.num_missing -= 1
            self._progress(Progress(f"evaluating at {length:,}", number, len(works), "samples"))
            began = time.perf_counter()
            if began > write_at:
                self._folder.write()
                now = time.perf_counter()
                write_at = now + max(_WRITE_INTERVAL_S, _WORK_PER_WRITE * (now - began))
            if _is_late(request, started):
                break
        self._folder.write()
        for name in ("prefill_s", "questions_s", "answers_s"):
            outcome.add_time(name, getattr(runner.times, name))

    def _compare(self, keys: Sequence[CellKey]) -> None:
        """Tell of long answers where they leave dense's, which an earlier run may have given."""
        for key in keys:
            if key.task not in COMPARED or key.policy == "dense":
                continue
            dense = replace(key, policy="dense", variant="dense", fields=(), budget="")
            for reference in (dense, replace(dense, context="dense")):
                own, theirs = self._folder.cell(key), self._folder.cell(reference)
                if compare(own, theirs, self._tokenizer.encode):
                    self._folder.changed(key)
        self._folder.write()

    def _works(self, request: Request) -> dict[int, list[_Work]]:
        """What is missing at each length, in the order of the work, with its prompt.

        Raises ContextError where prompts with their answers do not fit the window.
        """
        missing = [
            (length, number, task, variants)
            for length in request.lengths
            for number in range(request.num_samples)
            for task in request.tasks
            if (variants := self._missing(request, length, number, task))
        ]
        works: dict[int, list[_Work]] = {length: [] for length in request.lengths}
        ended: set[tuple[str, int]] = set()
        over: list[tuple[int, Prompt]] = []
        for place, (length, number, task, variants) in enumerate(missing, 1):
            if (task.name, length) not in ended:
                num_tokens = length - self._prompts.overhead - ANSWER_ROOM
                try:
                    prompt = self._prompts.make(task.sample(number, num_tokens, request.seed))
                except UsageError as error:
                    ended.add((task.name, length))
                    self._notice(Notice(f"{task.name} at {length:,}, sample {number}: {error}"))
                else:
                    works[length].append(_Work(task, prompt, variants))
                    if prompt.num_rows > self._decoder.config.window:
                        over.append((length, prompt))
            self._progress(Progress("making samples", place, len(missing), "samples"))
        if over:
            raise ContextError(self._too_long(over))
        return works

    def _too_long(self, over: Sequence[tuple[int, Prompt]]) -> str:
        (length, prompt), *others = over
        config = self._decoder.config
        names = dict.fromkeys(other.sample.task for _, other in over)
        also = f" (and {count_text(len(others), 'more sample')})" if others else ""
        return (
            f"sample {prompt.sample.number} of {prompt.sample.task} at {length:,} takes "
            f"{prompt.num_rows:,} tokens with its answers{also}, but the window of {config.name} "
            f"is {config.window:,}: choose smaller --lengths, or leave {', '.join(names)} out"
        )

    def _missing(
        self, request: Request, length: int, number: int, task: Task
    ) -> tuple[Variant, ...]:
        return tuple(
            variant
            for variant in request.variants
            if number not in self._cell(task, length, variant, request.seed).results
        )

    def _cell(self, task: Task, length: int, variant: Variant, seed: int) -> Cell:
        return self._folder.cell(self._key(task, length, variant, seed))

    def _key(self, task: Task, length: int, variant: Variant, seed: int) -> CellKey:
        config = self._decoder.config
        return CellKey(
            model=config.name,
            model_identity=config.identity,
            prompt_identity=self._chat.identity,
            dtype=str(self._decoder.dtype).removeprefix("torch."),
            task=task.name,
            length=length,
            seed=seed,
            policy=variant.policy,
            variant=variant.label,
            fields=variant.fields,
            budget=variant.budget,
            context=self._context,
        )

    def _run_record(self, command: str) -> dict[str, str]:
        device = self._decoder.device
        on_gpu = device.type == "cuda"
        return {
            "command": command,
            "longread": __version__,
            "python": platform.python_version(),
            "torch": torch.__version__,
            "device": torch.cuda.get_device_name(device) if on_gpu else f"cpu {platform.machine()}",
        }


def _is_late(request: Request, started: float) -> bool:
    return request.limit_s is not None and time.perf_counter() - started > request.limit_s


def _result(sample: Sample, answers: Sequence[Said]) -> Result:
    pairs = list(zip(sample.questions, answers, strict=True))
    return Result(
        number=sample.number,
        scores=tuple(question.score(answer.text) for question, answer in pairs),
        kinds=tuple(question.kind for question, _ in pairs),
        answers=tuple(answer.text for answer in answers),
        rows_read=sum(answer.rows_read for answer in answers),
        rows_cached=sum(answer.rows_cached for answer in answers),
        measures=tuple(_measures(pairs).items()),
    )


def _measures(pairs: Sequence[tuple[Question, Said]]) -> dict[str, float]:
    """Further figures of the sample's answers, each the mean over the questions that have it."""
    found: dict[str, list[float]] = {}
    for question, answer in pairs:
        own = question.measure(answer.text) if question.measure else {}
        for name, value in (own | answer.measures).items():
            found.setdefault(name, []).append(value)
    return {name: sum(values) / len(values) for name, values in found.items()}
