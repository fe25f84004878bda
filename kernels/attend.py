"""Attention of one token over the kept and the chosen rows of each KV head, or over all rows: parts
of the rows in parallel (flash decoding), which merge.py puts together.
"""

from __future__ import annotations

import triton
import triton.language as tl
from longread_kernels.launch import (
    branch_sizes,
    kept_ranges,
    launch_options,
    shared_bytes,
    slab_row,
    wait_for_inputs,
)
from longread_kernels.merge import merge_parts
from longread_kernels.tables import Kept, StandIns
from torch import Tensor

_LOG2_E = 1.4426950408889634
_MOST_JOINED_HEADS = 64  # query heads of a program: what its accumulators hold in registers


@triton.jit
def count_places(sink_end, middle, middle_end, tail, num_rows, num_listed, DENSE: tl.constexpr):
    """How many rows a step reads: all, or the kept ones and the listed ones."""
    if DENSE:
        num_places = num_rows
    else:
        num_places = sink_end + middle_end - middle + num_rows - tail + num_listed
    return num_places


@triton.jit
def row_at(place, chosen_ptr, sink_end, middle, middle_end, tail, num_rows, inside):
    """The row at each place of the list: sinks, question, window, then the chosen ones."""
    num_middle = middle_end - middle
    num_kept = sink_end + num_middle + num_rows - tail
    row = tl.where(place < sink_end, place, middle + place - sink_end)
    row = tl.where(place < sink_end + num_middle, row, tail + place - sink_end - num_middle)
    chosen = tl.load(chosen_ptr + place - num_kept, mask=inside & (place >= num_kept), other=-1)
    return tl.where(place < num_kept, row, chosen)


