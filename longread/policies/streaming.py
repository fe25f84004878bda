"""StreamingLLM (arXiv 2309.17453): the attention sinks and the newest rows; the rest is evicted.

Differences from the paper: the documents and the first question are read densely, as for every
policy here, and rows are dropped when the answer begins; keys keep the positions at which they were
read, where the paper counts positions inside what is left (the same as long as the documents fit
the window). Dropped rows stay in the slab, so no memory is saved, but nothing reads them again.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from torch import Tensor

from longread.cache import KVCache
from longread.policies.base import KernelPlan, Policy, Rereader, Turn
from longread.policies.kept import row_tensor

_NO_QUESTION = Turn()


@dataclass
class Streaming(Policy):
    """Reads the first `sink_size` rows and the last `window_size + budget` (None: all rows).

    The budget lengthens the window, so that the policies compare at the same number of rows.
    """

    evicts: ClassVar[bool] = True
    budget: int | None
    sink_size: int = 4
    window_size: int = 256
    _first_left: int = field(default=0, init=False, repr=False)  # of the rows behind the sinks
    _cache: KVCache | None = field(default=None, init=False, repr=False)
    _was_asked: bool = field(default=False, init=False, repr=False)

    def prepare(self, cache: KVCache, rereader: Rereader | None = None) -> None:
        self._cache = cache
        self._first_left, self._was_asked = 0, False

    def start_turn(self, turn: Turn) -> None:
        super().start_turn(turn)
        if self._was_asked and self._cache is not None:
            # Rows from the end on will be new ones: a turn before may have been undone.
            self._first_left = min(self._first_left, self._cache.length)
            self._evict(self._cache.length)  # what the last answer's end had dropped

    def observe(self, layer_idx: int, q: Tensor, start: int) -> None:
        self._was_asked = True

    def left(self, layer_idx: int, num_rows: int) -> Tensor | None:
        if self._first_left == 0 or self._cache is None:
            return None
        sinks, first = min(self.sink_size, num_rows), min(self._first_left, num_rows)
        return row_tensor([(0, sinks), (max(first, sinks), num_rows)], self._cache.k.device)[None]

    def select(self, layer_idx: int, q: Tensor, num_rows: int) -> Tensor | None:
        self._evict(num_rows)
        return self.left(layer_idx, num_rows)

    def kernel_plan(self) -> KernelPlan | None:
        if self.budget is None:
            return KernelPlan()
        num_rows = self._cache.length + 1 if self._cache is not None else 0
        if self._first_left > max(num_rows - self.window_size - self.budget, self.sink_size):
            return None  # after a turn was undone: the window would bring rows back
        return KernelPlan(0, self.sink_size, self.window_size + self.budget)

    def kernel_turn(self) -> Turn:
        return _NO_QUESTION  # it stays as long as it is in the window

    def _evict(self, num_rows: int) -> None:
        """Move the window to the end of rows [0, num_rows); it never moves back."""
        if self.budget is None:
            return
        first = num_rows - self.window_size - self.budget
        if first > self.sink_size:
            self._first_left = max(self._first_left, first)
