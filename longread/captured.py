"""Which captured step is used for a cache and its policies, and how many are kept."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING

from longread_kernels import dispatch as ops

from longread.cache import KVCache
from longread.network import Network
from longread.policies import KernelPlan, Policy
from longread.step_buffers import can_choose, most_rows
from longread.trace import Trace

if TYPE_CHECKING:
    from longread.decode_graph import StepGraph

_Key = tuple[weakref.ref[KVCache], tuple[KernelPlan, ...], int | None, int]


class CapturedSteps:
    """The decode steps that one model has captured, `most` of them.

    Each holds on to its buffers, and to the slabs of its cache. Policies may read caches of their
    own, each of which has steps of its own.
    """

    def __init__(self, network: Network) -> None:
        self.most = 1
        self._network = network
        # The oldest first; by cache, plans, the counted rows of a trace, and a branch's rows.
        self._steps: dict[_Key, StepGraph] = {}

    def __len__(self) -> int:
        return len(self._steps)

    def clear(self) -> None:
        """Let go of all of them."""
        self._steps.clear()

    def step(self, cache: KVCache, policy: Policy, trace: Trace | None) -> StepGraph | None:
        """The step for this cache and policy, or None where torch operations must do."""
        plan = self.plan(cache, policy, trace)
        if plan is None:
            self._make_room()
            return None
        policy.kernel_turn()  # before it a policy has no cache of its own
        read = policy.read_from(cache)
        read.reserve(cache.length + 1)
        return self._step(read, (plan,), None if trace is None else trace.mass.shape[2], 0)

    def branches(
        self,
        cache: KVCache,
        plans: Sequence[KernelPlan],
        branch_rows: int,
        num_counted: int | None = None,
    ) -> StepGraph | None:
        """The step of several answers side by side, or None where each must do by itself.

        num_counted: rows of the traces, or None for none.
        """
        return self._step(cache, tuple(plans), num_counted, branch_rows)

    def plan(self, cache: KVCache, policy: Policy, trace: Trace | None = None) -> KernelPlan | None:
        """The policy's plan if there are kernels for it, this cache and this trace."""
        plan = policy.kernel_plan() if ops.on_triton(cache.k) else None
        if plan is None or (trace is not None and (trace.keeps_steps or plan.apart)):
            return None
        is_fp8 = plan.index is not None and plan.index.kind == "fp8"
        return None if is_fp8 and not ops.has_fp8(cache.k) else plan

    def _step(
        self,
        cache: KVCache,
        plans: tuple[KernelPlan, ...],
        num_counted: int | None,
        branch_rows: int,
    ) -> StepGraph | None:
        from longread.decode_graph import StepGraph  # Triton may be missing

        key = weakref.ref(cache), plans, num_counted, branch_rows
        step = self._steps.get(key)
        if step is not None and step.fits(cache):
            return step
        self._steps = {key: kept for key, kept in self._steps.items() if _fits(kept, key[0]())}
        if not can_choose(plans, most_rows(cache.capacity, len(plans), branch_rows)):
            return None
        self._make_room()  # the old buffers go before the new ones come
        self._steps[key] = StepGraph(self._network, cache, plans, num_counted, branch_rows)
        return self._steps[key]

    def _make_room(self) -> None:
        """Drop the oldest until one more may be kept."""
        while len(self._steps) >= self.most:
            del self._steps[next(iter(self._steps))]


def _fits(step: StepGraph, cache: KVCache | None) -> bool:
    return cache is not None and step.fits(cache)
