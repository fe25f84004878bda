"""The rows that selecting policies read at every step, whatever the vote."""

from __future__ import annotations

import torch
from longread_kernels.tables import NORM_ROWS
from torch import Tensor

from longread.policies.base import KernelPlan, Turn

Ranges = list[tuple[int, int]]


def kept_ranges(num_rows: int, turn: Turn, sink_size: int, window_size: int) -> Ranges:
    """The sinks, the question and the window among rows [0, num_rows), apart and ascending.

    The last range ends at num_rows, and may be empty.
    """
    window = max(num_rows - window_size, 0)
    ranges: Ranges = []
    covered = 0
    for start, end in sorted(
        ((0, sink_size), (turn.question_start, turn.question_end), (window, num_rows))
    ):
        start, end = max(start, covered), min(end, num_rows)
        if start < end:
            if ranges and ranges[-1][1] == start:
                start = ranges.pop()[0]
            ranges.append((start, end))
            covered = end
    return ranges if covered == num_rows else [*ranges, (num_rows, num_rows)]


def norm_ranges(ranges: Ranges, num_rows: int, sink_size: int) -> Ranges:
    """Of the kept rows those whose scores make the heads' votes comparable: sinks and newest.

    The token's own row is not among them.
    """
    num_sinks = min(sink_size, num_rows, NORM_ROWS)
    newest = max(ranges[-1][0], num_sinks, num_rows - 1 - (NORM_ROWS - num_sinks))
    return [(0, num_sinks), (newest, max(num_rows - 1, newest))]


def rows_read(plan: KernelPlan, turn: Turn, num_rows: int) -> float:
    """Rows that a head reads of `num_rows` in a turn by the kernels, in the mean over layers."""
    if plan.budget is None:
        return num_rows
    ranges = kept_ranges(num_rows, turn, plan.sink_size, plan.window_size)
    is_fixed = plan.index is None and plan.lister is None
    num_listed = turn.num_listed if is_fixed else plan.budget
    num_kept = sum(end - start for start, end in ranges)
    return min(num_listed + num_kept, num_rows - turn.num_gone)


def row_tensor(ranges: Ranges, device: torch.device) -> Tensor:
    """The rows of all ranges, [n] int64."""
    return torch.cat([torch.arange(start, end, device=device) for start, end in ranges])


def slab_rows(
    rows: Tensor, num_shared: int | Tensor, branch: int | Tensor, branch_rows: int
) -> Tensor:
    """Where a branch's rows lie in the slab, as tables.Kept has it."""
    return torch.where(rows < num_shared, rows, rows + branch * branch_rows)