@triton.jit
def attend_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    slab_stride,
    state_ptr,
    sink_size,
    window_size,
    branches_ptr,
    branch_rows,
    chosen_ptr,
    list_len,
    part_ptr,
    part_stats_ptr,
    logits_ptr,
    logits_stride,
    head_dim,
    log2_scale,
    BRANCHES: tl.constexpr,
    JOINED: tl.constexpr,
    SHARERS: tl.constexpr,
    G: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    DENSE: tl.constexpr,
    TRACED: tl.constexpr,
    EARLY: tl.constexpr,
):
    # Branches read a dense step's rows together, JOINED in a program; each its own chosen rows.
    JOINT: tl.constexpr = DENSE and BRANCHES > 1
    APART: tl.constexpr = (BRANCHES + JOINED - 1) // JOINED
    branch = tl.program_id(0) % APART * JOINED  # the first of them
    set_head = (tl.program_id(0) // APART).to(tl.int64)
    num_sets = tl.num_programs(0) // APART
    split = tl.program_id(1)
    num_splits = tl.num_programs(1)
    group, columns = tl.arange(0, GROUP), tl.arange(0, HEAD_DIM)
    column_inside = columns < head_dim
    branches = branch + group // G
    in_group = (group < G * JOINED) & (branches < BRANCHES)
    heads = (branches * num_sets + set_head) * G + group % G
    num_shared, sink_size, window_size, num_listed, _ = branch_sizes(
        branches_ptr, branch, sink_size, window_size, list_len, BRANCHES > 1
    )
    num_rows, sink_end, middle, middle_end, tail = kept_ranges(
        state_ptr + branch * 3, sink_size, window_size
    )
    wait_for_inputs(EARLY)
    num_places = count_places(sink_end, middle, middle_end, tail, num_rows, num_listed, DENSE)
    if JOINT:
        for other in tl.static_range(JOINED):
            is_branch = branch + other < BRANCHES
            own_end = tl.load(state_ptr + (branch + other) * 3, mask=is_branch, other=0) + 1
            num_places = tl.maximum(
                num_places, tl.where(is_branch, own_end + other * branch_rows, 0)
            )
    q = tl.load(
        q_ptr + heads[:, None] * head_dim + columns[None, :],
        mask=in_group[:, None] & column_inside[None, :],
        other=0.0,
    )
    share = tl.cdiv(tl.cdiv(num_places, num_splits), BLOCK) * BLOCK
    first = split * share
    last = tl.minimum(first + share, num_places)
    k_ptr += set_head // SHARERS * slab_stride
    v_ptr += set_head // SHARERS * slab_stride
    chosen_ptr += (branch * num_sets + set_head) * list_len
    acc = tl.zeros([GROUP, HEAD_DIM], tl.float32)
    total = tl.zeros([GROUP], tl.float32)
    top = tl.full([GROUP], -1e38, tl.float32)
    for start in tl.range(first, last, BLOCK):
        place = start + tl.arange(0, BLOCK)
        inside = place < last
        row = place
        owner = place * 0
        if JOINT:
            ahead = tl.maximum(place - num_shared, 0) // branch_rows
            owner = branch + ahead
            is_owned = inside & (owner < BRANCHES)
            num_owned = tl.load(state_ptr + owner * 3, mask=is_owned, other=-1) + 1
            inside &= place - ahead * branch_rows < num_owned
            row = slab_row(place, num_shared, branch, branch_rows, True)
        if not DENSE:
            row = row_at(place, chosen_ptr, sink_end, middle, middle_end, tail, num_rows, inside)
            inside &= row >= 0
            row = slab_row(row, num_shared, branch, branch_rows, BRANCHES > 1)
        cells = row.to(tl.int64)[:, None] * head_dim + columns[None, :]
        cell_inside = inside[:, None] & column_inside[None, :]
        k = tl.load(k_ptr + cells, mask=cell_inside, other=0.0)
        v = tl.load(v_ptr + cells, mask=cell_inside, other=0.0)
        scores = tl.dot(q, k.T) * log2_scale
        attended = inside[None, :]
        if JOINT:
            own = (place < num_shared)[None, :] | (owner[None, :] == branches[:, None])
            attended = attended & own
        scores = tl.where(attended, scores, float("-inf"))
        if TRACED:
            tl.store(
                logits_ptr + heads[:, None] * logits_stride + place[None, :],
                scores,
                mask=in_group[:, None] & inside[None, :],
            )
        new_top = tl.maximum(top, tl.max(scores, 1))
        probs = tl.exp2(scores - new_top[:, None])
        rescale = tl.exp2(top - new_top)
        total = total * rescale + tl.sum(probs, 1)
        acc = tl.dot(probs.to(v.dtype), v, acc * rescale[:, None])
        top = new_top
    part = heads * num_splits + split
    tl.store(
        part_ptr + part[:, None] * head_dim + columns[None, :],
        acc,
        mask=in_group[:, None] & column_inside[None, :],
    )
    tl.store(part_stats_ptr + part * 2, top, mask=in_group)
    tl.store(part_stats_ptr + part * 2 + 1, total, mask=in_group)


def attend_token(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    kept: Kept,
    chosen: Tensor | None,
    scale: float,
    out: Tensor,
    parts: Tensor,
    part_stats: Tensor,
    *,
    log_sum: Tensor,
    logits: Tensor | None = None,
    stand_ins: StandIns | None = None,
) -> None:
    """Softmax attention of each branch's token over the kept rows, the chosen ones and stand-ins.

    q: [B H_q, D]; k, v: slabs [H_kv, capacity, D]; chosen: [B, sets, budget] or [sets, budget]
    int32, as `choose_rows` wrote them or fixed, -1 for none, or None for all rows; out: [B H_q, D].
    Scratch: parts [B H_q, splits, D], part_stats [B H_q, splits, 2], log_sum [B H_q], all fp32;
    logits [B H_q, places] takes the scores of the rows where it is given, in base 2, of sets of KV
    heads only: of a dense step with branches those of the rows that all share, of others by place.
    """
    num_heads, head_dim = q.shape
    num_kv_heads, num_splits, num_branches = k.shape[0], parts.shape[1], kept.num_branches
    num_sets = num_kv_heads if chosen is None else chosen.shape[-2]
    group_size = num_heads // (num_branches * num_sets)
    assert k.stride() == v.stride() and k.stride()[1:] == (head_dim, 1), "rows must be contiguous"
    assert q.is_contiguous() and out.is_contiguous() and parts.is_contiguous()
    assert parts.shape == (num_heads, num_splits, head_dim) and q.dtype == k.dtype == v.dtype
    assert part_stats.shape == (num_heads, num_splits, 2) and log_sum.shape == (num_heads,)
    assert logits is None or num_sets == num_kv_heads, "is not traced"
    assert num_sets % num_kv_heads == 0, "a set reads the rows of one KV head"
    assert chosen is None or (
        chosen.is_contiguous() and chosen.shape[:-1].numel() == num_branches * num_sets
    )
    assert (kept.branches is not None) == (num_branches > 1), "branches say their sizes"
    assert stand_ins is None or num_sets == num_kv_heads, "a stand-in is a KV head's"
    padded_dim = max(16, triton.next_power_of_2(head_dim))
    options = launch_options(q)
    joined = 1
    if chosen is None:  # as few programs as registers allow, with as many branches each
        apart = triton.cdiv(num_branches, max(1, _MOST_JOINED_HEADS // group_size))
        joined = triton.cdiv(num_branches, apart)
    apart = triton.cdiv(num_branches, joined)
    group = max(16, triton.next_power_of_2(group_size * joined))
    # Measured on an H200: all rows, a long list, a list that gives each program one tile.
    block, num_warps, num_stages = 128, 4, 3
    if chosen is not None:
        num_places = chosen.shape[-1] + kept.sink_size + kept.window_size
        block, num_warps, num_stages = 128, 8, 3
        if num_places <= 64 * num_splits:
            block, num_warps, num_stages = 64, 4, 1
    # K and V of each stage but one, and what the dots need besides.
    while block * padded_dim * 4 * max(num_stages - 1, 1) + (9 << 10) > shared_bytes(q):
        block //= 2
    if group > 32:  # then the products are Hopper's, which keep all stages in shared memory
        block //= 2
    attend_kernel[(num_sets * apart, num_splits)](
        q,
        k,
        v,
        k.stride(0),
        kept.state,
        kept.sink_size,
        kept.window_size,
        kept.branches if kept.branches is not None else kept.state,
        kept.branch_rows,
        chosen if chosen is not None else q,
        chosen.shape[-1] if chosen is not None else 0,
        parts,
        part_stats,
        logits if logits is not None else parts,
        logits.shape[1] if logits is not None else 0,
        head_dim,
        scale * _LOG2_E,
        BRANCHES=num_branches,
        JOINED=joined,
        SHARERS=num_sets // num_kv_heads,
        G=group_size,
        GROUP=group,
        HEAD_DIM=padded_dim,
        BLOCK=block,
        DENSE=chosen is None,
        TRACED=logits is not None,
        num_warps=num_warps,
        num_stages=num_stages,
        **options,
    )
    merge_parts(parts, part_stats, out, log_sum, q=q, scale=scale, stand_ins=stand_ins)
