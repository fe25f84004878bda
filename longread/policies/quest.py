"""Quest (arXiv 2406.10774): blocks of rows scored by an upper bound of q . k; nothing is evicted.

Of each block the smallest and largest key of every channel are kept: the sum over channels of the
larger of q_d * min_d and q_d * max_d is at least q . k of every row in the block. Differences from
the paper, whose models have as many KV heads as query heads: the heads of a KV head vote for its
blocks with the softmax of their bounds, summed; sinks, question and window are kept beside the
budget; no layer is left dense (the paper leaves out its first two, for the methods it compares
with as well).
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from longread_kernels import dispatch as ops
from torch import Tensor

from longread.cache import KVCache
from longread.policies.base import Policy, Rereader
from longread.policies.kept import kept_ranges, row_tensor


@dataclass
class Quest(Policy):
    """budget (None: all), sink_size, window_size and block_len, the paper's page, are rows."""

    budget: int | None
    sink_size: int = 4
    window_size: int = 256
    block_len: int = 16
    _cache: KVCache | None = field(default=None, init=False, repr=False)
    _bounds: Tensor = field(default=torch.empty(0), init=False, repr=False)

    def prepare(self, cache: KVCache, rereader: Rereader | None = None) -> None:
        self._cache = cache
        layers, heads, _, head_dim = cache.k.shape
        self._bounds = cache.k.new_empty((2, layers, heads, 0, head_dim))  # smallest, largest
        for layer_idx in range(layers):
            self.appended(layer_idx, 0, cache.length)

    def appended(self, layer_idx: int, start: int, end: int) -> None:
        assert self._cache is not None, "prepare() comes first"
        if start == end:
            return
        self._reserve(-(-self._cache.capacity // self.block_len))
        first, last = start // self.block_len, -(-end // self.block_len)
        k = self._cache.k[layer_idx, :, first * self.block_len : end]
        num_missing = last * self.block_len - end  # the last row stands in for those to come
        k = torch.cat((k, k[:, -1:].expand(-1, num_missing, -1)), dim=1)
        blocks = k.unflatten(1, (last - first, self.block_len))  # [H_kv, blocks, block_len, D]
        self._bounds[0, layer_idx, :, first:last] = blocks.amin(dim=2)
        self._bounds[1, layer_idx, :, first:last] = blocks.amax(dim=2)

    def select(self, layer_idx: int, q: Tensor, num_rows: int) -> Tensor | None:
        ranges = kept_ranges(num_rows, self.turn, self.sink_size, self.window_size)
        num_kept = sum(end - start for start, end in ranges)
        if self.budget is None or self.budget >= num_rows - num_kept:
            return None
        votes = ops.vote(torch.log_softmax(self._scores(layer_idx, q, num_rows), dim=-1), "group")
        # A block's rows have the same vote; the last one chosen may be read in part.
        votes = votes.repeat_interleave(self.block_len, dim=1)[:, :num_rows]
        return ops.select_rows(votes, row_tensor(ranges, q.device), self.budget)

    def _scores(self, layer_idx: int, q: Tensor, num_rows: int) -> Tensor:
        """Upper bounds of the attention logits, [H_kv, G, blocks] fp32. q: [H_q, D]."""
        num_blocks = -(-num_rows // self.block_len)
        smallest, largest = self._bounds[:, layer_idx, :, :num_blocks]
        grouped = q.reshape(smallest.shape[0], -1, q.shape[-1]) * q.shape[-1] ** -0.5
        upper = ops.score(grouped.clamp(min=0), largest)
        return upper + ops.score(grouped.clamp(max=0), smallest)

    def _reserve(self, num_blocks: int) -> None:
        old = self._bounds
        if old.shape[3] < num_blocks:
            self._bounds = old.new_zeros((*old.shape[:3], num_blocks, old.shape[4]))
            self._bounds[:, :, :, : old.shape[3]] = old
