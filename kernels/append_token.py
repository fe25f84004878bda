"""One decode token's heads: norms, RoPE, the write of its K, V and index rows, and its queries in
the codes of the index, with the norms by which the heads' votes are compared.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from longread_kernels.launch import (
    branch_sizes,
    kept_ranges,
    launch_options,
    slab_row,
    wait_for_inputs,
)
from longread_kernels.tables import NORM_ROWS, IndexLayer, Kept, Query
from torch import Tensor


@triton.jit
def _rotated_head(
    head_ptr,
    norm_ptr,
    cos_ptr,
    sin_ptr,
    position,
    eps,
    half_dim,
    HAS_NORM: tl.constexpr,
    HALF: tl.constexpr,
):
    """The two halves of one head after its norm and RoPE, fp32 but rounded to the head's dtype."""
    columns = tl.arange(0, HALF)
    inside = columns < half_dim
    lower = tl.load(head_ptr + columns, mask=inside, other=0.0)
    upper = tl.load(head_ptr + half_dim + columns, mask=inside, other=0.0)
    dtype = lower.dtype
    low, high = lower.to(tl.float32), upper.to(tl.float32)
    if HAS_NORM:
        scale = tl.rsqrt(tl.sum(low * low + high * high, 0) / (2 * half_dim) + eps)
        low_weight = tl.load(norm_ptr + columns, mask=inside, other=0.0).to(tl.float32)
        high_weight = tl.load(norm_ptr + half_dim + columns, mask=inside, other=0.0).to(tl.float32)
        low = (low * scale * low_weight).to(dtype).to(tl.float32)
        high = (high * scale * high_weight).to(dtype).to(tl.float32)
    cos = tl.load(cos_ptr + position * half_dim + columns, mask=inside, other=0.0)
    sin = tl.load(sin_ptr + position * half_dim + columns, mask=inside, other=0.0)
    rotated_low = (low * cos - high * sin).to(dtype).to(tl.float32)
    rotated_high = (high * cos + low * sin).to(dtype).to(tl.float32)
    return rotated_low, rotated_high


@triton.jit
def _encode(values, CODE: tl.constexpr):
    """Codes of a row of values and the scale that they were divided by."""
    largest = tl.maximum(tl.max(tl.abs(values), 0), 1e-12)
    if CODE == "int8":
        scale = largest / 127.0
        codes = tl.floor(values / scale + 0.5).to(tl.int8)
    else:
        scale = largest / 448.0
        codes = (values / scale).to(tl.float8e4nv)
    return codes, scale


