"""H2O (arXiv 2306.14048): heavy hitters, by accumulated attention, and recent rows.

Each KV head sums for every row the attention that all queries so far paid it, and before each step
evicts all but the newest `window_size` rows and the `budget` heaviest of the others; questions and
answers add their attention and compete like all rows. Differences from the paper: the documents and
the first question are read densely and rows go when the answer begins; heads that share a KV head
share their sums; the paper halves one budget between heavy and recent rows.

The sums over the documents' own queries need these queries, which reading does not keep: they are
made by reading the documents a second time, which costs what the first time did and as much again
for the probabilities, and are stored with the cache entry (L * H_kv * S fp32). Evicted rows stay in
the slab, so no memory is saved.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from longread.cache import KVCache
from longread.policies.base import Policy, Rereader, Turn
from longread.policies.mass import column_mass

EXTRA_NAME = "attention-mass"


@dataclass
class H2O(Policy):
    """budget (None: all): heavy hitters; window_size: recent rows, both in rows per KV head."""

    evicts: ClassVar[bool] = True
    budget: int | None
    window_size: int = 256
    _cache: KVCache | None = field(default=None, init=False, repr=False)
    _num_read: int = field(default=0, init=False, repr=False)
    # For each layer the rows that are left, [H_kv, n] int64 with -1 for undone ones, and their sums
    # [H_kv, n] fp32.
    _rows: list[Tensor] = field(default_factory=list, init=False, repr=False)
    _mass: list[Tensor] = field(default_factory=list, init=False, repr=False)
    _evicted: set[int] = field(default_factory=set, init=False, repr=False)  # layers

    def prepare(self, cache: KVCache, rereader: Rereader | None = None) -> None:
        self._cache = cache
        self._num_read = 0
        self._evicted.clear()
        if self.budget is None:
            return
        mass = document_mass(cache, rereader)
        # Rows of a conversation that was held under another policy begin with nothing.
        mass = torch.nn.functional.pad(mass, (0, cache.length - mass.shape[2]))
        rows = torch.arange(cache.length, device=mass.device).expand(mass.shape[1], -1)
        self._mass, self._rows = list(mass), [rows] * len(mass)

    def start_turn(self, turn: Turn) -> None:
        super().start_turn(turn)
        for layer_idx in range(len(self._rows) if self._num_read else 0):
            self._evict(layer_idx, self._num_read)

    def observe(self, layer_idx: int, q: Tensor, start: int) -> None:
        self._add(layer_idx, q, start)

    def left(self, layer_idx: int, num_rows: int) -> Tensor | None:
        if layer_idx not in self._evicted:
            return None
        rows = self._rows[layer_idx]
        return rows.masked_fill(rows >= num_rows, -1)

    def select(self, layer_idx: int, q: Tensor, num_rows: int) -> Tensor | None:
        if self.budget is None:
            return None
        self._evict(layer_idx, num_rows - 1)
        self._add(layer_idx, q[None], num_rows - 1)
        return self.left(layer_idx, num_rows)

    def _add(self, layer_idx: int, q: Tensor, start: int) -> None:
        """Take rows [start, start + T) in and add their queries' attention. q: [T, H_q, D]."""
        if self.budget is None:
            return
        assert self._cache is not None and self._rows, "prepare() comes first"
        self._num_read = start + q.shape[0]
        rows, mass = self._rows[layer_idx], self._mass[layer_idx]
        undone = rows >= start
        rows, mass = rows.masked_fill(undone, -1), mass.masked_fill(undone, float("-inf"))
        own = torch.arange(start, self._num_read, device=rows.device).expand(rows.shape[0], -1)
        rows = torch.cat((rows, own), dim=1)
        mass = torch.cat((mass, mass.new_zeros(own.shape)), dim=1)
        k = self._cache.k[layer_idx]
        k = k.gather(1, rows.clamp(min=0)[..., None].expand(-1, -1, k.shape[2]))
        added = column_mass(q, k, rows.shape[1] - q.shape[0], rows < 0)
        self._rows[layer_idx], self._mass[layer_idx] = rows, mass + added

    def _evict(self, layer_idx: int, num_rows: int) -> None:
        """Drop the lightest of rows [0, num_rows) that are over the budget."""
        rows, mass = self._rows[layer_idx], self._mass[layer_idx]
        size = (self.budget or 0) + self.window_size
        if rows.shape[1] <= size:
            return
        worth = mass.masked_fill(rows >= num_rows - self.window_size, float("inf"))
        stays = torch.topk(worth, size, dim=1, sorted=False).indices.sort(dim=1).values
        self._rows[layer_idx], self._mass[layer_idx] = rows.gather(1, stays), mass.gather(1, stays)
        self._evicted.add(layer_idx)


def document_mass(cache: KVCache, rereader: Rereader | None) -> Tensor:
    """Attention that each of the documents' rows gets from their own queries, [L, H_kv, S] fp32.

    From the store entry, or by a second reading, and then kept there.
    """
    by_products = cache.by_products
    stored = by_products.read_extra(EXTRA_NAME) if by_products is not None else None
    if stored is not None:
        return stored["mass"].to(cache.k.device)
    assert rereader is not None, "the attention mass of the documents needs a second reading"
    observer = _MassObserver(cache, torch.zeros(cache.k.shape[:3], device=cache.k.device))
    rereader.documents(cache, observer)
    mass = observer.mass[:, :, : rereader.num_rows].contiguous()
    if by_products is not None:
        by_products.write_extra(EXTRA_NAME, {"mass": mass})
    return mass


@dataclass
class _MassObserver(Policy):
    """Sums attention while it is shown queries. mass: [L, H_kv, capacity] fp32."""

    cache: KVCache
    mass: Tensor

    def observe(self, layer_idx: int, q: Tensor, start: int) -> None:
        end = start + q.shape[0]
        k = self.cache.k[layer_idx, :, :end]
        self.mass[layer_idx, :, :end] += column_mass(q, k, start)
