"""Head norms, RoPE and the write of new rows to the KV slabs, in one pass over a projection."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor


@triton.jit(do_not_specialize=["num_tokens", "start"])
def rope_append_kernel(
    heads_ptr,
    cos_ptr,
    sin_ptr,
    q_norm_ptr,
    k_norm_ptr,
    eps,
    q_ptr,
    k_ptr,
    v_ptr,
    slab_stride,
    num_tokens,
    start,
    num_q_heads,
    num_kv_heads,
    half_dim,
    HAS_NORM: tl.constexpr,
    BLOCK_T: tl.constexpr,
    HALF: tl.constexpr,
):
    head = tl.program_id(1)
    tokens = (tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)).to(tl.int64)[:, None]
    columns = tl.arange(0, HALF)[None, :]
    inside = (tokens < num_tokens) & (columns < half_dim)
    head_dim = 2 * half_dim
    num_heads = num_q_heads + 2 * num_kv_heads
    source = heads_ptr + (tokens * num_heads + head) * head_dim + columns
    lower = tl.load(source, mask=inside, other=0.0)
    upper = tl.load(source + half_dim, mask=inside, other=0.0)
    if head >= num_q_heads + num_kv_heads:
        kv_head = (head - num_q_heads - num_kv_heads).to(tl.int64)
        target = v_ptr + kv_head * slab_stride + (start + tokens) * head_dim + columns
    else:
        if HAS_NORM:
            norm_ptr = q_norm_ptr if head < num_q_heads else k_norm_ptr
            low, high = lower.to(tl.float32), upper.to(tl.float32)
            square = tl.sum(low * low + high * high, 1)
            scale = tl.rsqrt(square / head_dim + eps)[:, None]
            low_weight = tl.load(norm_ptr + columns, mask=columns < half_dim, other=0.0)
            high_weight = tl.load(norm_ptr + half_dim + columns, mask=columns < half_dim, other=0.0)
            lower = (low * scale * low_weight.to(tl.float32)).to(lower.dtype)
            upper = (high * scale * high_weight.to(tl.float32)).to(upper.dtype)
        low, high = lower.to(tl.float32), upper.to(tl.float32)
        cos = tl.load(cos_ptr + tokens * half_dim + columns, mask=inside, other=0.0)
        sin = tl.load(sin_ptr + tokens * half_dim + columns, mask=inside, other=0.0)
        lower = (low * cos - high * sin).to(lower.dtype)
        upper = (high * cos + low * sin).to(upper.dtype)
        if head < num_q_heads:
            target = q_ptr + (tokens * num_q_heads + head) * head_dim + columns
        else:
            kv_head = (head - num_q_heads).to(tl.int64)
            target = k_ptr + kv_head * slab_stride + (start + tokens) * head_dim + columns
    tl.store(target, lower, mask=inside)
    tl.store(target + half_dim, upper, mask=inside)


def rope_append(
    heads: Tensor,
    cos: Tensor,
    sin: Tensor,
    norms: tuple[Tensor, Tensor] | None,
    eps: float,
    k: Tensor,
    v: Tensor,
    start: int,
) -> Tensor:
    """Norm and rotate the queries and keys of a fused projection; write rows [start, start + T).

    heads: [T, H_q + 2 H_kv, D] contiguous; cos, sin: [T, D/2] fp32; norms: the weights [D] of the
    query and key norms, or None; k, v: slabs [H_kv, capacity, D], of one stride, written in place.
    Returns the queries [T, H_q, D].
    """
    num_tokens, num_heads, head_dim = heads.shape
    num_kv_heads, capacity, _ = k.shape
    assert heads.is_contiguous() and cos.is_contiguous() and sin.is_contiguous()
    assert k.stride() == v.stride() and k.stride()[1:] == (head_dim, 1), "rows must be contiguous"
    assert start + num_tokens <= capacity, "the rows do not fit the slab"
    assert cos.shape == sin.shape == (num_tokens, head_dim // 2), "a position for each token"
    num_q_heads = num_heads - 2 * num_kv_heads
    q = heads.new_empty((num_tokens, num_q_heads, head_dim))
    q_norm, k_norm = norms if norms is not None else (heads, heads)
    block = min(16, triton.next_power_of_2(num_tokens))
    rope_append_kernel[(triton.cdiv(num_tokens, block), num_heads)](
        heads,
        cos,
        sin,
        q_norm,
        k_norm,
        eps,
        q,
        k,
        v,
        k.stride(0),
        num_tokens,
        start,
        num_q_heads,
        num_kv_heads,
        head_dim // 2,
        HAS_NORM=norms is not None,
        BLOCK_T=block,
        HALF=triton.next_power_of_2(head_dim // 2),
        num_warps=4,
    )
    return q
