"""Exact causal attention of many tokens over the cache: the flash algorithm (arXiv 2307.08691) with
the causal mask at the lower right, for any number of earlier rows in one compiled kernel.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

_LOG2_E = 1.4426950408889634


@triton.jit
def _attend_tiles(
    state,
    q,
    k_rows,
    v_rows,
    kv_head,
    first,
    last,
    limits,
    log2_scale,
    BLOCK_N: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Fold rows [first, last) into the running softmax; `limits`: the last row of each query."""
    acc, total, top = state
    for start in tl.range(first, last, BLOCK_N):
        k = k_rows.load([kv_head, start, 0]).reshape(BLOCK_N, HEAD_DIM)
        scores = tl.dot(q, k.T)
        if MASKED:
            rows = start + tl.arange(0, BLOCK_N)
            scores = tl.where(rows[None, :] <= limits[:, None], scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1) * log2_scale)
        probs = tl.exp2(scores * log2_scale - new_top[:, None])
        rescale = tl.exp2(top - new_top)
        total = total * rescale + tl.sum(probs, 1)
        v = v_rows.load([kv_head, start, 0]).reshape(BLOCK_N, HEAD_DIM)
        acc = tl.dot(probs.to(v.dtype), v, acc * rescale[:, None])
        top = new_top
    return acc, total, top


@triton.jit(do_not_specialize=["num_tokens", "num_past"])
def attend_causal_kernel(
    q_rows,
    k_rows,
    v_rows,
    out_ptr,
    num_tokens,
    num_past,
    num_heads,
    group_size,
    head_dim,
    log2_scale,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HEAD_DIM: tl.constexpr,
):
    # The longest blocks first, so that the short ones fill the end.
    block = tl.num_programs(0) - 1 - tl.program_id(0)
    head = tl.program_id(1)
    kv_head = head // group_size
    tokens = block * BLOCK_M + tl.arange(0, BLOCK_M)
    limits = num_past + tokens
    q = q_rows.load([block * BLOCK_M, head, 0]).reshape(BLOCK_M, HEAD_DIM)
    acc = tl.zeros([BLOCK_M, HEAD_DIM], tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    top = tl.full([BLOCK_M], -1e38, tl.float32)  # finite: -inf minus -inf is no number
    state = (acc, total, top)
    num_open = (num_past + block * BLOCK_M) // BLOCK_N * BLOCK_N  # rows that no query masks
    end = num_past + tl.minimum((block + 1) * BLOCK_M, num_tokens)
    state = _attend_tiles(
        state, q, k_rows, v_rows, kv_head, 0, num_open, limits, log2_scale, BLOCK_N, HEAD_DIM, False
    )
    acc, total, top = _attend_tiles(
        state,
        q,
        k_rows,
        v_rows,
        kv_head,
        num_open,
        end,
        limits,
        log2_scale,
        BLOCK_N,
        HEAD_DIM,
        True,
    )
    columns = tl.arange(0, HEAD_DIM)
    offsets = (tokens[:, None].to(tl.int64) * num_heads + head) * head_dim + columns[None, :]
    inside = (tokens[:, None] < num_tokens) & (columns[None, :] < head_dim)
    tl.store(out_ptr + offsets, (acc / total[:, None]).to(out_ptr.dtype.element_ty), mask=inside)


def attend_causal(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """T tokens attend to all S - T earlier rows and to each other.

    q: [T, H_q, D] contiguous; k, v: [H_kv, S, D], rows contiguous, all bf16 or fp16, the last T
    rows being the tokens' own; returns [T, H_q, D]. Rows past S in the slab are never read.
    """
    num_tokens, num_heads, head_dim = q.shape
    num_kv_heads, num_rows, _ = k.shape
    assert q.is_contiguous() and k.stride(2) == v.stride(2) == 1, "rows must be contiguous"
    assert q.dtype == k.dtype == v.dtype and q.element_size() == 2, "bf16 or fp16"
    assert num_rows >= num_tokens and num_heads % num_kv_heads == 0
    padded_dim = max(16, triton.next_power_of_2(head_dim))
    block_m = block_n = 64
    out = torch.empty_like(q)
    attend_causal_kernel[(triton.cdiv(num_tokens, block_m), num_heads)](
        TensorDescriptor.from_tensor(q, [block_m, 1, padded_dim]),
        TensorDescriptor.from_tensor(k, [1, block_n, padded_dim]),
        TensorDescriptor.from_tensor(v, [1, block_n, padded_dim]),
        out,
        num_tokens,
        num_rows - num_tokens,
        num_heads,
        num_heads // num_kv_heads,
        head_dim,
        scale * _LOG2_E,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        HEAD_DIM=padded_dim,
        num_warps=4,
        num_stages=3 if padded_dim <= 128 else 2,
    )
    return out
