"""Which earlier rows a chunk of tokens wants: each of its queries' exponentials over a norm, summed
(TokenSelect's soft vote, arXiv 2411.02886, for several queries of each KV head).

The norm of a query is its sum over all rows that are voted on, which makes a softmax and takes a
second pass over the keys, or over the rows before and after them, which are read anyway. No score
is ever stored.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from longread_kernels.launch import shared_bytes
from torch import Tensor

_LOG2_E = 1.4426950408889634
_PROGRAMS = 256  # in all, about two for each multiprocessor of a large GPU
_MOST_SPLITS = 64
_MOST_QUERIES = 256  # of a KV head at a time; a thread block's memory holds them
_HIGHEST = tl.constexpr(100.0)  # of a score over its norm, in base 2; fp32 ends at 128


@triton.jit
def _load_queries(
    q_ptr, kv_head, num_queries, head_dim, QUERIES: tl.constexpr, HEAD_DIM: tl.constexpr
):
    """The queries of one KV head as the right side of a dot, [HEAD_DIM, QUERIES]."""
    queries, columns = tl.arange(0, QUERIES), tl.arange(0, HEAD_DIM)
    return tl.load(
        q_ptr + (kv_head * num_queries + queries[None, :]) * head_dim + columns[:, None],
        mask=(queries < num_queries)[None, :] & (columns < head_dim)[:, None],
        other=0.0,
    )


@triton.jit
def _scores(k_ptr, rows, inside, q, head_dim, log2_scale, HEAD_DIM: tl.constexpr):
    """Scores in base 2 of some rows and all queries, [rows, QUERIES] fp32."""
    columns = tl.arange(0, HEAD_DIM)
    k = tl.load(
        k_ptr + rows.to(tl.int64)[:, None] * head_dim + columns[None, :],
        mask=inside[:, None] & (columns < head_dim)[None, :],
        other=0.0,
    )
    return tl.dot(k, q) * log2_scale


@triton.jit(do_not_specialize=["num_before", "after", "num_rows"])
def norms_kernel(
    q_ptr,
    k_ptr,
    slab_stride,
    stats_ptr,
    num_before,
    after,
    num_rows,
    num_queries,
    head_dim,
    log2_scale,
    QUERIES: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    kv_head = tl.program_id(0).to(tl.int64)
    split, num_splits = tl.program_id(1), tl.num_programs(1)
    q = _load_queries(q_ptr, kv_head, num_queries, head_dim, QUERIES, HEAD_DIM)
    share = tl.cdiv(tl.cdiv(num_rows, num_splits), BLOCK) * BLOCK
    first = split * share
    last = tl.minimum(first + share, num_rows)
    k_ptr += kv_head * slab_stride
    total = tl.zeros([QUERIES], tl.float32)
    top = tl.full([QUERIES], -1e38, tl.float32)  # finite: -inf minus -inf is no number
    for start in tl.range(first, last, BLOCK):
        places = start + tl.arange(0, BLOCK)
        inside = places < last
        rows = tl.where(places < num_before, places, after + places - num_before)
        scores = _scores(k_ptr, rows, inside, q, head_dim, log2_scale, HEAD_DIM)
        scores = tl.where(inside[:, None], scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 0))
        total = total * tl.exp2(top - new_top) + tl.sum(tl.exp2(scores - new_top[None, :]), 0)
        top = new_top
    target = stats_ptr + (kv_head * num_splits + split) * 2 * QUERIES + tl.arange(0, QUERIES)
    tl.store(target, top)
    tl.store(target + QUERIES, total)


@triton.jit(do_not_specialize=["first_row", "num_rows"])
def votes_kernel(
    q_ptr,
    k_ptr,
    slab_stride,
    stats_ptr,
    num_stats,
    votes_ptr,
    first_row,
    num_rows,
    num_queries,
    head_dim,
    log2_scale,
    QUERIES: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    STATS: tl.constexpr,
):
    kv_head = tl.program_id(0).to(tl.int64)
    split, num_splits = tl.program_id(1), tl.num_programs(1)
    queries, parts = tl.arange(0, QUERIES), tl.arange(0, STATS)
    source = (kv_head * num_stats + parts)[:, None] * 2 * QUERIES + queries[None, :]
    there = (parts < num_stats)[:, None]
    tops = tl.load(stats_ptr + source, mask=there, other=-1e38)
    totals = tl.load(stats_ptr + source + QUERIES, mask=there, other=0.0)
    top = tl.max(tops, 0)
    norm = top + tl.log2(tl.sum(totals * tl.exp2(tops - top[None, :]), 0))
    norm = tl.where(queries < num_queries, norm, float("inf"))  # what fills the tile has no vote
    q = _load_queries(q_ptr, kv_head, num_queries, head_dim, QUERIES, HEAD_DIM)
    share = tl.cdiv(tl.cdiv(num_rows, num_splits), BLOCK) * BLOCK
    first = split * share
    last = tl.minimum(first + share, num_rows)
    k_ptr += kv_head * slab_stride
    votes_ptr += kv_head * num_rows
    for start in tl.range(first, last, BLOCK):
        places = start + tl.arange(0, BLOCK)
        inside = places < last
        scores = _scores(k_ptr, first_row + places, inside, q, head_dim, log2_scale, HEAD_DIM)
        weights = tl.exp2(tl.minimum(scores - norm[None, :], _HIGHEST))
        tl.store(votes_ptr + places, tl.sum(weights, 1), mask=inside)


def soft_votes(
    q: Tensor, k: Tensor, scale: float, first_row: int, tail: int, end: int, *, outer_norm: bool
) -> Tensor:
    """The exponential of each query's score over the query's norm, summed over the queries.

    q: [H_kv, M, D] contiguous; k: a slab [H_kv, rows, D], rows contiguous, both bf16 or fp16. Rows
    [first_row, tail) are voted on; norms are of these rows (a softmax), or where `outer_norm` of
    [0, first_row) and [tail, end). Returns [H_kv, tail - first_row] fp32.
    """
    if q.shape[1] > _MOST_QUERIES:
        parts = [
            soft_votes(part.contiguous(), k, scale, first_row, tail, end, outer_norm=outer_norm)
            for part in q.split(_MOST_QUERIES, dim=1)
        ]
        return torch.stack(parts).sum(0)
    num_kv_heads, num_queries, head_dim = q.shape
    num_rows = tail - first_row
    before, after, num_normed = 0, first_row, num_rows
    if outer_norm:
        before, after, num_normed = first_row, tail, first_row + end - tail
    assert q.is_contiguous() and k.stride()[1:] == (head_dim, 1), "rows must be contiguous"
    assert q.dtype == k.dtype and q.element_size() == 2 and num_rows > 0 and num_normed > 0
    assert 0 <= first_row <= tail <= end <= k.shape[1]
    padded_dim = max(16, triton.next_power_of_2(head_dim))
    padded_queries = max(16, triton.next_power_of_2(num_queries))
    block, num_stages = (128 if padded_dim <= 128 else 64), 3
    # The keys of each stage, and the queries with what the sums over warps need.
    while (block * num_stages + padded_queries) * padded_dim * 2 + (8 << 10) > shared_bytes(q):
        block, num_stages = (block, 2) if num_stages > 2 else (block // 2, 2)
    most = min(max(1, _PROGRAMS // num_kv_heads), _MOST_SPLITS)
    num_stats, num_splits = (min(most, triton.cdiv(size, block)) for size in (num_normed, num_rows))
    stats = q.new_empty((num_kv_heads, num_stats, 2, padded_queries), dtype=torch.float32)
    votes = q.new_empty((num_kv_heads, num_rows), dtype=torch.float32)
    num_warps = 4 if padded_queries <= 64 else 8
    norms_kernel[(num_kv_heads, num_stats)](
        q,
        k,
        k.stride(0),
        stats,
        before,
        after,
        num_normed,
        num_queries,
        head_dim,
        scale * _LOG2_E,
        QUERIES=padded_queries,
        HEAD_DIM=padded_dim,
        BLOCK=block,
        num_warps=num_warps,
        num_stages=num_stages,
    )
    votes_kernel[(num_kv_heads, num_splits)](
        q,
        k,
        k.stride(0),
        stats,
        num_stats,
        votes,
        first_row,
        num_rows,
        num_queries,
        head_dim,
        scale * _LOG2_E,
        QUERIES=padded_queries,
        HEAD_DIM=padded_dim,
        BLOCK=block,
        STATS=triton.next_power_of_2(num_stats),
        num_warps=num_warps,
        num_stages=num_stages,
    )
    return votes
