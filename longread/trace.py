"""What an answer attended to: mass and choices per layer, KV head and row, summed over steps.

Owns the accumulation on the device; evidence.py turns it into passages and pages.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


class Trace:
    """Attention mass [L, H_kv, rows] and how often each row was selected [L, H_kv, rows].

    Rows past `num_rows` (the question and the answer) are counted in the totals only. With
    `keep_steps` the indices themselves are kept: `steps[n][layer_idx]` is int64 [sets, n] or None.
    """

    def __init__(
        self,
        num_layers: int,
        num_kv_heads: int,
        num_rows: int,
        *,
        device: torch.device,
        keep_steps: bool = False,
    ) -> None:
        shape = (num_layers, num_kv_heads, num_rows)
        self.mass = torch.zeros(shape, device=device, dtype=torch.float32)
        self.selected = torch.zeros(shape, device=device, dtype=torch.int32)
        self.num_steps = 0
        self._rows_read = torch.zeros((), device=device, dtype=torch.float64)
        self._rows_told = 0.0  # read too
        self._rows_cached = 0  # all summed over steps and layers, for one KV head
        self.steps: list[list[Tensor | None]] = []
        self.keeps_steps = keep_steps
        self.at_step_end: Callable[[Trace], None] | None = None

    @property
    def fraction_kept(self) -> float:
        """Rows attended over rows cached, mean over steps and layers; 1.0 before any step."""
        rows_read = float(self._rows_read) + self._rows_told
        return rows_read / self._rows_cached if self._rows_cached else 1.0

    def start_step(self, num_rows: int) -> None:
        """A decode step over `num_rows` cached rows begins."""
        self.num_steps += 1
        self._rows_cached += num_rows * self.mass.shape[0]
        if self.keeps_steps:
            self.steps.append([])

    def end_step(self) -> None:
        """The question is read, or a token made: tell `at_step_end`."""
        if self.at_step_end is not None:
            self.at_step_end(self)

    def count_into(self, mass: Tensor, selected: Tensor) -> None:
        """Go on counting in these tensors, which a CUDA graph may write to, from here."""
        mass.copy_(self.mass)
        selected.copy_(self.selected)
        self.mass, self.selected = mass, selected

    def add_rows_read(self, num_rows: float) -> None:
        """Count the rows that each KV head of each layer read in a step."""
        self._rows_told += num_rows * self.mass.shape[0]

    def record(self, layer_idx: int, indices: Tensor | None, probs: Tensor) -> None:
        """Add one layer of one step.

        indices: int64 [sets, n] with -1 for empty places, or None for rows 0 .. n - 1;
        probs: [H_q, n] fp32.
        """
        num_kv_heads, num_rows = self.mass.shape[1:]
        if self.keeps_steps and self.steps:
            self.steps[-1].append(None if indices is None else indices.clone())
        if indices is None:
            grouped = probs.reshape(num_kv_heads, -1, probs.shape[-1]).sum(dim=1)[:, :num_rows]
            self.mass[layer_idx, :, : grouped.shape[1]] += grouped
            if self.num_steps:  # not while the prompt is read, where nothing is selected
                self._rows_read += probs.shape[-1]
                self.selected[layer_idx] += probs.shape[0] // num_kv_heads
            return
        self._rows_read += (indices >= 0).sum() / indices.shape[0]
        rows = indices.expand(probs.shape[0], -1) if indices.shape[0] == 1 else indices
        if rows.shape[0] == num_kv_heads:
            rows = rows.repeat_interleave(probs.shape[0] // num_kv_heads, 0)
        inside = (rows >= 0) & (rows < num_rows)
        rows = rows.clamp(0, num_rows - 1).reshape(num_kv_heads, -1)
        inside_flat = inside.reshape(num_kv_heads, -1)
        weighted = probs.reshape(num_kv_heads, -1) * inside_flat
        self.mass[layer_idx].scatter_add_(1, rows, weighted)
        self.selected[layer_idx].scatter_add_(1, rows, inside_flat.to(torch.int32))
