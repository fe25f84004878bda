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
from longread.policies.base import KernelPlan, Policy, Rereader, Turn
from longread.policies.hitters import HeavyHitters
from longread.policies.mass import column_mass

EXTRA_NAME = "attention-mass"


@dataclass
class H2O(Policy):
    """budget (None: all): heavy hitters; window_size: recent rows, both in rows per KV head."""

    evicts: ClassVar[bool] = True
    budget: int | None
    window_size: int = 256
    _left: HeavyHitters = field(init=False, repr=False, compare=False)
    _was_asked: bool = field(default=False, init=False, repr=False)
    _evicted: set[int] = field(default_factory=set, init=False, repr=False)  # layers
    _kernel_turn: Turn | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        self._left = HeavyHitters(self.window_size)

    def prepare(self, cache: KVCache, rereader: Rereader | None = None) -> None:
        self._left.cache = cache
        self._was_asked = False
        self._evicted.clear()
        self._kernel_turn = None
        if self.budget is None:
            return
        mass = document_mass(cache, rereader)
        # Rows of a conversation that was held under another policy begin with nothing.
        mass = torch.nn.functional.pad(mass, (0, cache.length - mass.shape[2]))
        rows = torch.arange(cache.length, device=mass.device).expand(mass.shape[1], -1)
        self._left.mass, self._left.rows = list(mass), [rows] * len(mass)

    def start_turn(self, turn: Turn) -> None:
        super().start_turn(turn)
        self._kernel_turn = None
        if self._was_asked:
            self._evict_all()

    def observe(self, layer_idx: int, q: Tensor, start: int) -> None:
        self._add(layer_idx, q, start)

    def left(self, layer_idx: int, num_rows: int) -> Tensor | None:
        if layer_idx not in self._evicted:
            return None
        rows = self._left.rows[layer_idx]
        return rows.masked_fill(rows >= num_rows, -1)

    def select(self, layer_idx: int, q: Tensor, num_rows: int) -> Tensor | None:
        if self.budget is None:
            return None
        self._evict(layer_idx, num_rows - 1)
        self._add(layer_idx, q[None], num_rows - 1)
        return self.left(layer_idx, num_rows)

    def kernel_plan(self) -> KernelPlan:
        if self.budget is None:
            return KernelPlan()
        return KernelPlan(self.budget + self.window_size + 1, lister=self._left)

    def kernel_turn(self) -> Turn:
        """No row is kept whatever its sum: the question competes, and recent rows are listed."""
        if self.budget is None:
            return self.turn
        if self._kernel_turn is None:
            num_left = float(torch.stack([(rows >= 0).sum() for rows in self._left.rows]).sum())
            num_left /= sum(rows.shape[0] for rows in self._left.rows)
            cache = self._left.cache
            assert cache is not None, "prepare() comes first"
            self._evict_all()
            self._evicted.update(range(len(self._left.rows)))  # or a step will
            self._kernel_turn = Turn(num_gone=cache.length - num_left)
        return self._kernel_turn

    def _add(self, layer_idx: int, q: Tensor, start: int) -> None:
        """Take rows [start, start + T) in and add their queries' attention. q: [T, H_q, D]."""
        if self.budget is None:
            return
        cache = self._left.cache
        assert cache is not None and self._left.rows, "prepare() comes first"
        self._was_asked = True
        rows, mass = self._left.rows[layer_idx], self._left.mass[layer_idx]
        undone = rows >= start
        rows, mass = rows.masked_fill(undone, -1), mass.masked_fill(undone, float("-inf"))
        own = torch.arange(start, start + q.shape[0], device=rows.device).expand(rows.shape[0], -1)
        rows = torch.cat((rows, own), dim=1)
        mass = torch.cat((mass, mass.new_zeros(own.shape)), dim=1)
        k = cache.k[layer_idx]
        k = k.gather(1, rows.clamp(min=0)[..., None].expand(-1, -1, k.shape[2]))
        added = column_mass(q, k, rows.shape[1] - q.shape[0], rows < 0)
        self._left.rows[layer_idx], self._left.mass[layer_idx] = rows, mass + added

    def _evict_all(self) -> None:
        for layer_idx, rows in enumerate(self._left.rows):
            self._evict(layer_idx, rows.amax() + 1)

    def _evict(self, layer_idx: int, num_rows: int | Tensor) -> None:
        """Drop the lightest of rows [0, num_rows) that are over the budget."""
        rows, mass = self._left.rows[layer_idx], self._left.mass[layer_idx]
        size = (self.budget or 0) + self.window_size
        if rows.shape[1] <= size:
            return
        worth = mass.masked_fill(rows >= num_rows - self.window_size, float("inf"))
        stays = torch.topk(worth, size, dim=1, sorted=False).indices.sort(dim=1).values
        self._left.rows[layer_idx] = rows.gather(1, stays)
        self._left.mass[layer_idx] = mass.gather(1, stays)
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
