"""A layer's matrix in fewer bits, as a step of few tokens takes it. The one place for such forms.

A form has `apply`, and says up to how many tokens it is faster than the bf16 matrix it came from.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from longread_kernels import packed
from torch import Tensor


class Matrix(Protocol):
    """A matrix [N, K] in some form."""

    @property
    def most_rows(self) -> int:
        """Up to so many tokens it is faster than bf16."""

    def apply(self, x: Tensor) -> Tensor:
        """x: [T, K]; returns [T, N] in x's dtype, or fp32 where that is more exact."""


@dataclass(frozen=True)
class Int4Matrix:
    """4 bits a value. codes: as kernels/packed.py has them; scale_zero: [K / 32, N, 2] bf16."""

    codes: Tensor
    scale_zero: Tensor
    most_rows: int = 8  # measured: docs/performance.md

    def apply(self, x: Tensor) -> Tensor:
        """x: [T, K] bf16; returns [T, N]."""
        return packed.int4_linear(x, self.codes, self.scale_zero)


@dataclass(frozen=True)
class Int8Matrix:
    """8 bits a value, as the sum of two matrices: the upper four bits of its codes, and the lower.

    torch's own int8 product has one scale a row, which is not exact enough, and is no faster.
    """

    high: Int4Matrix
    low: Int4Matrix
    most_rows: int = 4  # measured: docs/performance.md

    def apply(self, x: Tensor) -> Tensor:
        """x: [T, K] bf16; returns [T, N] fp32: a sum in bf16 would be rounded twice."""
        return self.high.apply(x).float().add_(self.low.apply(x))
