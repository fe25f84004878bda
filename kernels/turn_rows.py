"""A list of rows turned once, each key to its place in the list as its position: what a chunk of
tokens attends to as a prefill does.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from longread_kernels.prefill import attend_causal
from longread_kernels.rotate import turned
from torch import Tensor


@triton.jit(do_not_specialize=["num_places", "num_tokens", "list_stride"])
def turn_rows_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    slab_stride,
    list_ptr,
    list_stride,
    cos_ptr,
    sin_ptr,
    turned_q_ptr,
    turned_k_ptr,
    listed_v_ptr,
    num_places,
    num_tokens,
    num_heads,
    num_kv_heads,
    half_dim,
    BLOCK: tl.constexpr,
    HALF: tl.constexpr,
):
    head = tl.program_id(1)
    is_query = head >= num_kv_heads
    if is_query & (tl.program_id(0) * BLOCK >= num_tokens):
        return
    places = (tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK))[:, None]
    columns = tl.arange(0, HALF)[None, :]
    column_inside = columns < half_dim
    head_dim = 2 * half_dim
    if is_query:
        line_inside = places < num_tokens
        inside = line_inside & column_inside
        angles = (num_places - num_tokens + places) * half_dim + columns
        cells = (places * num_heads + head - num_kv_heads) * head_dim + columns
        source, target = q_ptr + cells, turned_q_ptr + cells
    else:
        line_inside = places < num_places
        inside = line_inside & column_inside
        angles = places * half_dim + columns
        kv_head = head.to(tl.int64)
        rows = tl.load(list_ptr + kv_head * list_stride + places, mask=line_inside, other=0)
        cells = kv_head * slab_stride + rows.to(tl.int64) * head_dim + columns
        taken = (kv_head * num_places + places) * head_dim + columns
        lower_v = tl.load(v_ptr + cells, mask=inside, other=0.0)
        upper_v = tl.load(v_ptr + cells + half_dim, mask=inside, other=0.0)
        tl.store(listed_v_ptr + taken, lower_v, mask=inside)
        tl.store(listed_v_ptr + taken + half_dim, upper_v, mask=inside)
        source, target = k_ptr + cells, turned_k_ptr + taken
    lower, upper = turned(
        tl.load(source, mask=inside, other=0.0),
        tl.load(source + half_dim, mask=inside, other=0.0),
        tl.load(cos_ptr + angles, mask=inside, other=0.0),
        tl.load(sin_ptr + angles, mask=inside, other=0.0),
    )
    tl.store(target, lower, mask=inside)
    tl.store(target + half_dim, upper, mask=inside)


def attend_turned(
    q: Tensor, k: Tensor, v: Tensor, rows: Tensor, cos: Tensor, sin: Tensor, scale: float
) -> Tensor:
    """What `attend_turning` returns for lists without empty places: turned first, then read."""
    num_tokens, num_heads, head_dim = q.shape
    num_kv_heads, num_places = rows.shape
    check_list(q, k, v, rows, cos, sin)
    assert num_kv_heads == k.shape[0], "a list for each KV head"
    turned_q = torch.empty_like(q)
    turned_k, listed_v = q.new_empty((2, num_kv_heads, num_places, head_dim))
    block = 32
    turn_rows_kernel[(triton.cdiv(num_places, block), num_kv_heads + num_heads)](
        q,
        k,
        v,
        k.stride(0),
        rows,
        rows.stride(0),
        cos,
        sin,
        turned_q,
        turned_k,
        listed_v,
        num_places,
        num_tokens,
        num_heads,
        num_kv_heads,
        head_dim // 2,
        BLOCK=block,
        HALF=triton.next_power_of_2(head_dim // 2),
        num_warps=4,
    )
    return attend_causal(turned_q, turned_k, listed_v, scale)


def check_list(q: Tensor, k: Tensor, v: Tensor, rows: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Assert what the kernels take for granted of queries, slabs, lists and angles."""
    head_dim, list_len = q.shape[2], rows.shape[1]
    assert q.is_contiguous() and q.dtype == k.dtype == v.dtype and q.element_size() == 2
    assert k.stride() == v.stride() and k.stride()[1:] == (head_dim, 1), "rows must be contiguous"
    assert rows.stride(1) == 1 and list_len >= q.shape[0] and rows.shape[0] % k.shape[0] == 0
    assert cos.is_contiguous() and sin.is_contiguous()
    assert cos.shape == sin.shape and cos.shape[0] >= list_len, "a position for each place"
