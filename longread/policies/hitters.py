"""The rows that H2O has left, with the attention that they got, and how a captured step goes on
with them (arXiv 2306.14048; the rule is h2o.py's).
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


class HeavyHitters:
    """Of one policy's answers, for each layer: the rows that are left, [H_kv, n] int64 with -1 for
    empty places, and their sums [H_kv, n] fp32, -inf there.

    After a step these are views of what the step goes on with.
    """

    def __init__(self, window_size: int) -> None:
        self.window_size = window_size
        self.cache: KVCache | None = None
        self.rows: list[Tensor] = []
        self.mass: list[Tensor] = []

    @property
    def kind(self) -> Hashable:
        return HeavyHitters

    def listing(self, branches: Mapping[int, KernelPlan], kept: Kept) -> _Listing:
        return _Listing(branches, kept)


class _Listing:
    """A policies.base.Listing. A plan's budget has room for all rows that a token reads: heavy and
    recent ones and its own, which takes the place of the lightest that may go.
    """

    reselect = 1

    def __init__(self, branches: Mapping[int, KernelPlan], kept: Kept) -> None:
        self._hitters = []
        for plan in branches.values():
            assert isinstance(plan.lister, HeavyHitters), "plans of one kind"
            self._hitters.append(plan.lister)
        assert len({id(one) for one in self._hitters}) == len(branches), "each has its own sums"
        cache = self._hitters[0].cache
        assert cache is not None, "prepare() comes first"
        self._k, self._kept = cache.k, kept
        device, num_layers, num_kv_heads = cache.k.device, cache.num_layers, cache.k.shape[1]
        num_rows = cache.capacity - (kept.num_branches - 1) * kept.branch_rows
        self._num_places = [min(plan.budget or 0, num_rows) for plan in branches.values()]
        shape = (num_layers, len(branches), num_kv_heads, max(self._num_places))
        self._rows = torch.full(shape, -1, device=device)
        self._mass = torch.full(shape, torch.inf, device=device)  # what is never the lightest
        self._members = list(branches)
        self._branches = torch.tensor(self._members, device=device)
        windows = [one.window_size for one in self._hitters]
        self._windows = torch.tensor(windows, device=device)
        self._row = self._first_recent = self._num_shared = self._branches

    @property
    def state(self) -> Sequence[Tensor]:
        return self._rows, self._mass

    def fits(self) -> bool:
        return True  # the cache is the step's matter

    def start_answer(self, rows: Sequence[int], num_shared: int) -> None:
        """Take over what the policies have left; they see from now on what the steps make of it."""
        for place, branch in enumerate(self._members):
            hitters, num_places = self._hitters[place], self._num_places[place]
            own_rows, own_mass = torch.stack(hitters.rows), torch.stack(hitters.mass)
            undone = own_rows >= rows[branch]
            own_rows.masked_fill_(undone, -1)
            own_mass.masked_fill_(undone, -torch.inf)
            num_own = min(own_rows.shape[2], num_places)
            fullest = own_mass.topk(num_own, dim=2).indices  # others are empty
            left_rows = self._rows[:, place, :, :num_places].fill_(-1)
            left_mass = self._mass[:, place, :, :num_places].fill_(-torch.inf)
            left_rows[..., :num_own] = own_rows.gather(2, fullest)
            left_mass[..., :num_own] = own_mass.gather(2, fullest)
            hitters.rows, hitters.mass = list(left_rows), list(left_mass)

    def start_step(self) -> None:
        kept, branches = self._kept, self._branches
        row = kept.state[branches, 0].long()
        num_shared = torch.zeros_like(row)
        if kept.branches is not None:
            num_shared = kept.branches[branches, 0].long()
        recent = (row - self._windows).clamp(min=0)  # an empty place, -1, is not recent
        self._row, self._first_recent, self._num_shared = (
            numbers[:, None, None] for numbers in (row, recent, num_shared)
        )

    def list_rows(self, layer_idx: int, q: Tensor, chosen: Tensor) -> None:
        rows, mass, k = self._rows[layer_idx], self._mass[layer_idx], self._k[layer_idx]
        num_branches, num_kv_heads, num_places = rows.shape
        worth = mass.masked_fill(rows >= self._first_recent, torch.inf)
        place = worth.argmin(dim=2, keepdim=True)
        rows.scatter_(2, place, self._row.expand_as(place))
        mass.scatter_(2, place, 0.0)
        empty = rows < 0
        branches = self._branches[:, None, None]
        found = slab_rows(rows, self._num_shared, branches, self._kept.branch_rows)
        heads = torch.arange(num_kv_heads, device=k.device)[:, None]
        left_k = k[heads, found.clamp(min=0)].flatten(0, 1)  # [B H_kv, n, D]
        own = q[self._branches] * q.shape[-1] ** -0.5
        scores = ops.score(own.view(len(left_k), -1, q.shape[-1]), left_k)
        scores = scores.view(num_branches, num_kv_heads, -1, num_places)
        scores = scores.masked_fill(empty[:, :, None], -torch.inf)
        mass += torch.softmax(scores, dim=-1).sum(dim=2)
        chosen[self._branches, :, :num_places] = rows.to(chosen.dtype)
