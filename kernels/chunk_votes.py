"""Which earlier rows a chunk of tokens wants: the softmax of each of its queries over all of them,
summed (TokenSelect's soft vote, arXiv 2411.02886, for several queries of each KV head).

Two passes over the keys, the first for the norms, so that no score is ever stored.
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
def _scores(k_ptr, rows, last, q, head_dim, log2_scale, HEAD_DIM: tl.constexpr):
    """Scores in base 2 of some rows and all queries, [rows, QUERIES] fp32."""
    columns = tl.arange(0, HEAD_DIM)
    k = tl.load(
        k_ptr + rows.to(tl.int64)[:, None] * head_dim + columns[None, :],
        mask=(rows < last)[:, None] & (columns < head_dim)[None, :],
        other=0.0,
    )
    return tl.dot(k, q) * log2_scale


@triton.jit(do_not_specialize=["num_rows"])
def norms_kernel(
    q_ptr,
    k_ptr,
    slab_stride,
    stats_ptr,
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
        rows = start + tl.arange(0, BLOCK)
        scores = _scores(k_ptr, rows, last, q, head_dim, log2_scale, HEAD_DIM)
        scores = tl.where((rows < last)[:, None], scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 0))
        total = total * tl.exp2(top - new_top) + tl.sum(tl.exp2(scores - new_top[None, :]), 0)
        top = new_top
    target = stats_ptr + (kv_head * num_splits + split) * 2 * QUERIES + tl.arange(0, QUERIES)
    tl.store(target, top)
    tl.store(target + QUERIES, total)


@triton.jit(do_not_specialize=["num_rows"])
def votes_kernel(
    q_ptr,
    k_ptr,
    slab_stride,
    stats_ptr,
    votes_ptr,
    num_rows,
    num_queries,
    head_dim,
    log2_scale,
    QUERIES: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    SPLITS: tl.constexpr,
):
    kv_head = tl.program_id(0).to(tl.int64)
    split, num_splits = tl.program_id(1), tl.num_programs(1)
    queries, splits = tl.arange(0, QUERIES), tl.arange(0, SPLITS)
    source = (kv_head * num_splits + splits)[:, None] * 2 * QUERIES + queries[None, :]
    there = (splits < num_splits)[:, None]
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
        rows = start + tl.arange(0, BLOCK)
        scores = _scores(k_ptr, rows, last, q, head_dim, log2_scale, HEAD_DIM)
        votes = tl.sum(tl.exp2(scores - norm[None, :]), 1)
        tl.store(votes_ptr + rows, votes, mask=rows < last)


def soft_votes(q: Tensor, k: Tensor, scale: float) -> Tensor:
    """The softmax of each query over the rows of its KV head, summed over the queries.

    q: [H_kv, M, D] contiguous; k: [H_kv, S, D], rows contiguous, both bf16 or fp16. Returns
    [H_kv, S] fp32.
    """
    num_kv_heads, num_queries, head_dim = q.shape
    num_rows = k.shape[1]
    assert q.is_contiguous() and k.stride()[1:] == (head_dim, 1), "rows must be contiguous"
    assert q.dtype == k.dtype and q.element_size() == 2 and num_rows > 0
    padded_dim = max(16, triton.next_power_of_2(head_dim))
    padded_queries = max(16, triton.next_power_of_2(num_queries))
    block, num_stages = (128 if padded_dim <= 128 else 64), 3
    # The keys of each stage, and the queries with what the sums over warps need.
    while (block * num_stages + padded_queries) * padded_dim * 2 + (8 << 10) > shared_bytes(q):
        block, num_stages = (block, 2) if num_stages > 2 else (block // 2, 2)
    num_splits = min(max(1, _PROGRAMS // num_kv_heads), _MOST_SPLITS, triton.cdiv(num_rows, block))
    stats = q.new_empty((num_kv_heads, num_splits, 2, padded_queries), dtype=torch.float32)
    votes = q.new_empty((num_kv_heads, num_rows), dtype=torch.float32)
    sizes = (num_rows, num_queries, head_dim, scale * _LOG2_E)
    num_warps = 4 if padded_queries <= 64 else 8
    norms_kernel[(num_kv_heads, num_splits)](
        q,
        k,
        k.stride(0),
        stats,
        *sizes,
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
        votes,
        *sizes,
        QUERIES=padded_queries,
        HEAD_DIM=padded_dim,
        BLOCK=block,
        SPLITS=triton.next_power_of_2(num_splits),
        num_warps=num_warps,
        num_stages=num_stages,
    )
    return votes
