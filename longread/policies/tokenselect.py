"""TokenSelect (arXiv 2411.02886): each step scores all rows and reads the best.

Kept at every step: the first `sink_size` rows, the last `window_size`, the question, and `budget`
rows of all others by vote. Differences from the paper: by default the heads that share a KV head
vote for rows of their own (`group`); the paper's vote over all heads is `all`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from longread_kernels import dispatch as ops
from torch import Tensor

from longread.cache import KVCache
from longread.index import KeyIndex
from longread.policies.base import Policy, Turn


@dataclass
class TokenSelect(Policy):
    """budget (None: all), sink_size, window_size are rows; index_dim 0: a quarter of the head."""

    budget: int | None
    vote: str = "group"
    min_votes: int = 1
    index: str = "int8"
    index_dim: int = 0
    sink_size: int = 4
    window_size: int = 256
    _index: KeyIndex | None = field(default=None, init=False, repr=False)
    _turn: Turn = field(default=Turn(0, 0), init=False, repr=False)
    _kept: Tensor | None = field(default=None, init=False, repr=False)

    def prepare(self, cache: KVCache) -> None:
        self._index = KeyIndex(cache, self.index, self.index_dim)

    def start_turn(self, turn: Turn) -> None:
        self._turn = turn

    def appended(self, layer_idx: int, start: int, end: int) -> None:
        assert self._index is not None, "prepare() comes first"
        self._index.append(layer_idx, start, end)

    def select(self, layer_idx: int, q: Tensor, num_rows: int) -> Tensor | None:
        assert self._index is not None, "prepare() comes first"
        if layer_idx == 0 or self._kept is None:  # the same rows for every layer of a step
            self._kept = self._always_kept(num_rows, q.device)
        if self.budget is None or self.budget >= num_rows - self._kept.shape[0]:
            return None
        votes = ops.vote(self._index.scores(layer_idx, q, num_rows), self.vote, self.min_votes)
        return ops.select_rows(votes, self._kept, self.budget)

    def _always_kept(self, num_rows: int, device: torch.device) -> Tensor:
        ranges = sorted(
            (
                (0, self.sink_size),
                (self._turn.question_start, self._turn.question_end),
                (num_rows - self.window_size, num_rows),
            )
        )
        parts, covered = [torch.arange(0, device=device)], 0
        for start, end in ranges:
            start, end = max(start, covered), min(end, num_rows)
            if start < end:
                parts.append(torch.arange(start, end, device=device))
                covered = end
        return torch.cat(parts)
