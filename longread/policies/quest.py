"""Quest (arXiv 2406.10774): blocks of rows scored by an upper bound of q . k; nothing is evicted.

Of each block the smallest and largest key of every channel are kept: the sum over channels of the
larger of q_d * min_d and q_d * max_d is at least q . k of every row in the block. Differences from
the paper, whose models have as many KV heads as query heads: the heads of a KV head vote for its
blocks with the softmax of their bounds, summed; sinks, question and window are kept beside the
budget, and the last block chosen may be read in part, its first rows; no layer is left dense (the
paper leaves out its first two, for the methods it compares with as well).
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from longread.cache import KVCache
from longread.policies.base import KernelPlan, Policy, Rereader
from longread.policies.bounds import BlockBounds, best_rows, block_rows, votes_of
from longread.policies.kept import kept_ranges, row_tensor


@dataclass
class Quest(Policy):
    """budget (None: all), sink_size, window_size and block_len, the paper's page, are rows."""

    budget: int | None
    sink_size: int = 4
    window_size: int = 256
    block_len: int = 16
    _bounds: BlockBounds | None = field(default=None, init=False, repr=False)

    def prepare(self, cache: KVCache, rereader: Rereader | None = None) -> None:
        if self._bounds is not None and self._bounds.cache is cache:
            self._bounds.rebuild()  # in place: a captured step goes on reading them
        else:
            self._bounds = BlockBounds(cache, self.block_len)

    def appended(self, layer_idx: int, start: int, end: int) -> None:
        assert self._bounds is not None, "prepare() comes first"
        self._bounds.append(layer_idx, start, end)

    def select(self, layer_idx: int, q: Tensor, num_rows: int) -> Tensor | None:
        assert self._bounds is not None, "prepare() comes first"
        ranges = kept_ranges(num_rows, self.turn, self.sink_size, self.window_size)
        num_kept = sum(end - start for start, end in ranges)
        if self.budget is None or self.budget >= num_rows - num_kept:
            return None
        blocks = torch.arange(-(-num_rows // self.block_len), device=q.device)
        votes = votes_of(self._bounds.scores(layer_idx, q[None], len(blocks)))
        question = self.turn.question_start, self.turn.question_end
        sizes = self.sink_size, self.window_size
        rows = block_rows(blocks, self.block_len, num_rows, question, *sizes)
        chosen = best_rows(votes[None], rows[None], self.budget, self.budget, self.budget)[0]
        kept = row_tensor(ranges, q.device)
        return torch.cat((kept.expand(len(chosen), -1), chosen), dim=1)

    def kernel_plan(self) -> KernelPlan | None:
        if self.budget is None:
            return KernelPlan()
        return KernelPlan(self.budget, self.sink_size, self.window_size, lister=self._bounds)

    def borrow_bounds(self, other: Quest) -> None:
        """Take over the bounds of a policy that was prepared on the same cache."""
        self._bounds = other._bounds
