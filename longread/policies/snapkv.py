"""SnapKV (arXiv 2404.14469): the question's queries vote once for the rows that are kept.

The votes of a row are the attention that the last `observe_size` tokens of the first question pay
it, summed over these and over the heads of a KV head, then pooled over neighbouring rows so that a
passage survives as a whole. Differences from the paper: the window that votes is the question's end
and not the window that is kept, which is `window_size` as for every policy here; sinks and question
are kept too. The votes take observe_size * G * S fp32 numbers, one KV head at a time.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from longread_kernels import dispatch as ops
from torch import Tensor

from longread.cache import KVCache
from longread.policies.base import KernelPlan, Rereader
from longread.policies.evicting import PromptEvicting
from longread.policies.mass import column_mass

POOLINGS = ("max", "avg")


@dataclass
class SnapKV(PromptEvicting):
    """observe_size: queries that vote; pooling: max or avg, over kernel_size rows (odd: 5, 7)."""

    observe_size: int = 32
    pooling: str = "max"
    kernel_size: int = 7
    _q: dict[int, Tensor] = field(default_factory=dict, init=False, repr=False)  # [<=W, H_q, D]

    def prepare(self, cache: KVCache, rereader: Rereader | None = None) -> None:
        super().prepare(cache)
        self._q.clear()

    def observe(self, layer_idx: int, q: Tensor, start: int) -> None:
        super().observe(layer_idx, q, start)
        if layer_idx in self._left:
            return
        own = q[-self.observe_size :]
        if start > self.turn.question_start and layer_idx in self._q:  # a question in chunks
            own = torch.cat((self._q[layer_idx], own))[-self.observe_size :]
        self._q[layer_idx] = own.clone()

    def kernel_plan(self) -> KernelPlan:
        return KernelPlan(self.most_listed, self.sink_size)

    @property
    def most_listed(self) -> int | None:
        """Rows that a layer may keep besides sinks, window and question; None: all."""
        return self.budget

    def choose(self, layer_idx: int, num_rows: int, kept: Tensor) -> Tensor | None:
        q = self._q.pop(layer_idx, None)
        budget = self.layer_budget(layer_idx, num_rows - kept.shape[0])
        if budget is None or budget >= num_rows - kept.shape[0]:
            return None
        assert q is not None, "observe() comes first"
        return ops.select_rows(self._votes(layer_idx, q, num_rows), kept, budget)

    def layer_budget(self, layer_idx: int, num_eligible: int) -> int | None:
        """Rows that the layer keeps of `num_eligible`; None: all."""
        return self.budget

    def _votes(self, layer_idx: int, q: Tensor, num_rows: int) -> Tensor:
        """Pooled attention that q [W, H_q, D] pays the rows before its own, which have 0.

        Returns [H_kv, num_rows] fp32.
        """
        assert self._cache is not None, "prepare() comes first"
        first = num_rows - q.shape[0]
        mass = column_mass(q, self._cache.k[layer_idx, :, :num_rows], first)[:, :first]
        padding = self.kernel_size // 2
        if self.pooling == "max":
            pooled = F.max_pool1d(mass, self.kernel_size, 1, padding)
        else:
            assert self.pooling == "avg", f"pooling is one of {', '.join(POOLINGS)}"
            pooled = F.avg_pool1d(mass, self.kernel_size, 1, padding)
        return F.pad(pooled, (0, q.shape[0]))
