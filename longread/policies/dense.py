"""Dense attention: every row at every step. The reference for all other policies."""

from __future__ import annotations

from dataclasses import dataclass

from longread.policies.base import KernelPlan, Policy


@dataclass
class Dense(Policy):
    """Attends to all cached rows."""

    def kernel_plan(self) -> KernelPlan:
        return KernelPlan()
