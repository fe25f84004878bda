"""Matrix-vector products of one token, with what stands around them fused in, and the SwiGLU
between the products of many tokens.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from longread_kernels.launch import launch_options, wait_for_inputs
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


@triton.jit
def matvec_kernel(
    x_ptr,
    weight_ptr,
    norm_ptr,
    bias_ptr,
    residual_ptr,
    out_ptr,
    num_rows,
    eps,
    NUM_COLUMNS: tl.constexpr,
    HAS_NORM: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    GATED: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EARLY: tl.constexpr,
):
    rows = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    columns = tl.arange(0, BLOCK_K)
    row_inside = rows[:, None] < num_rows
    weights = weight_ptr + rows[:, None].to(tl.int64) * NUM_COLUMNS + columns[None, :]
    up_weights = weights + num_rows.to(tl.int64) * NUM_COLUMNS
    total = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    up_total = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    square = tl.zeros([BLOCK_K], tl.float32)
    # The weights' first tile is asked for before the predecessor has ended.
    inside = row_inside & (columns < NUM_COLUMNS)[None, :]
    first = tl.load(weights, mask=inside, other=0.0)
    up_first = first
    if GATED:
        up_first = tl.load(up_weights, mask=inside, other=0.0)
    wait_for_inputs(EARLY)
    for start in tl.static_range(0, NUM_COLUMNS, BLOCK_K):
        column_inside = start + columns < NUM_COLUMNS
        x = tl.load(x_ptr + start + columns, mask=column_inside, other=0.0).to(tl.float32)
        if HAS_NORM:
            square += x * x
            x *= tl.load(norm_ptr + start + columns, mask=column_inside, other=0.0).to(tl.float32)
        inside = row_inside & column_inside[None, :]
        if start == 0:
            weight = first
        else:
            weight = tl.load(weights + start, mask=inside, other=0.0)
        total += weight.to(tl.float32) * x[None, :]
        if GATED:
            if start == 0:
                weight = up_first
            else:
                weight = tl.load(up_weights + start, mask=inside, other=0.0)
            up_total += weight.to(tl.float32) * x[None, :]
    out = tl.sum(total, 1)
    if HAS_NORM:
        scale = tl.rsqrt(tl.sum(square, 0) / NUM_COLUMNS + eps)
        out *= scale
    inside = rows < num_rows
    if HAS_BIAS:
        out += tl.load(bias_ptr + rows, mask=inside, other=0.0).to(tl.float32)
    if GATED:
        up = tl.sum(up_total, 1)
        if HAS_NORM:
            up *= scale
        out = out / (1.0 + tl.exp(-out)) * up
    if HAS_RESIDUAL:
        out = out.to(residual_ptr.dtype.element_ty).to(tl.float32)
        out += tl.load(residual_ptr + rows, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + rows, out.to(out_ptr.dtype.element_ty), mask=inside)


def matvec(
    x: Tensor,
    weight: Tensor,
    out: Tensor,
    *,
    norm: Tensor | None = None,
    eps: float = 0.0,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    gated: bool = False,
) -> None:
    """out = weight . norm(x) + bias, through SwiGLU where `gated`, plus the residual.

    x: [B, K]; weight: [N, K] contiguous, [2 N, K] where gated (gate rows, then up rows); norm:
    weight [K] of a root-mean-square norm of x; bias: [N]; residual: [B, N]; out: [B, N], may be the
    residual. For a single row the kernel here is used, for more the library's product.
    """
    num_columns = weight.shape[1]
    num_rows = weight.shape[0] // 2 if gated else weight.shape[0]
    assert weight.is_contiguous() and x.is_contiguous() and out.is_contiguous()
    assert x.shape[1] == num_columns and out.shape == (x.shape[0], num_rows), "shapes do not fit"
    assert not (gated and bias is not None), "a gated product has no bias"
    if x.shape[0] > 1:
        normed = F.rms_norm(x, (num_columns,), norm, eps) if norm is not None else x
        if residual is not None and bias is None:
            torch.addmm(residual, normed, weight.T, out=out)
            return
        product = F.linear(normed, weight, bias)
        product = swiglu(product) if gated else product
        out.copy_(product if residual is None else product + residual)
        return
    # Measured on an H200: many narrow programs for tall matrices, wide ones for the others.
    tall = gated or num_rows > 1 << 16
    block_n, block_k, num_warps = (2, 512, 2) if tall else (2, 2048, 4)
    if not x.is_cuda:
        block_n = 64  # Triton's interpreter takes one program after another
    block_k = min(block_k, triton.next_power_of_2(num_columns))
    matvec_kernel[(triton.cdiv(num_rows, block_n),)](
        x,
        weight,
        norm if norm is not None else x,
        bias if bias is not None else x,
        residual if residual is not None else x,
        out,
        num_rows,
        eps,
        NUM_COLUMNS=num_columns,
        HAS_NORM=norm is not None,
        HAS_BIAS=bias is not None,
        HAS_RESIDUAL=residual is not None,
        GATED=gated,
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        num_warps=num_warps,
        **launch_options(x),
    )
