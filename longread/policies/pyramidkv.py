"""PyramidKV (arXiv 2406.02069): SnapKV with a budget that falls from layer to layer.

Lower layers, whose attention is spread wide, keep more rows than the upper ones, whose attention
funnels into few: the budgets are a straight line with the same total as `budget` in every layer,
the last layer having budget / beta. Where the first layer would get more than there are rows, the
line is tilted less. Differences from the paper are those of SnapKV.
"""

from __future__ import annotations

from dataclasses import dataclass

from longread.policies.snapkv import SnapKV


@dataclass
class PyramidKV(SnapKV):
    """beta: how many times the mean budget is the last layer's; 20 in the paper."""

    beta: float = 20.0

    @property
    def most_listed(self) -> int | None:
        return None if self.budget is None else 2 * self.budget

    def layer_budget(self, layer_idx: int, num_eligible: int) -> int | None:
        if self.budget is None:
            return None
        assert self._cache is not None, "prepare() comes first"
        num_layers = self._cache.num_layers
        first = min(2 * self.budget - self.budget / self.beta, max(num_eligible, self.budget))
        last = 2 * self.budget - first
        step = (last - first) / max(num_layers - 1, 1)

        def rows_below(layer: int) -> int:  # rounded as sums, so that the total is exact
            start = first if num_layers > 1 else self.budget or 0
            return round(layer * start + step * layer * (layer - 1) / 2)

        return rows_below(layer_idx + 1) - rows_below(layer_idx)
