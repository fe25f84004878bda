"""TokenSelect (arXiv 2411.02886): each step scores all rows and reads the best.

Kept at every step: the first `sink_size` rows, the last `window_size`, the question, and `budget`
rows of all others by vote. Differences from the paper: by default the heads that share a KV head
vote for rows of their own (`group`); the paper's vote over all heads is `all`. A head's scores
count from the log-sum-exp of its exact scores on sinks and newest rows, which costs no pass over
the index and keeps a little more mass than the softmax over all rows (docs/quality.md).

With `stand_in` the rows that a step does not read are not left out of the softmax: one row more has
the documents' mean value and weighs what the index says that the unread rows weigh, the votes of a
KV head shared equally by its query heads.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

import torch
from longread_kernels import dispatch as ops
from torch import Tensor

from longread.cache import KVCache
from longread.index import KeyIndex
from longread.policies.base import KernelPlan, Policy, Rereader, StandIn, Turn
from longread.policies.kept import kept_ranges, norm_ranges, row_tensor

KERNEL_VOTES = ("group", "group-max", "none")


@dataclass
class TokenSelect(Policy):
    """budget (None: all), sink_size, window_size are rows; index_dim 0: KeyIndex's default.

    reselect: rows are chosen anew every so many answer tokens; stand_in: with the vote `group`.
    """

    budget: int | None
    vote: str = "group"
    min_votes: int = 1
    index: str = "int8"
    index_dim: int = 0
    sink_size: int = 4
    window_size: int = 256
    reselect: int = 1
    stand_in: bool = False
    _cache: KVCache | None = field(default=None, init=False, repr=False)
    _index: KeyIndex | None = field(default=None, init=False, repr=False)
    _kept: Tensor | None = field(default=None, init=False, repr=False)
    _norm_rows: Tensor | None = field(default=None, init=False, repr=False)
    _num_steps: int = field(default=0, init=False, repr=False)  # with the rows in _chosen
    _chosen: dict[int, Tensor] = field(default_factory=dict, init=False, repr=False)
    # Without their weight, which is that of the votes when rows were chosen, [H_q] of each layer.
    _stand_ins: tuple[StandIn, ...] = field(default=(), init=False, repr=False)
    _log_weights: dict[int, Tensor] = field(default_factory=dict, init=False, repr=False)

    def prepare(self, cache: KVCache, rereader: Rereader | None = None) -> None:
        self._begin(cache)
        if self._index is not None and self._index.cache is cache:
            self._index.rebuild()  # in place: a captured step goes on reading it
        else:
            self._index = KeyIndex(cache, self.index, self.index_dim)

    def borrow_index(self, other: TokenSelect) -> None:
        """Take over the index of a policy that was prepared on the same cache."""
        assert other._cache is not None, "prepare() comes first"
        self._index = other._index
        self._begin(other._cache)

    def _begin(self, cache: KVCache) -> None:
        self._cache = cache
        self._chosen.clear()
        if self.stand_in:
            assert self.vote == "group", "only this vote says what unread rows weigh"
            none = torch.full(cache.v.shape[1:2], -torch.inf, device=cache.v.device)
            layers = cache.v[:, :, : cache.length]
            means = [rows.mean(dim=1, dtype=torch.float32) for rows in layers]  # [H_kv, D]
            self._stand_ins = tuple(StandIn(torch.zeros_like(v), v, none) for v in means)

    def start_turn(self, turn: Turn) -> None:
        super().start_turn(replace(turn, stand_ins=self._stand_ins) if self.stand_in else turn)
        self._chosen.clear()

    def appended(self, layer_idx: int, start: int, end: int) -> None:
        assert self._index is not None, "prepare() comes first"
        self._index.append(layer_idx, start, end)

    def select(self, layer_idx: int, q: Tensor, num_rows: int) -> Tensor | None:
        assert self._index is not None, "prepare() comes first"
        if layer_idx == 0 or self._kept is None:  # the same rows for every layer of a step
            ranges = kept_ranges(num_rows, self.turn, self.sink_size, self.window_size)
            self._kept = row_tensor(ranges, q.device)
            self._norm_rows = row_tensor(norm_ranges(ranges, num_rows, self.sink_size), q.device)
            self._num_steps += 1
            if self._num_steps >= self.reselect:
                self._chosen.clear()
        if self.budget is None or self.budget >= num_rows - self._kept.shape[0]:
            self._chosen.clear()
            return None
        if layer_idx in self._chosen:
            chosen = self._chosen[layer_idx]
            return torch.cat((self._kept.expand(chosen.shape[0], -1), chosen), dim=-1)
        norms = self._norms(layer_idx, q)
        scores = self._index.scores(layer_idx, q, num_rows) - norms[..., None]
        votes = ops.vote(scores, self.vote, self.min_votes)
        self._num_steps = 0
        rows = ops.select_rows(votes, self._kept, self.budget)
        self._chosen[layer_idx] = rows[:, self._kept.shape[0] :]
        if self.stand_in:
            unread = torch.logsumexp(votes.scatter(1, rows, -torch.inf), dim=1)
            log_weights = norms + (unread - math.log(norms.shape[1]))[:, None]
            self._log_weights[layer_idx] = log_weights.flatten()
        return rows

    def stand_in_of(self, layer_idx: int) -> StandIn | None:
        log_weight = self._log_weights.get(layer_idx)
        if log_weight is None:
            return None
        return replace(self._stand_ins[layer_idx], log_weight=log_weight)

    def kernel_plan(self) -> KernelPlan | None:
        if self.vote not in KERNEL_VOTES:
            return None
        return KernelPlan(
            self.budget,
            self.sink_size,
            self.window_size,
            self._index,
            summed=self.vote == "group",
            apart=self.vote == "none",
            reselect=self.reselect,
            stand_in=self.stand_in,
        )

    def _norms(self, layer_idx: int, q: Tensor) -> Tensor:
        """What each head's scores count from. q: [H_q, D]; returns [H_kv, G] fp32."""
        assert self._cache is not None and self._norm_rows is not None
        k = self._cache.k[layer_idx]
        grouped = q.reshape(k.shape[0], -1, q.shape[-1])
        if not self._norm_rows.shape[0]:
            return grouped.new_zeros(grouped.shape[:2], dtype=torch.float32)
        scores = ops.score(grouped * q.shape[-1] ** -0.5, k.index_select(1, self._norm_rows))
        return torch.logsumexp(scores, dim=-1)
