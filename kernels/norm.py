"""Root-mean-square norms of many tokens, with the residual sum that comes before them."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def add_rms_norm_kernel(
    x_ptr, delta_ptr, weight_ptr, sum_ptr, out_ptr, num_columns, eps, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < num_columns
    offsets = row * num_columns + columns
    x = tl.load(x_ptr + offsets, mask=inside, other=0.0).to(tl.float32)
    delta = tl.load(delta_ptr + offsets, mask=inside, other=0.0).to(tl.float32)
    total = (x + delta).to(sum_ptr.dtype.element_ty)  # the norm sees the rounded sum
    tl.store(sum_ptr + offsets, total, mask=inside)
    total = total.to(tl.float32)
    scale = tl.rsqrt(tl.sum(total * total, 0) / num_columns + eps)
    weight = tl.load(weight_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    out = (total * scale * weight).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + offsets, out, mask=inside)


def add_rms_norm(x: Tensor, delta: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The sum of two [T, C] tensors, contiguous and of one dtype, and its norm. weight: [C]."""
    assert x.is_contiguous() and delta.is_contiguous() and x.shape == delta.shape
    num_rows, num_columns = x.shape
    total, out = torch.empty_like(x), torch.empty_like(x)
    block = triton.next_power_of_2(num_columns)
    add_rms_norm_kernel[(num_rows,)](
        x,
        delta,
        weight,
        total,
        out,
        num_columns,
        eps,
        BLOCK=block,
        num_warps=min(8, block // 256 or 1),
    )
    return total, out
