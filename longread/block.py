"""A block of rows: its tensors, whether they fit, and what a first part of them is worth.

Which blocks there are and where they lie is entry.py's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

RowDims = Mapping[str, int | None]  # by tensor name: the dimension that counts rows, None for sums


@dataclass(frozen=True)
class Block:
    """Rows [start, end) of all layers; `start` is a multiple of the block length."""

    start: int
    end: int
    tensors: dict[str, Tensor]


def shape_problem(tensors: Mapping[str, Tensor], row_dims: RowDims, num_rows: int) -> str | None:
    """Why `tensors` are no block of `num_rows` rows, or None where they are one."""
    if not tensors:
        return "no tensors"
    for name, tensor in tensors.items():
        if name not in row_dims:
            return f"{name} is not in row_dims"
        dim = row_dims[name]
        if dim is not None and (tensor.dim() <= dim or tensor.shape[dim] != num_rows):
            return f"{name} of shape {tuple(tensor.shape)} has not {num_rows} rows"
    return None


def first_rows(
    tensors: Mapping[str, Tensor], row_dims: RowDims, num_rows: int, of_rows: int
) -> dict[str, Tensor]:
    """The first `num_rows` of `of_rows`; sums over a block's rows are scaled by the share kept."""
    kept = {}
    for name, tensor in tensors.items():
        dim = row_dims[name]
        if dim is None:
            kept[name] = tensor * (num_rows / of_rows)
        else:
            kept[name] = tensor.narrow(dim, 0, num_rows)
    return kept
