"""Which captured step is used for a cache and a policy, and how many are kept."""

from __future__ import annotations

from typing import TYPE_CHECKING

from longread_kernels import dispatch as ops

from longread.cache import KVCache
from longread.network import Network
from longread.policies import KernelPlan, Policy
from longread.step_buffers import can_choose
from longread.trace import Trace

if TYPE_CHECKING:
    from longread.decode_graph import StepGraph


class CapturedSteps:
    """The decode steps that one model has captured, of one cache and `most` policies.

    Each holds on to its buffers, and to the slabs of the cache.
    """

    def __init__(self, network: Network) -> None:
        self.most = 1
        self._network = network
        self._steps: dict[tuple[KernelPlan, int | None], StepGraph] = {}  # the oldest first

    def __len__(self) -> int:
        return len(self._steps)

    def clear(self) -> None:
        """Let go of all of them."""
        self._steps.clear()

    def step(self, cache: KVCache, policy: Policy, trace: Trace | None) -> StepGraph | None:
        """The step for this cache and policy, or None where torch operations must do."""
        plan = policy.kernel_plan() if ops.on_triton(cache.k) else None
        index = plan.index if plan is not None else None
        if index is not None and index.kind == "fp8" and not ops.has_fp8(cache.k):
            plan = None
        if plan is None or (trace is not None and trace.keeps_steps):
            self._make_room()
            return None
        from longread.decode_graph import StepGraph  # Triton may be missing

        key = plan, None if trace is None else trace.mass.shape[2]
        step = self._steps.get(key)
        if step is not None and step.fits(cache, *key):
            return step
        self._steps = {key: kept for key, kept in self._steps.items() if kept.fits(cache, *key)}
        if not can_choose(plan, cache.capacity):
            return None
        self._make_room()  # the old buffers go before the new ones come
        self._steps[key] = StepGraph(self._network, cache, *key)
        return self._steps[key]

    def _make_room(self) -> None:
        """Drop the oldest until one more may be kept."""
        while len(self._steps) >= self.most:
            del self._steps[next(iter(self._steps))]
