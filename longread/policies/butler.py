"""TokenButler (arXiv 2503.07518): a small trained network says which rows the heads will read.

At producer layers it predicts small queries for the layers that follow, which score the projected
keys of all rows (predictor.py). Kept at every step: sinks, question and window; each KV head reads
`budget` rows besides. The choice may be kept for `reselect` answer tokens, and takes in the
`neighbours` rows on either side of each row.

Differences from the paper: the heads of a KV head vote with the softmax of what is predicted,
summed, where the paper takes the largest prediction; a softmax is all that training fixes of a
head. No layer is dense, since layer 0 has a producer of its own; the first answer token is dense
because the question is, whose last token it comes from. Sinks and window are as large as the other
policies have them here, and not 128 and 512.

Projected keys are not stored: they are made from the cache's own, by one small product a layer.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from longread.cache import KVCache
from longread.policies.base import KernelPlan, Policy, Rereader, Turn
from longread.policies.kept import kept_ranges, row_tensor
from longread.policies.predicted import Chooser, SmallKeys, chosen_rows
from longread.policies.predictor import Predictor, load_for


@dataclass
class Butler(Policy):
    """budget (None: all), sink_size, window_size and neighbours are rows; reselect: answer tokens.

    butler: the predictor's file, or "" for the one that comes with the package.
    """

    budget: int | None
    butler: str = ""
    neighbours: int = 0
    sink_size: int = 4
    window_size: int = 256
    reselect: int = 1
    predictor: Predictor | None = field(default=None, init=False, repr=False, compare=False)
    _keys: SmallKeys | None = field(default=None, init=False, repr=False)
    _kept: Tensor | None = field(default=None, init=False, repr=False)
    _small: dict[int, Tensor] = field(default_factory=dict, init=False, repr=False)
    _num_steps: int = field(default=0, init=False, repr=False)  # with the rows in _chosen
    _chosen: dict[int, Tensor] = field(default_factory=dict, init=False, repr=False)

    def load(self, model: str, identity: str) -> None:
        """Read the predictor, which must be of these weights. Raises UsageError or ModelError."""
        if self.budget is not None:
            self.predictor = load_for(self.butler, model, identity)

    def prepare(self, cache: KVCache, rereader: Rereader | None = None) -> None:
        self._chosen.clear()
        if self.budget is None:
            return
        if self._keys is not None and self._keys.cache is cache:
            self._keys.rebuild()  # in place: a captured step goes on reading them
            return
        assert rereader is not None, "keys were turned by the model's RoPE"
        if self.predictor is None:
            self.load(rereader.model, rereader.identity)
        assert self.predictor is not None, "it was loaded"
        self._keys = SmallKeys(cache, self.predictor, rereader)

    def borrow_keys(self, other: Butler) -> None:
        """Take over the keys of a policy that was prepared on the same cache."""
        self._keys = other._keys
        self._chosen.clear()

    def start_turn(self, turn: Turn) -> None:
        super().start_turn(turn)
        self._chosen.clear()

    def appended(self, layer_idx: int, start: int, end: int) -> None:
        if self._keys is not None:
            self._keys.written(layer_idx, start)

    def select(self, layer_idx: int, q: Tensor, num_rows: int) -> Tensor | None:
        if self.budget is None:
            return None
        assert self._keys is not None, "prepare() comes first"
        if layer_idx == 0 or self._kept is None:  # the same rows for every layer of a step
            ranges = kept_ranges(num_rows, self.turn, self.sink_size, self.window_size)
            self._kept = row_tensor(ranges, q.device)
            self._num_steps += 1
            if self._num_steps >= self.reselect:
                self._chosen.clear()
        if self.budget >= num_rows - self._kept.shape[0]:
            self._chosen.clear()
            return None
        if layer_idx not in self._chosen:
            self._num_steps = 0
            self._chosen[layer_idx] = self._choose(layer_idx, q, num_rows, self._kept)
        chosen = self._chosen[layer_idx]
        return torch.cat((self._kept.expand(len(chosen), -1), chosen), dim=1)

    def kernel_plan(self) -> KernelPlan | None:
        if self.budget is None:
            return KernelPlan()
        assert self._keys is not None, "prepare() comes first"
        chooser = Chooser(self._keys, self.neighbours, self.reselect)
        return KernelPlan(
            self.budget,
            self.sink_size,
            self.window_size,
            lister=chooser,
            reselect=self.reselect,
        )

    def _choose(self, layer_idx: int, q: Tensor, num_rows: int, kept: Tensor) -> Tensor:
        """[H_kv, budget] int64."""
        assert self._keys is not None and self.budget is not None
        self._keys.project(layer_idx, num_rows)
        row = torch.tensor([num_rows - 1], device=q.device)
        self._small |= self._keys.queries(layer_idx, q[None], row)
        scores = self._keys.scores(layer_idx, self._small[layer_idx], num_rows)
        can_choose = torch.ones((1, num_rows), dtype=torch.bool, device=q.device)
        can_choose[:, kept] = False
        budget = self.budget
        return chosen_rows(scores, can_choose, budget, budget, budget, self.neighbours)[0]
