"""What the policies share that judge the prompt once, when the first question has been read.

The documents and the first question are read densely, as for every policy here. Then each KV head
of each layer keeps sinks, question, window and the rows that `choose` names, and the others are
gone: neither answers nor later questions read them. Later rows all stay. Dropped rows still lie in
the slab, so no memory is saved.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from longread.cache import KVCache
from longread.policies.base import Policy, Rereader, Turn
from longread.policies.kept import Ranges, kept_ranges, row_tensor

_EVER = 2**31 - 1  # a row past all others


@dataclass
class PromptEvicting(Policy):
    """A subclass is told of the prompt by `observe` and says in `choose` what is worth keeping.

    budget (None: all), sink_size, window_size are rows.
    """

    evicts: ClassVar[bool] = True
    budget: int | None
    sink_size: int = 4
    window_size: int = 256
    _cache: KVCache | None = field(default=None, init=False, repr=False)
    _num_judged: int = field(default=0, init=False, repr=False)  # rows of the prompt
    _kept: Ranges = field(default_factory=list, init=False, repr=False)  # of the judged prompt
    _kernel_turn: Turn | None = field(default=None, init=False, repr=False)
    # Layers that were judged, None where all rows were kept; [H_kv, n] int64.
    _left: dict[int, Tensor | None] = field(default_factory=dict, init=False, repr=False)

    def prepare(self, cache: KVCache, rereader: Rereader | None = None) -> None:
        self._cache = cache
        self._num_judged = 0
        self._left.clear()
        self._kept.clear()
        self._kernel_turn = None

    def start_turn(self, turn: Turn) -> None:
        for layer_idx in range(self._cache.num_layers if self._cache and self._num_judged else 0):
            self._judge(layer_idx)  # where the last turn's answer had no token
        super().start_turn(turn)

    def observe(self, layer_idx: int, q: Tensor, start: int) -> None:
        if layer_idx not in self._left:
            self._num_judged = start + q.shape[0]

    def left(self, layer_idx: int, num_rows: int) -> Tensor | None:
        rows = self._left.get(layer_idx)
        if rows is None:
            return None
        later = torch.arange(min(self._num_judged, num_rows), num_rows, device=rows.device)
        rows = torch.cat((rows, later.expand(rows.shape[0], -1)), dim=1)
        return rows.masked_fill(rows >= num_rows, -1)  # the turn that was judged may be undone

    def select(self, layer_idx: int, q: Tensor, num_rows: int) -> Tensor | None:
        if not self._num_judged:  # no question was read
            self._num_judged = num_rows
        self._judge(layer_idx)
        return self.left(layer_idx, num_rows)

    def kernel_turn(self) -> Turn:
        """Sinks, and all rows from the question or the window on; the other ones left are listed.

        Judges the prompt, if nothing has yet.
        """
        if self.budget is None:
            return self.turn  # all rows are read, and none is listed
        if self._kernel_turn is None:
            assert self._cache is not None, "prepare() comes first"
            self._num_judged = self._num_judged or self._cache.length + 1
            for layer_idx in range(self._cache.num_layers):
                self._judge(layer_idx)
            assert len(self._kept) <= 2, "the question ends the prompt"
            num_kept = sum(end - start for start, end in self._kept)
            first_kept = self._kept[-1][0]
            every = torch.arange(self.sink_size, first_kept, device=self._cache.k.device)
            every = every.expand(self._cache.k.shape[1], -1)
            listed = [
                every if r is None else r[:, num_kept:] for _, r in sorted(self._left.items())
            ]
            num_listed = float(torch.stack([(rows >= 0).sum() for rows in listed]).sum())
            num_listed /= len(listed) * every.shape[0]
            self._kernel_turn = Turn(first_kept, _EVER, tuple(listed), num_listed)
        return self._kernel_turn

    def choose(self, layer_idx: int, num_rows: int, kept: Tensor) -> Tensor | None:
        """The rows to keep of [0, num_rows), the `kept` ones among them; None keeps all.

        kept: [n] int64 rows of sinks, question and window; returns int64 [H_kv, n], -1 for empty.
        """
        raise NotImplementedError

    def _judge(self, layer_idx: int) -> None:
        if layer_idx in self._left:
            return
        assert self._cache is not None, "prepare() comes first"
        if not self._kept:  # of the turn that read the prompt, whichever asks for it first
            self._kept = kept_ranges(self._num_judged, self.turn, self.sink_size, self.window_size)
        kept = row_tensor(self._kept, self._cache.k.device)
        rows = self.choose(layer_idx, self._num_judged, kept)
        if rows is not None and rows.shape[0] == 1:
            rows = rows.expand(self._cache.k.shape[1], -1)
        self._left[layer_idx] = rows
