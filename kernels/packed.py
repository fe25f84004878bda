"""Products of few tokens with matrices of 4 bits on a CPU: torch's own packed kernel.

Groups of GROUP columns share a scale and a zero; a value is (code - 8) * scale + zero. Takes
bfloat16 and accumulates in fp32. How torch lays the codes out depends on its version and on the
machine; `int4_layout` names the layout.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

GROUP = 32
SLAB_ROWS = 64  # rows that are packed by themselves as they are in a whole matrix
ALIGNMENT = 64  # bytes: where codes begin
_ROWS = 16  # torch packs rows in multiples of this
_FAST = ("AVX2", "AVX512")


def kernels_missing() -> str | None:
    """Why this machine has no fast packed products, or None where it has them."""
    found = torch.backends.cpu.get_cpu_capability()
    if found in _FAST:
        return None
    return f"torch has fast kernels for them only with AVX2 or AVX-512, and finds {found} here"


def fits_int4(num_rows: int, num_columns: int) -> bool:
    """Whether a matrix of this shape can be packed."""
    return num_rows % _ROWS == 0 and num_columns % GROUP == 0


def pack_int4(codes: Tensor) -> Tensor:
    """Lay codes out as the product takes them. codes: [N, K] uint8; returns [N, K / 2] uint8."""
    return torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes.to(torch.int32), 1)


def int4_layout() -> str:
    """A name of the layout that `pack_int4` makes here: equal names, equal bytes."""
    codes = (torch.arange(4 * SLAB_ROWS * GROUP) * 7 // 3 % 16).to(torch.uint8)
    packed = pack_int4(codes.view(2 * SLAB_ROWS, 2 * GROUP))
    return hashlib.sha256(packed.numpy().tobytes()).hexdigest()[:8]


def int4_linear(x: Tensor, packed: Tensor, scale_zero: Tensor) -> Tensor:
    """x: [T, K] bf16; packed: of `pack_int4`; scale_zero: [K / GROUP, N, 2] bf16. [T, N] bf16."""
    assert x.dtype == torch.bfloat16 and x.is_contiguous(), "x must be bfloat16 and contiguous"
    assert x.shape[1] == 2 * packed.shape[1], "x does not fit the matrix"
    assert packed.data_ptr() % ALIGNMENT == 0, "codes are not aligned"
    return torch.ops.aten._weight_int4pack_mm_for_cpu(x, packed, GROUP, scale_zero)
