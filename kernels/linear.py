"""What stands between the products of the feed-forward network."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def swiglu_kernel(gate_up_ptr, out_ptr, num_columns, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < num_columns
    source = gate_up_ptr + row * 2 * num_columns + columns
    gate = tl.load(source, mask=inside, other=0.0)
    up = tl.load(source + num_columns, mask=inside, other=0.0).to(tl.float32)
    wide = gate.to(tl.float32)
    silu = (wide / (1.0 + tl.exp(-wide))).to(gate.dtype).to(tl.float32)
    tl.store(out_ptr + row * num_columns + columns, (silu * up).to(gate.dtype), mask=inside)


def swiglu(gate_up: Tensor) -> Tensor:
    """silu(gate) * up of a fused projection. gate_up: [T, 2 I] contiguous; returns [T, I]."""
    num_rows, num_columns = gate_up.shape[0], gate_up.shape[1] // 2
    assert gate_up.is_contiguous(), "gate_up must be contiguous"
    out = gate_up.new_empty((num_rows, num_columns))
    block = min(2048, triton.next_power_of_2(num_columns))
    swiglu_kernel[(num_rows, triton.cdiv(num_columns, block))](
        gate_up, out, num_columns, BLOCK=block, num_warps=4
    )
    return out