@triton.jit
def append_token_kernel(
    heads_ptr,
    cos_ptr,
    sin_ptr,
    q_norm_ptr,
    k_norm_ptr,
    eps,
    state_ptr,
    q_ptr,
    k_ptr,
    v_ptr,
    slab_stride,
    q_basis_ptr,
    q_offset_ptr,
    k_basis_ptr,
    k_mean_ptr,
    rows_ptr,
    rows_stride,
    codes_ptr,
    scale_ptr,
    offset_ptr,
    norm_ptr,
    sink_size,
    window_size,
    branches_ptr,
    branch_rows,
    softmax_scale,
    num_q_heads,
    num_kv_heads,
    half_dim,
    index_dim,
    HAS_NORM: tl.constexpr,
    CODE: tl.constexpr,
    VOTED: tl.constexpr,
    HALF: tl.constexpr,
    INDEX_DIM: tl.constexpr,
    NORM_ROWS: tl.constexpr,
    BRANCHED: tl.constexpr,
    EARLY: tl.constexpr,
):
    head = tl.program_id(0)
    head_dim = 2 * half_dim
    branch = tl.program_id(1)
    state_ptr += branch * 3
    heads_ptr += branch * (num_q_heads + 2 * num_kv_heads) * head_dim
    first_q = branch * num_q_heads
    columns = tl.arange(0, HALF)
    inside = columns < half_dim
    is_query = head < num_q_heads
    kv_head = tl.where(is_query, head // (num_q_heads // num_kv_heads), head - num_q_heads)
    kv_head = kv_head.to(tl.int64)
    weight_ptr = q_norm_ptr if is_query else k_norm_ptr
    low_basis = tl.zeros([HALF, INDEX_DIM], tl.float32)
    high_basis = low_basis
    low_shift = tl.zeros([HALF], tl.float32)
    high_shift = low_shift
    index_columns = tl.arange(0, INDEX_DIM)
    if CODE != "":
        basis_ptr = q_basis_ptr if is_query else k_basis_ptr
        shift_ptr = q_offset_ptr if is_query else k_mean_ptr
        cells = columns[:, None] * index_dim + index_columns[None, :]
        cell_inside = inside[:, None] & (index_columns < index_dim)[None, :]
        basis_ptr += kv_head * head_dim * index_dim
        shift_ptr += kv_head * head_dim
        low_basis = tl.load(basis_ptr + cells, mask=cell_inside, other=0.0)
        cells += half_dim * index_dim
        high_basis = tl.load(basis_ptr + cells, mask=cell_inside, other=0.0)
        low_shift = tl.load(shift_ptr + columns, mask=inside, other=0.0)
        high_shift = tl.load(shift_ptr + half_dim + columns, mask=inside, other=0.0)
    position = tl.load(state_ptr).to(tl.int64)
    num_shared, sink_size, window_size, _, _ = branch_sizes(
        branches_ptr, branch, sink_size, window_size, 0, BRANCHED
    )
    k_ptr += kv_head * slab_stride
    low_keys = tl.zeros([NORM_ROWS, HALF], k_ptr.dtype.element_ty)
    high_keys = low_keys
    rows = tl.arange(0, NORM_ROWS)
    num_norm_rows = 0
    if VOTED:
        if is_query:
            num_rows, sink_end, _, _, tail = kept_ranges(state_ptr, sink_size, window_size)
            num_sinks = tl.minimum(sink_end, NORM_ROWS)
            newest = tl.minimum(num_rows - 1 - tail, NORM_ROWS - num_sinks)  # its own row is new
            newest = tl.maximum(newest, 0)
            num_norm_rows = num_sinks + newest
            rows = tl.where(rows < num_sinks, rows, num_rows - 1 - newest + rows - num_sinks)
            rows = slab_row(rows, num_shared, branch, branch_rows, BRANCHED)
            keys = k_ptr + rows[:, None].to(tl.int64) * head_dim + columns[None, :]
            there = (tl.arange(0, NORM_ROWS) < num_norm_rows)[:, None] & inside[None, :]
            low_keys = tl.load(keys, mask=there, other=0.0)
            high_keys = tl.load(keys + half_dim, mask=there, other=0.0)
    wait_for_inputs(EARLY)
    low, high = _rotated_head(
        heads_ptr + head * head_dim,
        weight_ptr,
        cos_ptr,
        sin_ptr,
        position,
        eps,
        half_dim,
        HAS_NORM,
        HALF,
    )
    index_inside = index_columns < index_dim
    dtype = heads_ptr.dtype.element_ty
    if is_query:
        own = first_q + head
        tl.store(q_ptr + own * head_dim + columns, low.to(dtype), mask=inside)
        tl.store(q_ptr + own * head_dim + half_dim + columns, high.to(dtype), mask=inside)
        if CODE != "":
            offset = tl.sum(low * low_shift + high * high_shift, 0)
            values = tl.sum(low[:, None] * low_basis + high[:, None] * high_basis, 0)
            codes, scale = _encode(values, CODE)
            tl.store(codes_ptr + own * index_dim + index_columns, codes, mask=index_inside)
            tl.store(scale_ptr + own, scale)
            tl.store(offset_ptr + own, offset)
        if VOTED:
            scores = tl.sum(low_keys.to(tl.float32) * low[None, :], 1)
            scores += tl.sum(high_keys.to(tl.float32) * high[None, :], 1)
            there = tl.arange(0, NORM_ROWS) < num_norm_rows
            scores = tl.where(there, scores * softmax_scale, -1e38)
            highest = tl.max(scores, 0)
            total = tl.sum(tl.where(there, tl.exp(scores - highest), 0.0), 0)
            norm = tl.where(num_norm_rows > 0, highest + tl.log(tl.maximum(total, 1.0)), 0.0)
            tl.store(norm_ptr + own, norm)
    else:
        place = slab_row(position, num_shared, branch, branch_rows, BRANCHED)
        row = place * head_dim
        v_ptr += kv_head * slab_stride
        tl.store(k_ptr + row + columns, low.to(dtype), mask=inside)
        tl.store(k_ptr + row + half_dim + columns, high.to(dtype), mask=inside)
        source = heads_ptr + (head + num_kv_heads) * head_dim + columns
        tl.store(v_ptr + row + columns, tl.load(source, mask=inside), mask=inside)
        source += half_dim
        tl.store(v_ptr + row + half_dim + columns, tl.load(source, mask=inside), mask=inside)
        if CODE != "":
            low -= low_shift
            high -= high_shift
            values = tl.sum(low[:, None] * low_basis + high[:, None] * high_basis, 0)
            target = rows_ptr + kv_head * rows_stride + place * index_dim + index_columns
            if CODE == "int8":
                values = tl.clamp(tl.floor(values + 0.5), -127.0, 127.0)
            else:
                values = tl.clamp(values, -448.0, 448.0)
            tl.store(target, values.to(rows_ptr.dtype.element_ty), mask=index_inside)


def append_token(
    heads: Tensor,
    cos: Tensor,
    sin: Tensor,
    norms: tuple[Tensor, Tensor] | None,
    eps: float,
    kept: Kept,
    k: Tensor,
    v: Tensor,
    query: Query,
    index: IndexLayer | None,
    *,
    voted: bool,
) -> None:
    """Norm and rotate each branch's heads, write its K, V and index row, and code its queries.

    heads: [B (H_q + 2 H_kv), D]; cos, sin: [positions, D/2] fp32; norms: as for `rope_append`;
    k, v: slabs [H_kv, capacity, D]. Fills `query.q`; its codes, scale and offset where the index is
    a compressed one; its norm where rows will be `voted` for. The row written is the first of a
    branch's `kept.state`.
    """
    num_kv_heads, _, head_dim = k.shape
    num_branches = kept.num_branches
    num_q_heads = heads.shape[0] // num_branches - 2 * num_kv_heads
    assert (
        query.q.shape == (num_branches * num_q_heads, head_dim)
        and heads.dtype == k.dtype == v.dtype
    )
    assert cos.shape == sin.shape and cos.shape[1] == head_dim // 2
    assert heads.is_contiguous() and cos.is_contiguous() and sin.is_contiguous()
    assert k.stride() == v.stride() and k.stride()[1:] == (head_dim, 1), "rows must be contiguous"
    coded = index is not None and not index.is_exact
    q_norm, k_norm = norms if norms is not None else (heads, heads)
    bases = (cos, cos, cos, cos)
    rows, code = k, ""
    if coded:
        assert index is not None
        bases = (index.q_basis, index.q_offset, index.k_basis, index.k_mean)  # type: ignore[assignment]
        rows, code = index.rows, "int8" if index.rows.dtype == torch.int8 else "fp8"
    index_dim = rows.shape[2]
    append_token_kernel[(num_q_heads + num_kv_heads, num_branches)](
        heads,
        cos,
        sin,
        q_norm,
        k_norm,
        eps,
        kept.state,
        query.q,
        k,
        v,
        k.stride(0),
        *bases,
        rows,
        rows.stride(0),
        query.codes,
        query.scale,
        query.offset,
        query.norm,
        kept.sink_size,
        kept.window_size,
        kept.branches if kept.branches is not None else kept.state,
        kept.branch_rows,
        head_dim**-0.5,
        num_q_heads,
        num_kv_heads,
        head_dim // 2,
        index_dim,
        HAS_NORM=norms is not None,
        CODE=code,
        VOTED=voted,
        HALF=triton.next_power_of_2(head_dim // 2),
        INDEX_DIM=triton.next_power_of_2(index_dim) if coded else 1,
        NORM_ROWS=NORM_ROWS if voted else 1,
        BRANCHED=num_branches > 1,
        num_warps=8 if voted else 4,
        **launch_options(heads),
    )
