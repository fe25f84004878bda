"""The rows that a decode step reads besides the kept ones: scored, voted for and chosen in one
kernel, without a sort and without the host.

The rows of a KV head are dealt out to shares in stripes of 16, and each share chooses its part of
the budget. A passage so meets many shares; what this loses against one choice over all rows is
measured in docs/quality.md.
"""

from __future__ import annotations

import triton
import triton.language as tl
from longread_kernels.launch import (
    branch_sizes,
    kept_ranges,
    launch_options,
    shared_bytes,
    wait_for_inputs,
)
from longread_kernels.score import line_votes, load_codes
from longread_kernels.tables import STRIPE, IndexLayer, Kept, Query
from torch import Tensor

_PIECE = 256  # rows scored at a time, fewer where they are wide
_PIECE_BYTES = 32 << 10
_CUTS = 9  # of the range of votes, into three parts each


@triton.jit
def choose_rows_kernel(
    codes_ptr,
    scale_ptr,
    offset_ptr,
    norm_ptr,
    rows_ptr,
    rows_stride,
    state_ptr,
    sink_size,
    window_size,
    branches_ptr,
    branch_rows,
    votes_ptr,
    chosen_ptr,
    list_len,
    unread_ptr,
    index_dim,
    BRANCHES: tl.constexpr,
    SHARERS: tl.constexpr,
    G: tl.constexpr,
    GROUP: tl.constexpr,
    INDEX_DIM: tl.constexpr,
    SUMMED: tl.constexpr,
    COUNTS_UNREAD: tl.constexpr,
    SHARE_ROWS: tl.constexpr,
    STRIPE: tl.constexpr,
    PIECE: tl.constexpr,
    FOLD: tl.constexpr,
    CUTS: tl.constexpr,
    LINE: tl.constexpr,
    EARLY: tl.constexpr,
):
    # The branches of one set stand side by side, so that they find its rows in the L2 cache.
    branch = tl.program_id(0) % BRANCHES
    head = (tl.program_id(0) // BRANCHES).to(tl.int64)
    num_heads = tl.num_programs(0) // BRANCHES
    share = tl.program_id(1)
    num_shares = tl.num_programs(1)
    num_shared, sink_size, window_size, _, budget = branch_sizes(
        branches_ptr, branch, sink_size, window_size, list_len, BRANCHES > 1
    )
    num_rows, sink_end, middle, middle_end, tail = kept_ranges(
        state_ptr + branch * 3, sink_size, window_size
    )
    set_idx = branch * num_heads + head
    rows_ptr += head // SHARERS * rows_stride
    votes_ptr += (set_idx * num_shares + share) * SHARE_ROWS
    num_own = tl.cdiv(num_rows, num_shares * STRIPE) * STRIPE
    wait_for_inputs(EARLY)
    if BRANCHES > 1:
        if budget == 0:
            return  # its list is fixed
    codes, scale, shift = load_codes(
        codes_ptr,
        scale_ptr,
        offset_ptr,
        norm_ptr,
        set_idx * G,
        index_dim,
        G,
        GROUP,
        INDEX_DIM,
        FOLD,
    )
    for start in tl.range(0, num_own, PIECE):
        places = start + tl.arange(0, PIECE // FOLD) * FOLD
        first_rows = (places // STRIPE * num_shares + share) * STRIPE + places % STRIPE
        line = line_votes(
            rows_ptr,
            first_rows,
            num_rows,
            num_shared,
            branch,
            branch_rows,
            codes,
            scale,
            shift,
            index_dim,
            SUMMED,
            GROUP,
            INDEX_DIM,
            FOLD,
            BRANCHES > 1,
        )
        tl.store(votes_ptr + places[:, None] + tl.arange(0, FOLD)[None, :], line)
    tl.debug_barrier()  # the votes come back in another order of threads
    places = tl.arange(0, SHARE_ROWS)
    rows = (places // STRIPE * num_shares + share) * STRIPE + places % STRIPE
    # The bits of a float that is not negative rank as the float does. The low ones give way to the
    # place, the earlier first, so that no two keys are equal.
    keys = tl.load(votes_ptr + places).to(tl.int32, bitcast=True)
    keys = (keys & -SHARE_ROWS) | (SHARE_ROWS - 1 - places)
    keys = tl.where(rows < sink_end, -1, keys)
    keys = tl.where((rows >= middle) & (rows < middle_end), -1, keys)
    keys = tl.where(rows >= tail, -1, keys)  # and what lies past the last row
    first_place = budget * share.to(tl.int64) // num_shares
    quota = (budget * (share.to(tl.int64) + 1) // num_shares - first_place).to(tl.int32)
    # `low`: enough keys are over it, or all that may be chosen. `high`: too few are.
    high = tl.max(keys, 0)
    low = tl.minimum(tl.min(tl.where(keys < 0, 0x7FFFFFFF, keys), 0) - 1, high)
    for _ in tl.static_range(CUTS):
        third = (high - low) // 3 + 1
        first, second = low + third, low + 2 * third
        both = (keys > first).to(tl.int32) + ((keys > second).to(tl.int32) << 16)
        both = tl.sum(both, 0)  # two counts in one sum
        over_first, over_second = (both & 0xFFFF) >= quota, (both >> 16) >= quota
        new_high = tl.minimum(tl.where(over_first, second, first), high)
        low = tl.where(over_second, second, tl.where(over_first, first, low))
        high = tl.where(over_second, high, new_high)
    # Keys over `high` come first, then those of the last cut in the order of their places. Two
    # sums, over the keys of a line and over the lines, keep each thread with its own keys; one
    # running sum is computed twice by Triton 3.6, in the loads' layout and in the stores'.
    ones = tl.where(keys > high, 1, tl.where(keys > low, 1 << 16, 0))  # two counts in one
    ones = tl.reshape(ones, [SHARE_ROWS // LINE, LINE])
    in_line = tl.sum(ones, 1)
    ranks = (tl.cumsum(in_line, 0) - in_line)[:, None] + tl.cumsum(ones, 1)
    counts = tl.sum(in_line, 0)
    num_over = counts & 0xFFFF
    ranks = tl.where(ones == 1, ranks & 0xFFFF, num_over + (ranks >> 16)) - 1
    num_taken = tl.minimum(num_over + (counts >> 16), quota)
    chosen_ptr += set_idx * list_len + first_place
    taken = (ones > 0) & (ranks < quota)
    tl.store(chosen_ptr + ranks, tl.reshape(rows, [SHARE_ROWS // LINE, LINE]), mask=taken)
    if COUNTS_UNREAD:
        left = (tl.reshape(keys, [SHARE_ROWS // LINE, LINE]) >= 0) & (taken == 0)
        left_votes = votes_ptr + tl.reshape(places, [SHARE_ROWS // LINE, LINE])
        left_votes = tl.load(left_votes, mask=left, other=0.0)
        tl.store(unread_ptr + set_idx * num_shares + share, tl.sum(tl.sum(left_votes, 1), 0))
    if num_taken < quota:
        for start in tl.range(0, quota, SHARE_ROWS):
            empty = start + places
            tl.store(chosen_ptr + empty, -1, mask=(empty >= num_taken) & (empty < quota))


def choose_rows(
    query: Query,
    index: IndexLayer,
    kept: Kept,
    votes: Tensor,
    chosen: Tensor,
    *,
    summed: bool,
    unread: Tensor | None = None,
) -> None:
    """Write the rows with the best votes that are not kept anyway.

    votes: scratch [B sets, shares, rows of a share] fp32, the rows of a share a power of two, with
    room for all rows of a branch; chosen: [B, sets, budget] or [sets, budget] int32, -1 where rows
    run out, the sets one for each KV head or one for each query head. A row's vote is the sum of
    exp(score - norm) over the heads of a set (`summed`, the vote `group`), or the largest score -
    norm (`group-max`). unread: takes the summed votes of the rows neither chosen nor kept, [B sets,
    shares] fp32.
    """
    num_sets, num_branches = chosen.shape[-2], kept.num_branches
    _, num_shares, share_rows = votes.shape
    index_dim = index.rows.shape[2]
    group_size = query.codes.shape[0] // (num_branches * num_sets)
    group = triton.next_power_of_2(group_size)
    narrowest = 32 // index.rows.element_size()  # of a dot on the tensor cores
    assert query.codes.dtype == index.rows.dtype, "query and rows have codes of one kind"
    assert query.codes.shape == (num_branches * num_sets * group_size, index_dim)
    assert num_sets % index.rows.shape[0] == 0, "a set reads the rows of one KV head"
    assert index.rows.stride()[1:] == (index_dim, 1) and query.codes.is_contiguous()
    assert chosen.is_contiguous() and votes.is_contiguous()
    assert chosen.shape[:-1].numel() == votes.shape[0] == num_branches * num_sets
    assert (kept.branches is not None) == (num_branches > 1), "branches say their sizes"
    assert unread is None or (unread.is_contiguous() and unread.shape == votes.shape[:2])
    assert 256 <= share_rows <= 1 << 14 and share_rows & (share_rows - 1) == 0, "a power of two"
    num_rows = index.rows.shape[1] - (num_branches - 1) * kept.branch_rows
    assert num_shares * share_rows >= num_rows, "the shares do not hold all rows"
    padded_dim = max(narrowest, triton.next_power_of_2(index_dim))
    row_bytes = padded_dim * index.rows.element_size()
    piece = min(_PIECE, _PIECE_BYTES // row_bytes)
    num_stages = (shared_bytes(votes) - (16 << 10)) // (piece * row_bytes)
    choose_rows_kernel[(num_sets * num_branches, num_shares)](
        query.codes,
        query.scale,
        query.offset,
        query.norm,
        index.rows,
        index.rows.stride(0),
        kept.state,
        kept.sink_size,
        kept.window_size,
        kept.branches if kept.branches is not None else kept.state,
        kept.branch_rows,
        votes,
        chosen,
        chosen.shape[-1],
        unread if unread is not None else votes,
        index_dim,
        BRANCHES=num_branches,
        SHARERS=num_sets // index.rows.shape[0],
        G=group_size,
        GROUP=group,
        INDEX_DIM=padded_dim,
        SUMMED=summed,
        COUNTS_UNREAD=unread is not None,
        SHARE_ROWS=share_rows,
        STRIPE=STRIPE,
        PIECE=piece,
        CUTS=_CUTS,
        LINE=4,  # floats of a 16-byte load
        FOLD=max(1, 8 // group),
        num_warps=8 if share_rows > 2048 else 4,
        num_stages=max(1, min(4, num_stages)),
        **launch_options(query.codes),
    )
