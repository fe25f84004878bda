"""The end of flash decoding: the parts of the rows that programs attended to become one output, and
with it one more row that stands in for those that were not read (RazorAttention, arXiv 2407.15891).
"""

from __future__ import annotations

import triton
import triton.language as tl
from longread_kernels.launch import launch_options, wait_for_inputs
from longread_kernels.tables import StandIns
from torch import Tensor

_LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def stand_in_weight(
    q_ptr,
    k_ptr,
    log_weight_ptr,
    norm_ptr,
    unread_ptr,
    num_shares,
    head,
    head_dim,
    scale,
    G: tl.constexpr,
    SHARES: tl.constexpr,
    HEAD_DIM: tl.constexpr,
):
    """The logarithms, in base 2, of what a head's stand-in counts by its key and by votes."""
    columns, shares = tl.arange(0, HEAD_DIM), tl.arange(0, SHARES)
    kv_head, inside = head // G, columns < head_dim
    q = tl.load(q_ptr + head * head_dim + columns, mask=inside, other=0.0).to(tl.float32)
    k = tl.load(k_ptr + kv_head * head_dim + columns, mask=inside, other=0.0)
    by_key = tl.sum(q * k, 0) * scale + tl.load(log_weight_ptr + kv_head)
    votes = tl.load(unread_ptr + kv_head * num_shares + shares, mask=shares < num_shares, other=0.0)
    total = tl.minimum(tl.sum(votes, 0), 1e38)
    by_votes = tl.load(norm_ptr + head) * _LOG2_E + tl.log2(tl.maximum(total, 1e-37) / G)
    return by_key * _LOG2_E, tl.where(total > 0.0, by_votes, float("-inf"))


@triton.jit
def merge_kernel(
    part_ptr,
    part_stats_ptr,
    out_ptr,
    log_sum_ptr,
    num_splits,
    head_dim,
    q_ptr,
    k_ptr,
    v_ptr,
    log_weight_ptr,
    norm_ptr,
    unread_ptr,
    num_shares,
    scale,
    G: tl.constexpr,
    SHARES: tl.constexpr,
    SPLITS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    STAND_IN: tl.constexpr,
    EARLY: tl.constexpr,
):
    head = tl.program_id(0).to(tl.int64)
    splits, columns = tl.arange(0, SPLITS), tl.arange(0, HEAD_DIM)
    split_inside, column_inside = splits < num_splits, columns < head_dim
    wait_for_inputs(EARLY)
    part = head * num_splits + splits
    top = tl.load(part_stats_ptr + part * 2, mask=split_inside, other=-1e38)
    total = tl.load(part_stats_ptr + part * 2 + 1, mask=split_inside, other=0.0)
    parts = tl.load(
        part_ptr + part[:, None] * head_dim + columns[None, :],
        mask=split_inside[:, None] & column_inside[None, :],
        other=0.0,
    )
    highest = tl.max(top, 0)
    if STAND_IN:
        by_key, by_votes = stand_in_weight(
            q_ptr,
            k_ptr,
            log_weight_ptr,
            norm_ptr,
            unread_ptr,
            num_shares,
            head,
            head_dim,
            scale,
            G,
            SHARES,
            HEAD_DIM,
        )
        highest = tl.maximum(highest, tl.maximum(by_key, by_votes))
    weight = tl.exp2(top - highest)
    sum_all = tl.sum(total * weight, 0)
    out = tl.sum(parts * weight[:, None], 0)
    if STAND_IN:
        added = tl.exp2(by_key - highest) + tl.exp2(by_votes - highest)
        v = tl.load(v_ptr + head // G * head_dim + columns, mask=column_inside, other=0.0)
        sum_all += added
        out += added * v
    out = (out / sum_all).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + head * head_dim + columns, out, mask=column_inside)
    tl.store(log_sum_ptr + head, highest + tl.log2(sum_all))


def merge_parts(
    parts: Tensor,
    part_stats: Tensor,
    out: Tensor,
    log_sum: Tensor,
    *,
    q: Tensor | None = None,
    scale: float = 0.0,
    stand_ins: StandIns | None = None,
    early: bool = True,
) -> None:
    """parts [heads, splits, D]: sums of exp2(score - top) v; part_stats [heads, splits, 2]: top and
    the sum of the weights, all fp32. Writes the outputs [heads, D] and log_sum [heads] fp32, in
    base 2. stand_ins: of the queries q [heads, D], one more row each. early: by dependent launch.
    """
    num_heads, num_splits, head_dim = parts.shape
    group_size = num_shares = 1
    assert parts.is_contiguous() and part_stats.is_contiguous() and out.is_contiguous()
    if stand_ins is not None:
        assert q is not None and q.shape == out.shape and q.is_contiguous()
        num_shares = stand_ins.unread.shape[-1]
        group_size = num_heads // stand_ins.log_weight.numel()
        assert stand_ins.unread.numel() == stand_ins.log_weight.numel() * num_shares
        assert stand_ins.k.shape == stand_ins.v.shape and stand_ins.norm.shape == (num_heads,)
        assert stand_ins.k.is_contiguous() and stand_ins.v.is_contiguous()
        assert stand_ins.unread.is_contiguous() and stand_ins.log_weight.is_contiguous()
    merge_kernel[(num_heads,)](
        parts,
        part_stats,
        out,
        log_sum,
        num_splits,
        head_dim,
        q if q is not None else parts,
        stand_ins.k if stand_ins is not None else parts,
        stand_ins.v if stand_ins is not None else parts,
        stand_ins.log_weight if stand_ins is not None else parts,
        stand_ins.norm if stand_ins is not None else parts,
        stand_ins.unread if stand_ins is not None else parts,
        num_shares,
        scale,
        G=group_size,
        SHARES=triton.next_power_of_2(num_shares),
        SPLITS=triton.next_power_of_2(num_splits),
        HEAD_DIM=max(16, triton.next_power_of_2(head_dim)),
        STAND_IN=stand_ins is not None,
        num_warps=4 if num_splits <= 64 else 8,
        **(launch_options(parts) if early else {"EARLY": False}),
    )
