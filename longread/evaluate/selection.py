"""Attention mass that a policy keeps and the rows with the most of it that it finds, layer by layer
and head by head, without generation: `longread eval --selection-only`.

The document is prefilled but for its last tokens. Some of these are read as a question is, for the
policies that judge by it; the others are then fed one by one with dense attention. At each of them,
in every layer, the policy selects rows for the true query. Of each query head the softmax mass of
the exact keys on those rows is measured, and their recall: where it reads k rows, the share of them
that is among the k rows with the most mass.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from longread_kernels import dispatch as ops
from torch import Tensor

from longread.cache import KVCache
from longread.config import Settings
from longread.errors import DocumentError, UsageError
from longread.events import Event, Notice, NoticeFn, PasswordFn, Progress, ProgressFn
from longread.ingest import fit_prompt, read_documents
from longread.model import Decoder
from longread.policies import POLICIES, Policy, Rereader, Turn, make_policy
from longread.prompt import ChatFormat
from longread.reread import DocumentRereader
from longread.tokenizer import Tokenizer
from longread.weights import prepare

NUM_QUERIES = 30
NUM_OBSERVED = 32


@dataclass(frozen=True)
class Figures:
    """Means over the measured steps. mass, recall: [L, H_q]; fraction_kept: rows kept over rows
    cached, sinks and window counted.
    """

    mass: Tensor
    recall: Tensor
    fraction_kept: float
    num_rows: int

    @property
    def mass_kept(self) -> float:
        """The mean over layers and query heads."""
        return float(self.mass.mean())

    @property
    def mean_recall(self) -> float:
        """The mean over layers and query heads."""
        return float(self.recall.mean())

    def record(self) -> dict[str, object]:
        """The figures for JSON, those of each layer with one for each query head."""
        rounded = [
            {
                "mass_kept": [round(value, 6) for value in mass],
                "recall": [round(value, 6) for value in recall],
            }
            for mass, recall in zip(self.mass.tolist(), self.recall.tolist(), strict=True)
        ]
        return {
            "mass_kept": self.mass_kept,
            "recall": self.mean_recall,
            "fraction_kept": self.fraction_kept,
            "num_rows": self.num_rows,
            "layers": rounded,
        }

    def table(self) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
        """A head and a row a layer: mean over heads, and the worst head with its number."""
        head = ("layer", "mass kept", "worst head", "recall", "worst head")
        rows: list[tuple[str, ...]] = [
            (str(layer), *_mean_and_worst(mass), *_mean_and_worst(recall))
            for layer, (mass, recall) in enumerate(zip(self.mass, self.recall, strict=True))
        ]
        return head, rows


def _mean_and_worst(heads: Tensor) -> tuple[str, str]:
    worst = int(heads.argmin())
    return f"{float(heads.mean()):.3f}", f"{float(heads[worst]):.3f} ({worst})"


@dataclass
class _Measured(Policy):
    """Attends densely and measures what `inner` would have kept."""

    inner: Policy
    # By layer, [H_q] a step.
    kept: dict[int, list[Tensor]] = field(default_factory=dict)
    recall: dict[int, list[Tensor]] = field(default_factory=dict)
    num_rows: list[Tensor] = field(default_factory=list)  # rows kept over rows cached
    _cache: KVCache | None = None

    def prepare(self, cache: KVCache, rereader: Rereader | None = None) -> None:
        self._cache = cache
        self.inner.prepare(cache, rereader)

    def start_turn(self, turn: Turn) -> None:
        self.inner.start_turn(turn)

    def observe(self, layer_idx: int, q: Tensor, start: int) -> None:
        self.inner.observe(layer_idx, q, start)

    def appended(self, layer_idx: int, start: int, end: int) -> None:
        self.inner.appended(layer_idx, start, end)

    def select(self, layer_idx: int, q: Tensor, num_rows: int) -> Tensor | None:
        assert self._cache is not None, "prepare() comes first"
        indices = self.inner.select(layer_idx, q, num_rows)
        if indices is None:
            self._add(layer_idx, *torch.ones((2, q.shape[0]), device=q.device))
            self.num_rows.append(torch.ones((), device=q.device))
            return None
        k = self._cache.k[layer_idx, :, :num_rows].float()
        grouped = q.float().reshape(k.shape[0], -1, q.shape[-1]) * q.shape[-1] ** -0.5
        probs = torch.softmax(ops.score(grouped, k), dim=-1).flatten(0, 1)  # [H_q, S]
        rows = indices.repeat_interleave(q.shape[0] // indices.shape[0], 0)
        chosen = probs.gather(1, rows.clamp(min=0))
        num_read = (rows >= 0).sum(dim=1, keepdim=True)
        least = probs.sort(dim=1, descending=True).values.gather(1, num_read.clamp(min=1) - 1)
        found = ((chosen >= least) & (rows >= 0)).sum(dim=1) / num_read.clamp(min=1)[:, 0]
        self._add(layer_idx, (chosen * (rows >= 0)).sum(dim=1), found)
        self.num_rows.append((indices >= 0).float().mean() * indices.shape[1] / num_rows)
        return None

    def _add(self, layer_idx: int, kept: Tensor, recall: Tensor) -> None:
        self.kept.setdefault(layer_idx, []).append(kept)
        self.recall.setdefault(layer_idx, []).append(recall)


def _means(layers: dict[int, list[Tensor]]) -> Tensor:
    """Over the steps: [L, H_q] fp64."""
    found = [torch.stack(steps).double().mean(dim=0) for _, steps in sorted(layers.items())]
    return torch.stack(found).cpu()


def measure(
    decoder: Decoder,
    token_ids: Tensor,
    make_policy: Callable[[int], Policy],
    on_progress: ProgressFn | None = None,
) -> Figures:
    """What a policy keeps for the last 30 tokens.

    token_ids: [S] int64, S over 31; make_policy takes the number of rows. Raises DocumentError for
    a document of 31 tokens or fewer.
    """
    num_rows = token_ids.shape[0]
    num_least = NUM_QUERIES + 2  # one to read, one to observe
    if num_rows < num_least:
        raise DocumentError(
            f"the document has {num_rows} tokens, the measurement needs {num_least} or more"
        )
    cache = decoder.new_cache(num_rows)

    def on_layer(num_read: int) -> None:
        if on_progress is not None:
            on_progress(Progress("prefill", num_read, num_rows, "tokens"))

    end = num_rows - NUM_QUERIES
    start = end - min(NUM_OBSERVED, end // 2)
    decoder.prefill(token_ids[:start], cache, on_layer)
    policy = _Measured(make_policy(num_rows))
    policy.prepare(cache, DocumentRereader(decoder, token_ids[:start]))
    policy.start_turn(Turn(start, end))
    decoder.extend(token_ids[start:end], cache, policy)
    for step in range(NUM_QUERIES):
        decoder.decode(token_ids[cache.length : cache.length + 1], cache, policy)
        on_layer(end + step + 1)
    fraction_kept = float(torch.stack(policy.num_rows).double().mean())
    return Figures(_means(policy.kept), _means(policy.recall), fraction_kept, num_rows)


def run(
    settings: Settings,
    source: str,
    *,
    pages: str | None,
    password: PasswordFn | None,
    progress: ProgressFn,
    notice: NoticeFn,
) -> tuple[dict[str, object], Figures]:
    """Measure the policy of `settings` on one document; nothing is cached.

    Returns what was measured, by name, and the figures. Raises UsageError for a policy that leaves
    no row out and for a way to read that is not dense, and the LongreadError of what failed.
    """
    if settings.context not in ("auto", "dense"):
        raise UsageError(
            f"--selection-only measures on a document that is read densely: leave --context "
            f"{settings.context} out"
        )
    if POLICIES[settings.policy].rebuilds:
        raise UsageError(
            f"{settings.policy} reads every row, rebuilt from a smaller form, so there are no kept "
            "rows whose attention mass could be measured; choose another --policy"
        )

    def emit(event: Event) -> None:
        if isinstance(event, Progress):
            progress(event)
        elif isinstance(event, Notice):
            notice(event)

    model_dir = prepare(settings.model, settings.models_dir, progress, notice)
    tokenizer, chat = Tokenizer.load(model_dir), ChatFormat.load(model_dir)
    tokenized, _ = read_documents(
        [source], tokenizer, None, emit, pages=pages, password=password, stdin=None
    )
    decoder = Decoder.load(model_dir, settings.device, settings.dtype)
    prompt, _ = fit_prompt(tokenizer, chat, tokenized, decoder.config, 0, settings.truncate)
    token_ids = torch.from_numpy(prompt.token_ids).long()
    measured: dict[str, object] = {
        "model": decoder.config.name,
        "policy": settings.policy,
        "budget": settings.budget,
        "vote": settings.vote,
        "index": settings.index,
    }
    return measured, measure(decoder, token_ids, lambda rows: make_policy(settings, rows), progress)
