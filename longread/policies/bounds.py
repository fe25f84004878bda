"""Bounds of the keys of each block of rows, and how rows are listed by them.

Quest (arXiv 2406.10774) scores a block by an upper bound of q . k over its rows. Owns the bounds of
one cache, for the step in torch operations and for the captured one, where each branch has blocks
of its own for the rows behind the shared ones; not the rule, which is quest.py's.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence

import torch
from longread_kernels import dispatch as ops
from longread_kernels.tables import Kept
from torch import Tensor

from longread.cache import KVCache
from longread.policies.base import KernelPlan
from longread.policies.kept import slab_rows

_MOST_CUT = 4  # blocks of which some rows are kept: sinks and window cut one each, the question two


class BlockBounds:
    """Of each block of `block_len` rows the largest and smallest key of every channel.

    values: [L, H_kv, places, 2 D], block i in place i.
    """

    def __init__(self, cache: KVCache, block_len: int) -> None:
        self.cache = cache
        self.block_len = block_len
        self.values = cache.k.new_empty(0)
        self.rebuild()

    @property
    def kind(self) -> Hashable:
        return self

    def rebuild(self) -> None:
        """Of the rows that the cache holds now, in place as long as it has not grown."""
        for layer_idx in range(self.cache.num_layers):
            self.append(layer_idx, 0, self.cache.length)

    def append(self, layer_idx: int, start: int, end: int) -> None:
        """Rows [start, end) of one layer have been written."""
        self.reserve(-(-self.cache.capacity // self.block_len))
        first = start // self.block_len
        if start < end:
            k = self.cache.k[layer_idx, :, first * self.block_len : end]
            bounds = _bounds(k, self.block_len)
            self.values[layer_idx, :, first : first + bounds.shape[1]] = bounds

    def reserve(self, num_places: int) -> None:
        """Make room; a listing that was captured fits no longer where there was too little."""
        old, (layers, heads, _, head_dim) = self.values, self.cache.k.shape
        num_old = old.shape[2] if old.numel() else 0
        if num_old < num_places:
            with torch.inference_mode(False):  # made in a step, written to outside of it
                self.values = old.new_zeros((layers, heads, num_places, 2 * head_dim))
            if num_old:
                self.values[:, :, :num_old] = old

    def scores(self, layer_idx: int, q: Tensor, num_places: int) -> Tensor:
        """Upper bounds of the attention logits, [B H_kv, G, places] fp32. q: [B, H_q, D]."""
        values = self.values[layer_idx, :, :num_places]
        num_kv_heads, head_dim = values.shape[0], q.shape[-1]
        q = q.unflatten(1, (num_kv_heads, -1)).transpose(0, 1) * head_dim**-0.5  # [H_kv, B, G, D]
        q = torch.cat((q.clamp(min=0), q.clamp(max=0)), dim=-1)
        scores = ops.score(q.flatten(1, 2), values).unflatten(1, q.shape[1:3])
        return scores.transpose(0, 1).flatten(0, 1)

    def listing(self, branches: Mapping[int, KernelPlan], kept: Kept) -> _Listing:
        return _Listing(self, branches, kept)


def _bounds(k: Tensor, block_len: int) -> Tensor:
    """Largest and smallest keys side by side, [..., blocks, 2 D]. k: [..., n, D], n > 0."""
    num_missing = -k.shape[-2] % block_len
    if num_missing:  # the last row stands in for those to come
        k = torch.cat((k, k[..., -1:, :].expand(*k.shape[:-2], num_missing, -1)), dim=-2)
    blocks = k.unflatten(-2, (-1, block_len))
    return torch.cat((blocks.amax(dim=-2), blocks.amin(dim=-2)), dim=-1)


def block_rows(
    blocks: Tensor,
    block_len: int,
    num_rows: int | Tensor,
    question: tuple[int | Tensor, int | Tensor],
    sink_size: int | Tensor,
    window_size: int | Tensor,
) -> Tensor:
    """The rows of blocks [..., n], [..., n, block_len] int64, -1 for those that are kept anyway.

    Numbers may be tensors, a branch's each.
    """
    rows = blocks[..., None] * block_len + torch.arange(block_len, device=blocks.device)
    kept = (rows < sink_size) | (rows >= num_rows - window_size)
    kept |= (rows >= question[0]) & (rows < question[1])
    return rows.masked_fill(kept, -1)


def best_rows(
    votes: Tensor, rows: Tensor, budget: int | Tensor, num_places: int, most: int
) -> Tensor:
    """Rows of the blocks with the most votes, up to the budget: of the last block the first ones.

    votes: [B, H_kv, blocks] fp32; rows: [B, blocks, block_len], as `block_rows` gives them; budget:
    `most` at most, or [B, 1, 1]. Returns int64 [B, H_kv, num_places] with -1 for empty places.
    """
    num_blocks, block_len = rows.shape[1:]
    votes = votes.masked_fill((rows < 0).all(dim=-1)[:, None], float("-inf"))
    num_best = min(num_blocks, -(-most // block_len) + _MOST_CUT)
    best = votes.topk(num_best, dim=-1).indices  # the heaviest first
    every = torch.arange(len(rows), device=rows.device)[:, None, None]
    listed = rows[every, best].flatten(2)  # [B, H_kv, num_best * block_len]
    ranks = (listed >= 0).cumsum(dim=-1)
    places = torch.where((listed >= 0) & (ranks <= budget), ranks - 1, num_places)
    found = listed.new_full((*votes.shape[:2], num_places + 1), -1)
    return found.scatter_(2, places, listed)[..., :num_places]  # the last place is cut off


class _Listing:
    """A policies.base.Listing by block bounds.

    From the block with the first row that is not shared, a branch has blocks of its own, those of
    the first one in place and those of the others behind all of these.
    """

    reselect = 1
    state: Sequence[Tensor] = ()  # a step's bounds are made anew from the keys

    def __init__(self, bounds: BlockBounds, branches: Mapping[int, KernelPlan], kept: Kept) -> None:
        self._bounds, self._kept = bounds, kept
        block_len, capacity = bounds.block_len, bounds.cache.capacity
        num_rows = capacity - (kept.num_branches - 1) * kept.branch_rows
        self._num_own = -(-kept.branch_rows // block_len) + 1
        num_places = -(-num_rows // block_len) + (len(branches) - 1) * self._num_own
        bounds.reserve(num_places)
        self._values, self._num_places = bounds.values, num_places

        def column(*numbers: int) -> Tensor:
            return torch.tensor(numbers, device=bounds.values.device)[:, None]

        self._members, self._branches = list(branches), column(*branches)
        plans = branches.values()
        budgets = [min(plan.budget or 0, num_rows) for plan in plans]
        self._most, self._budgets = max(budgets), column(*budgets)[..., None]
        self._sinks = column(*(plan.sink_size for plan in plans))[..., None]
        self._windows = column(*(plan.window_size for plan in plans))[..., None]
        self._shifts = column(*(i * self._num_own for i in range(len(branches))))
        self._rows = self._inside = self._token_rows = self._token_places = self._branches

    def fits(self) -> bool:
        return self._bounds.values is self._values

    def start_answer(self, rows: Sequence[int], num_shared: int) -> None:
        """Make the bounds of the branches' own rows; those of one answer alone are up to date."""
        if self._kept.num_branches == 1:
            return
        block_len, k = self._bounds.block_len, self._bounds.cache.k
        first = num_shared // block_len
        for place, branch in enumerate(self._members):
            if rows[branch] > first * block_len:
                own = torch.arange(first * block_len, rows[branch], device=k.device)
                own = slab_rows(own, num_shared, branch, self._kept.branch_rows)
                made = _bounds(k[:, :, own], block_len)
                start = first + place * self._num_own
                self._values[:, :, start : start + made.shape[2]] = made

    def start_step(self) -> None:
        """What is the same for all layers: the branches' blocks, and where the tokens' lie."""
        block_len, kept = self._bounds.block_len, self._kept
        branches = self._branches[:, 0]
        row, question, question_end = kept.state[branches].long().split(1, dim=1)  # [B, 1] each
        num_shared = torch.zeros_like(row)
        if kept.branches is not None:
            num_shared = kept.branches[branches, :1].long()
        first, last = num_shared // block_len, row // block_len
        places = torch.arange(self._num_places, device=row.device)
        own = places - self._shifts
        blocks = torch.where(places < first, places, own)
        self._inside = (places < first) | ((own >= first) & (own <= last))
        rows = block_rows(
            blocks,
            block_len,
            row[..., None] + 1,
            (question[..., None], question_end[..., None]),
            self._sinks,
            self._windows,
        )
        self._rows = rows.masked_fill(~self._inside[..., None], -1)
        token_rows = last * block_len + torch.arange(block_len, device=row.device)
        token_rows = torch.minimum(token_rows, row)
        self._token_rows = slab_rows(token_rows, num_shared, self._branches, kept.branch_rows)
        self._token_places = (last + self._shifts)[:, 0]

    def list_rows(self, layer_idx: int, q: Tensor, chosen: Tensor) -> None:
        branches = self._branches[:, 0]
        k = self._bounds.cache.k[layer_idx][:, self._token_rows]  # [H_kv, B, block_len, D]
        made = _bounds(k, self._bounds.block_len)[:, :, 0]
        self._values[layer_idx][:, self._token_places] = made
        scores = self._bounds.scores(layer_idx, q[branches], self._num_places)
        outside = ~self._inside[:, None, None]
        scores = scores.unflatten(0, (len(branches), -1)).masked_fill(outside, float("-inf"))
        votes = votes_of(scores.flatten(0, 1)).unflatten(0, scores.shape[:2])
        found = best_rows(votes, self._rows, self._budgets, chosen.shape[2], self._most)
        chosen[branches] = found.to(chosen.dtype)


def votes_of(scores: Tensor) -> Tensor:
    """The heads of a set vote with the softmax of their bounds, summed; in logarithms.

    scores: [sets, G, blocks] fp32; returns [sets, blocks] fp32.
    """
    return ops.vote(torch.log_softmax(scores, dim=-1), "group")
