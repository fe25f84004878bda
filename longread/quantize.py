"""Matrices in 4 and 8 bits. Computes with tensors in memory; files and products are others'.

A model that came with 4-bit weights was widened to bf16 when it was converted. Its groups of 32
values lie on a grid of at most 16 levels, up to bf16's rounding, and the grid is found again here:
no second loss, whichever 4-bit format it was (llama.cpp's Q4_0, Q4_1 and Q4_K have such groups).
Other values are rounded to the nearest of 16 levels between a group's smallest and largest.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

GROUP = 32
_LEVELS = 16
_FEWEST_STEPS = 8  # a grid of fewer steps is one of these with levels left out
_NOISE = 2.0**-8  # of a group's largest value: bf16 rounds by half of it at most, at both ends
_MOST_OFF_GRID = 0.01  # share of groups


@dataclass(frozen=True)
class FourBit:
    """codes: [N, K] uint8 below 16; scale, zero: [N, K / 32] bf16; (code - 8) * scale + zero."""

    codes: Tensor
    scale: Tensor
    zero: Tensor
    on_grid: Tensor  # [N, K / 32] bool: the group's values were on the grid

    def values(self) -> Tensor:
        """What it stands for, [N, K] fp32."""
        codes = self.codes.view(*self.scale.shape, GROUP).float() - _LEVELS / 2
        wide = codes * self.scale.float()[..., None] + self.zero.float()[..., None]
        return wide.view(self.codes.shape)


def four_bit(matrix: Tensor, *, find_grid: bool = True) -> FourBit:
    """Quantise a matrix [N, K] of any float dtype, K a multiple of 32.

    find_grid: look for a grid that the values came from; without, they are rounded.
    """
    groups = matrix.reshape(-1, GROUP).T.float().contiguous()  # [32, G]: sums run along vectors
    noise = groups.abs().amax(dim=0).mul_(_NOISE)
    codes, error = _on_steps(groups, _LEVELS - 1)
    off = error > noise
    left = off.nonzero()[:, 0]
    for num_steps in range(_LEVELS - 2, _FEWEST_STEPS - 1, -1):
        if not find_grid or not len(left):
            break
        others, error = _on_steps(groups[:, left], num_steps)
        found = error <= noise[left]
        codes[:, left[found]] = others[:, found]
        off[left[found]] = False
        left = left[~found]
    # Least squares, then bf16: the zero makes good what rounding the scale has moved.
    middle = codes - _LEVELS / 2
    mean = middle.mean(dim=0)
    spread = middle - mean
    slope = (spread * groups).sum(dim=0) / spread.square().sum(dim=0).clamp(min=1e-9)
    scale = slope.to(torch.bfloat16)
    zero = (groups.mean(dim=0) - mean * scale.float()).to(torch.bfloat16)
    shape = (matrix.shape[0], matrix.shape[1] // GROUP)
    return FourBit(
        codes.to(torch.uint8).T.reshape(matrix.shape),
        scale.view(shape),
        zero.view(shape),
        ~off.view(shape),
    )


def is_four_bit(matrix: Tensor, num_rows: int = 64) -> bool:
    """Whether a matrix [N, K] came with 4 bits, by rows from all over it."""
    if matrix.shape[1] % GROUP:
        return False
    rows = torch.linspace(0, matrix.shape[0] - 1, min(num_rows, matrix.shape[0])).long()
    on_grid = four_bit(matrix[rows]).on_grid
    return float(on_grid.float().mean()) >= 1 - _MOST_OFF_GRID


@dataclass(frozen=True)
class EightBit:
    """codes: [N, K] uint8; scale, zero: [N, K / 32] bf16; (code - 128) * scale + zero."""

    codes: Tensor
    scale: Tensor
    zero: Tensor

    def halves(self) -> tuple[FourBit, FourBit]:
        """Two of which the values are the sum: of the codes' upper and lower four bits. Exact."""
        ones = torch.ones_like(self.scale, dtype=torch.bool)
        return (
            FourBit(self.codes >> 4, self.scale * 16, self.zero, ones),
            FourBit(self.codes & 15, self.scale, self.scale * 8, ones),
        )


def eight_bit(matrix: Tensor) -> EightBit:
    """Quantise a matrix [N, K] of any float dtype, K a multiple of 32.

    A group takes the best of three grids: that of llama.cpp's Q8_0 (127 steps to its largest
    value), that of Q5_0 (128 steps to it, on the side where it is) and 255 steps from its least to
    its greatest.
    """
    groups = matrix.reshape(-1, GROUP).T.float().contiguous()  # [32, G]
    low, high = groups.aminmax(dim=0)
    farthest = torch.where(high > -low, high, low)
    none = torch.zeros_like(low)
    best, codes, scale, zero = torch.full_like(low, torch.inf), groups, none, none
    for step, middle in (
        (farthest / 127, none),
        (farthest / -128, none),
        ((high - low) / 255, (high + low + (high - low) / 255) / 2),
    ):
        divisor = torch.where(step == 0, 1.0, step)
        rounded = ((groups - middle) / divisor).round_().clamp_(-128, 127)
        error = (rounded * step + middle - groups).square_().sum(dim=0)
        better = error < best
        best = torch.where(better, error, best)
        codes = torch.where(better, rounded, codes)
        scale, zero = torch.where(better, step, scale), torch.where(better, middle, zero)
    shape = (matrix.shape[0], matrix.shape[1] // GROUP)
    return EightBit(
        (codes + 128).to(torch.uint8).T.reshape(matrix.shape),
        scale.to(torch.bfloat16).view(shape),
        zero.to(torch.bfloat16).view(shape),
    )


def _on_steps(groups: Tensor, num_steps: int) -> tuple[Tensor, Tensor]:
    """Round [32, G] to the nearest of `num_steps` even steps; codes fp32, and the RMS error [G]."""
    low, high = groups.aminmax(dim=0)
    step = (high - low) / num_steps
    places = (groups - low).div_(step.clamp(min=1e-30))
    codes = places.round()
    return codes, places.sub_(codes).square_().mean(dim=0).sqrt_().mul_(step)
