"""RoPE of many heads, and what a chunk of tokens votes with: turned means of its queries."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def turned(lower, upper, cos, sin):
    """The two halves of heads after RoPE, in the halves' dtype."""
    low, high = lower.to(tl.float32), upper.to(tl.float32)
    turned_lower = (low * cos - high * sin).to(lower.dtype)
    turned_upper = (high * cos + low * sin).to(upper.dtype)
    return turned_lower, turned_upper


@triton.jit(do_not_specialize=["num_lines"])
def rope_kernel(
    x_ptr,
    cos_ptr,
    sin_ptr,
    angle_stride,
    out_ptr,
    num_lines,
    num_heads,
    half_dim,
    BLOCK: tl.constexpr,
    HALF: tl.constexpr,
):
    lines = (tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK))[:, None]
    columns = tl.arange(0, HALF)[None, :]
    inside = (lines < num_lines) & (columns < half_dim)
    cells = lines * 2 * half_dim + columns
    angles = lines // num_heads * angle_stride + columns
    lower, upper = turned(
        tl.load(x_ptr + cells, mask=inside, other=0.0),
        tl.load(x_ptr + cells + half_dim, mask=inside, other=0.0),
        tl.load(cos_ptr + angles, mask=inside, other=0.0),
        tl.load(sin_ptr + angles, mask=inside, other=0.0),
    )
    tl.store(out_ptr + cells, lower, mask=inside)
    tl.store(out_ptr + cells + half_dim, upper, mask=inside)


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the two halves of each head.

    x: [T, H, D]; cos, sin: [T, D/2] fp32, rows contiguous, all of which may be the same row.
    Returns [T, H, D] in x's dtype.
    """
    num_tokens, num_heads, head_dim = x.shape
    x = x.contiguous()
    assert cos.shape == sin.shape == (num_tokens, head_dim // 2), "a position for each token"
    assert cos.stride() == sin.stride() and cos.stride(1) == 1, "rows must be contiguous"
    out = x.new_empty(x.shape)
    num_lines = num_tokens * num_heads
    block = min(32, triton.next_power_of_2(num_lines))
    rope_kernel[(triton.cdiv(num_lines, block),)](
        x,
        cos,
        sin,
        cos.stride(0),
        out,
        num_lines,
        num_heads,
        head_dim // 2,
        BLOCK=block,
        HALF=triton.next_power_of_2(head_dim // 2),
        num_warps=4,
    )
    return out


@triton.jit(do_not_specialize=["num_tokens", "num_voters"])
def mean_queries_kernel(
    q_ptr,
    cos_ptr,
    sin_ptr,
    out_ptr,
    num_tokens,
    num_voters,
    num_heads,
    group_size,
    half_dim,
    BLOCK: tl.constexpr,
    HALF: tl.constexpr,
):
    voter, head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    columns = tl.arange(0, HALF)
    column_inside = columns < half_dim
    # The first parts are one token longer where the tokens do not part evenly.
    size, num_longer = num_tokens // num_voters, num_tokens % num_voters
    first = voter * size + tl.minimum(voter, num_longer)
    num_own = size + (voter < num_longer).to(tl.int32)
    low, high = tl.zeros([HALF], tl.float32), tl.zeros([HALF], tl.float32)
    for start in tl.range(0, num_own, BLOCK):
        tokens = start + tl.arange(0, BLOCK)
        inside = (tokens < num_own)[:, None] & column_inside[None, :]
        lines = (first + tokens).to(tl.int64)[:, None] * num_heads + head
        cells = q_ptr + lines * 2 * half_dim + columns[None, :]
        low += tl.sum(tl.load(cells, mask=inside, other=0.0).to(tl.float32), 0)
        high += tl.sum(tl.load(cells + half_dim, mask=inside, other=0.0).to(tl.float32), 0)
    cos = tl.load(cos_ptr + columns, mask=column_inside, other=0.0)
    sin = tl.load(sin_ptr + columns, mask=column_inside, other=0.0)
    lower, upper = turned(low / num_own, high / num_own, cos, sin)
    line = (head // group_size * num_voters + voter) * group_size + head % group_size
    target = out_ptr + line * 2 * half_dim + columns
    tl.store(target, lower.to(out_ptr.dtype.element_ty), mask=column_inside)
    tl.store(target + half_dim, upper.to(out_ptr.dtype.element_ty), mask=column_inside)


def mean_queries(q: Tensor, num_voters: int, num_kv_heads: int, cos: Tensor, sin: Tensor) -> Tensor:
    """The means of the queries of each part of a chunk, at one position.

    q: [T, H_q, D] contiguous, T at least num_voters; cos, sin: [1, D/2] fp32. Returns
    [H_kv, num_voters * G, D] in q's dtype.
    """
    num_tokens, num_heads, head_dim = q.shape
    assert q.is_contiguous() and 1 <= num_voters <= num_tokens and num_heads % num_kv_heads == 0
    group_size = num_heads // num_kv_heads
    out = q.new_empty((num_kv_heads, num_voters * group_size, head_dim))
    mean_queries_kernel[(num_voters, num_heads)](
        q,
        cos,
        sin,
        out,
        num_tokens,
        num_voters,
        num_heads,
        group_size,
        head_dim // 2,
        BLOCK=min(32, triton.next_power_of_2(triton.cdiv(num_tokens, num_voters))),
        HALF=triton.next_power_of_2(head_dim // 2),
        num_warps=2,
    )
    return out
