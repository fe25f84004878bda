"""The places of answers that are branches of one captured step on a GPU.

A question is read behind the documents, where the first branch has its rows, and its rows are then
copied to its own branch's place.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from longread.batch import Siblings
from longread.cache import KVCache
from longread.model import Decoder
from longread.policies import KernelPlan, Turn
from longread.policies.kept import rows_read
from longread.trace import Trace

if TYPE_CHECKING:
    from longread.decode_graph import StepGraph  # it needs Triton

_ROUND_ROWS = 64  # of a branch


class BranchPlaces:
    """Places by the kernels, all of the step's branches. `make` says whether there are any."""

    def __init__(
        self, decoder: Decoder, cache: KVCache, siblings: Siblings, step: StepGraph, num_own: int
    ) -> None:
        self.num_places = len(siblings.policies)
        # Rows are chosen anew where an answer begins; the others' must be due as well.
        self.refills = all(plan.reselect == 1 for plan in step.plans)
        self._decoder, self._cache, self._siblings, self._step = decoder, cache, siblings, step
        self._num_own = num_own
        # A place that is free goes on with whatever it has.
        self._rows = [cache.length] * self.num_places
        self._turns = [Turn(cache.length, cache.length)] * self.num_places
        self._traces: list[Trace | None] = [None] * self.num_places

    @classmethod
    def make(
        cls,
        decoder: Decoder,
        cache: KVCache,
        siblings: Siblings,
        most_rows: int,
        rows_alone: int,
    ) -> BranchPlaces | None:
        """Places for a cache that holds the documents, or None where kernels cannot answer so.

        most_rows: of a question with its answer; rows_alone: of a cache for one question. Makes
        room for the places behind the documents.
        """
        plans = _plans(decoder, cache, siblings)
        if plans is None:
            return None
        num_rows, num_own = cache.length, -(-most_rows // _ROUND_ROWS) * _ROUND_ROWS
        rows_alone = max(rows_alone, num_rows + num_own)  # shares of rows are those of one alone
        cache.reserve(rows_alone + (len(plans) - 1) * num_own, spare=0)
        step = decoder.captured.branches(cache, plans, num_own, num_rows)
        return None if step is None else cls(decoder, cache, siblings, step, num_own)

    def read(self, place: int, ids: Sequence[int], trace: Trace) -> Tensor:
        cache, start = self._cache, self._cache.length
        first = cache.k[:, :, start : self._rows[0]], cache.v[:, :, start : self._rows[0]]
        saved = [rows.clone() for rows in first] if place else []
        policy = self._siblings.begin(place, Turn(start, start + len(ids)))
        logits = self._decoder.extend(torch.tensor(ids), cache, policy, trace)
        self._turns[place] = policy.kernel_turn()
        self._rows[place] = cache.length
        cache.truncate(start)
        if place:
            own = slice(start, self._rows[place])
            self._put(place, (cache.k[:, :, own].clone(), cache.v[:, :, own].clone()))
            self._put(0, saved)
        self._traces[place] = trace
        self._step.count_branch(place, trace)
        return logits

    def step(self, tokens: Mapping[int, int]) -> Tensor:
        end = self._cache.length + self._num_own
        self._rows = [row if row < end else self._cache.length for row in self._rows]
        for place in tokens:
            trace, num_rows = self._traces[place], self._rows[place] + 1
            assert trace is not None, "a question was read into the place"
            trace.start_step(num_rows)
            plan = self._step.plans[place]
            trace.add_rows_read(rows_read(plan, self._turns[place], num_rows))
        ids = [tokens.get(place, 0) for place in range(self.num_places)]
        with self._decoder.on_device():
            logits = self._step.step_branches(
                torch.tensor(ids), self._rows, self._turns, self._cache.length
            )
        self._rows = [row + 1 for row in self._rows]
        return logits[list(tokens)]

    def _put(self, place: int, rows: Sequence[Tensor]) -> None:
        """Write k and v [L, H_kv, n, D] to a place from its first row on, and index them."""
        start = self._cache.length + place * self._num_own
        end = start + rows[0].shape[2]
        for slab, own in zip((self._cache.k, self._cache.v), rows, strict=True):
            slab[:, :, start:end] = own
        index = self._step.plans[place].index
        if index is not None:
            for layer_idx in range(self._cache.num_layers):
                index.append(layer_idx, start, end)


def _plans(decoder: Decoder, cache: KVCache, siblings: Siblings) -> list[KernelPlan] | None:
    """The plans of all places; None where a policy has none, or reads a cache of its own."""
    if not decoder.attention.captured:
        return None
    trace = decoder.new_trace(0)
    plans = []
    for policy in siblings.policies:
        plan = None if policy.rebuilds else decoder.captured.plan(cache, policy, trace)
        if plan is None:
            return None
        plans.append(plan)
    return plans
