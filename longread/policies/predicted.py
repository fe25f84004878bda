"""Rows chosen by what a predictor says of them (TokenButler, arXiv 2503.07518).

Owns the small keys of one cache, projected in batches when rows are to be chosen, and the choice,
for the step in torch operations and for the captured one; not the predictor, which is predictor.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from longread_kernels import dispatch as ops
from longread_kernels.tables import Kept
from torch import Tensor

from longread.cache import KVCache
from longread.policies.base import KernelPlan, Rereader
from longread.policies.bounds import votes_of
from longread.policies.kept import slab_rows
from longread.policies.predictor import DIM, Predictor, unturned

_CHUNK_ROWS = 8192
_IGNORED_BITS = 12  # of a vote's 23 after the point


class SmallKeys:
    """values: [L, H_kv, capacity, d'] in the cache's dtype, of each row where it has its key."""

    def __init__(self, cache: KVCache, predictor: Predictor, rereader: Rereader) -> None:
        self.cache = cache
        self.values = cache.k.new_empty(0)
        self._predictor = predictor.used_on(cache.k.device, cache.k.dtype)
        self._rereader = rereader
        self._producers = {group.start: i for i, group in enumerate(predictor.shape.groups)}
        self._groups = predictor.shape.groups
        self._num_done: list[int] = []
        self.rebuild()

    def rebuild(self) -> None:
        """Of the rows that the cache holds now, in place as long as it has not grown."""
        self._num_done = [0] * self.cache.num_layers
        for layer_idx in range(self.cache.num_layers):
            self.project(layer_idx, self.cache.length)

    def written(self, layer_idx: int, start: int) -> None:
        """Rows of a layer from `start` on are new."""
        self._num_done[layer_idx] = min(self._num_done[layer_idx], start)

    def project(self, layer_idx: int, end: int) -> None:
        """Bring rows [0, end) up to date."""
        self.reserve()
        for start in range(self._num_done[layer_idx], end, _CHUNK_ROWS):
            rows = torch.arange(start, min(start + _CHUNK_ROWS, end), device=self.values.device)
            self.put(layer_idx, rows, rows)
        self._num_done[layer_idx] = max(self._num_done[layer_idx], end)

    def put(self, layer_idx: int, rows: Tensor, places: Tensor) -> None:
        """Project some rows, which lie in these places of the slab; [n] int64 both."""
        cos, sin = self.turned_by(rows)
        k = self.cache.k[layer_idx][:, places].transpose(0, 1)
        plain = unturned(k, cos, sin).transpose(0, 1)
        small = self._predictor.small_keys(layer_idx, plain)
        self.values[layer_idx][:, places] = small.to(self.values.dtype)

    def queries(self, layer_idx: int, q: Tensor, rows: Tensor) -> dict[int, Tensor]:
        """Where the layer is a producer, the small queries [B, H_q, d'] of the layers it serves.

        q: [B, H_q, D] after RoPE, of tokens in these rows [B].
        """
        if layer_idx not in self._producers:
            return {}
        producer = self._producers[layer_idx]
        plain = unturned(q, *self.turned_by(rows))
        small = self._predictor.small_queries(producer, plain)
        return dict(zip(self._groups[producer], small, strict=True))

    def scores(self, layer_idx: int, small: Tensor, num_places: int) -> Tensor:
        """[B, H_kv, G, places] fp32. small: [B, H_q, d']."""
        values = self.values[layer_idx, :, :num_places]
        grouped = small.unflatten(1, (values.shape[0], -1)).transpose(0, 1)  # [H_kv, B, G, d']
        scores = ops.score(grouped.flatten(1, 2), values)
        return scores.unflatten(1, grouped.shape[1:3]).transpose(0, 1)

    def turned_by(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        return self._cos[rows], self._sin[rows]

    def reserve(self) -> None:
        """Make room for as many rows as the cache has."""
        old, (layers, heads, capacity, _) = self.values, self.cache.k.shape
        num_old = old.shape[2] if old.numel() else 0
        if num_old < capacity:
            with torch.inference_mode(False):  # made in a step, written to outside of it
                self.values = old.new_zeros((layers, heads, capacity, DIM))
            if num_old:
                self.values[:, :, :num_old] = old
            num_rows = min(capacity, self._rereader.window)
            self._cos, self._sin = self._rereader.rope_rows(0, num_rows)


def chosen_rows(
    scores: Tensor,
    can_choose: Tensor,
    budget: int | Tensor,
    most: int,
    num_places: int,
    neighbours: int,
) -> Tensor:
    """Each KV head's best rows, best first: int64 [B, H_kv, num_places] with -1 for empty places.

    The heads of a KV head vote with the softmax of their scores, summed. A row counts by the best
    vote among itself and `neighbours` rows on either side, so that those around a row that is
    chosen come with it, in the same budget. scores: [B, H_kv, G, S] fp32; can_choose: [B, S] bool;
    budget: `most` at most, or [B, 1, 1].
    """
    hidden = ~can_choose[:, None]
    scores = scores.masked_fill(hidden[:, None], float("-inf"))
    votes = votes_of(scores.flatten(0, 1)).unflatten(0, scores.shape[:2])
    if neighbours:
        votes = F.max_pool1d(votes, 2 * neighbours + 1, 1, neighbours)
        votes = votes.masked_fill(hidden, float("-inf"))
    best = _ordered(votes).topk(min(most, votes.shape[2]), dim=2).indices
    ranks = torch.arange(best.shape[2], device=votes.device)
    is_chosen = (votes.gather(2, best) > float("-inf")) & (ranks < budget)
    return F.pad(best.masked_fill(~is_chosen, -1), (0, num_places - best.shape[2]), value=-1)


def _ordered(votes: Tensor) -> Tensor:
    """Whole numbers in the order of the votes [..., S] fp32; of equal ones the last is largest.

    Votes count as equal that are so to three digits: layer 0 sees no difference between the places
    of one word, and what is read must not be left to rounding.
    """
    bits = votes.view(torch.int32)
    ascending = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long()
    return (ascending >> _IGNORED_BITS << 32) + torch.arange(votes.shape[-1], device=votes.device)


@dataclass(frozen=True)
class Chooser:
    """A policies.base.Lister: rows of small keys, chosen anew every `reselect` steps."""

    keys: SmallKeys
    neighbours: int
    reselect: int

    @property
    def kind(self) -> Chooser:
        return self

    def listing(self, branches: Mapping[int, KernelPlan], kept: Kept) -> _Listing:
        return _Listing(self, branches, kept)


class _Listing:
    """A policies.base.Listing. A step that chooses projects the rows since the last that did."""

    state: Sequence[Tensor] = ()  # keys are projected anew from the cache's

    def __init__(self, chooser: Chooser, branches: Mapping[int, KernelPlan], kept: Kept) -> None:
        self._chooser, self._keys, self._kept = chooser, chooser.keys, kept
        self._keys.reserve()
        self._values, self.reselect = self._keys.values, chooser.reselect
        device, cache = self._values.device, self._keys.cache
        self._capacity = cache.capacity
        self._num_rows = cache.capacity - (kept.num_branches - 1) * kept.branch_rows

        def column(*numbers: int) -> Tensor:
            return torch.tensor(numbers, device=device)[:, None]

        plans = branches.values()
        self._members, self._branches = list(branches), column(*branches)
        budgets = [min(plan.budget or 0, self._num_rows) for plan in plans]
        self._most, self._budgets = max(budgets), column(*budgets)[..., None]
        self._sinks = column(*(plan.sink_size for plan in plans))
        self._windows = column(*(plan.window_size for plan in plans))
        self._small: dict[int, Tensor] = {}
        self._row = self._num_shared = self._can_choose = self._places = self._branches

    def fits(self) -> bool:
        return self._keys.values is self._values

    def start_answer(self, rows: Sequence[int], num_shared: int) -> None:
        """Project the rows that the tokens before these have written."""
        own: list[tuple[Tensor, Tensor]] = []  # rows and their places
        if self._kept.num_branches == 1:
            num_shared = rows[0]
        else:
            for branch in self._members:
                mine = torch.arange(num_shared, rows[branch], device=self._values.device)
                places = slab_rows(mine, num_shared, branch, self._kept.branch_rows)
                own.append((mine, places))
        for layer_idx in range(self._keys.cache.num_layers):
            self._keys.project(layer_idx, num_shared)
            self._keys.written(layer_idx, num_shared)
            for mine, places in own:
                self._keys.put(layer_idx, mine, places)

    def start_step(self) -> None:
        """What is the same for all layers: which rows can be chosen, and where they lie."""
        kept, branches = self._kept, self._branches[:, 0]
        self._row, question, question_end = kept.state[branches].long().split(1, dim=1)
        self._num_shared = torch.zeros_like(self._row)
        if kept.branches is not None:
            self._num_shared = kept.branches[branches, :1].long()
        rows = torch.arange(self._num_rows, device=self._row.device)
        can_choose = (rows >= self._sinks) & (rows <= self._row - self._windows)
        self._can_choose = can_choose & ((rows < question) | (rows >= question_end))
        self._places = self._slab(rows[None])

    def list_rows(self, layer_idx: int, q: Tensor, chosen: Tensor) -> None:
        branches, keys = self._branches[:, 0], self._keys
        newest = self._row - torch.arange(self.reselect, device=self._row.device)
        newest = newest.clamp(min=0)
        keys.put(layer_idx, newest.flatten(), self._slab(newest).flatten())
        self._small |= keys.queries(layer_idx, q[branches], self._row[:, 0])
        scores = keys.scores(layer_idx, self._small[layer_idx], self._capacity)
        if self._kept.num_branches > 1:
            places = self._places[:, None, None].expand(*scores.shape[:3], -1)
            scores = scores.gather(3, places)
        found = chosen_rows(
            scores,
            self._can_choose,
            self._budgets,
            self._most,
            chosen.shape[2],
            self._chooser.neighbours,
        )
        chosen[branches] = found.to(chosen.dtype)

    def _slab(self, rows: Tensor) -> Tensor:
        return slab_rows(rows, self._num_shared, self._branches, self._kept.branch_rows)
