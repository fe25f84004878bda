"""The rows that a decode step reads besides the kept ones: scored, voted for and chosen in one
kernel, without a sort and without the host.

The rows of a KV head are dealt out to shares in stripes of 16, and each share chooses its part of
the budget. A passage so meets many shares; what this loses against one choice over all rows is
measured in docs/performance.md.
"""

from __future__ import annotations

import triton
import triton.language as tl
from longread_kernels.launch import (
    kept_ranges,
    launch_options,
    prefetch_512,
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
    votes_ptr,
    chosen_ptr,
    budget,
    index_dim,
    next_ptr,
    next_chunks,
    G: tl.constexpr,
    GROUP: tl.constexpr,
    INDEX_DIM: tl.constexpr,
    SUMMED: tl.constexpr,
    SHARE_ROWS: tl.constexpr,
    STRIPE: tl.constexpr,
    PIECE: tl.constexpr,
    FOLD: tl.constexpr,
    STRIPE_BYTES: tl.constexpr,
    NEXT_CHUNKS: tl.constexpr,
    CUTS: tl.constexpr,
    EARLY: tl.constexpr,
):
    kv_head = tl.program_id(0).to(tl.int64)
    share = tl.program_id(1)
    num_shares = tl.num_programs(1)
    num_rows, sink_end, middle, middle_end, tail = kept_ranges(state_ptr, sink_size, window_size)
    rows_ptr += kv_head * rows_stride
    votes_ptr += (kv_head * num_shares + share) * SHARE_ROWS
    num_own = tl.cdiv(num_rows, num_shares * STRIPE) * STRIPE
    if EARLY and STRIPE_BYTES == 512:
        # The rows of earlier steps are there already; the newest, in the window, is not chosen.
        stripes = tl.arange(0, SHARE_ROWS // STRIPE)
        stripes = tl.minimum(stripes, num_own // STRIPE - 1) * num_shares + share
        stripes = tl.minimum(stripes, (num_rows - 1) // STRIPE)
        prefetch_512(rows_ptr.to(tl.int64) + stripes.to(tl.int64) * STRIPE_BYTES)
    wait_for_inputs(EARLY)
    codes, scale, shift = load_codes(
        codes_ptr, scale_ptr, offset_ptr, norm_ptr, kv_head, index_dim, G, GROUP, INDEX_DIM, FOLD
    )
    for start in tl.range(0, num_own, PIECE):
        places = start + tl.arange(0, PIECE // FOLD) * FOLD
        first_rows = (places // STRIPE * num_shares + share) * STRIPE + places % STRIPE
        line = line_votes(
            rows_ptr,
            first_rows,
            num_rows,
            codes,
            scale,
            shift,
            index_dim,
            SUMMED,
            GROUP,
            INDEX_DIM,
            FOLD,
        )
        tl.store(votes_ptr + places[:, None] + tl.arange(0, FOLD)[None, :], line)
    if EARLY and NEXT_CHUNKS > 0:
        # From here on until the next product the memory would have little to do.
        program = kv_head * num_shares + share
        chunks = program * NEXT_CHUNKS + tl.arange(0, NEXT_CHUNKS)
        prefetch_512(next_ptr.to(tl.int64) + tl.minimum(chunks, next_chunks - 1) * 512)
    tl.debug_barrier()  # the votes come back in another order of threads
    places = tl.arange(0, SHARE_ROWS)
    rows = (places // STRIPE * num_shares + share) * STRIPE + places % STRIPE
    kept = (rows < sink_end) | ((rows >= middle) & (rows < middle_end)) | (rows >= tail)
    eligible = (kept == 0) & (places < num_own)
    # The bits of a float that is not negative rank as the float does, by its exponent first.
    votes = tl.load(votes_ptr + places, mask=eligible, other=0.0).to(tl.int32, bitcast=True)
    votes = tl.where(eligible, votes, -1)
    first_place = (budget * share) // num_shares
    quota = (budget * (share + 1)) // num_shares - first_place
    num_taken = tl.minimum(quota, tl.sum(eligible.to(tl.int32), 0))
    # `low`: enough rows have votes over it. `high`: too few have.
    high = tl.max(votes, 0)
    low = tl.min(tl.where(eligible, votes, high), 0) - 1
    for _ in tl.static_range(CUTS):
        third = (high - low) // 3 + 1
        first, second = low + third, low + 2 * third
        both = (votes > first).to(tl.int32) + ((votes > second).to(tl.int32) << 16)
        both = tl.sum(both, 0)  # two counts in one sum
        over_first, over_second = (both & 0xFFFF) >= num_taken, (both >> 16) >= num_taken
        new_high = tl.minimum(tl.where(over_first, second, first), high)
        low = tl.where(over_second, second, tl.where(over_first, first, low))
        high = tl.where(over_second, high, new_high)
    is_above = votes > high
    is_level = (votes > low) & (is_above == 0)
    ones = is_above.to(tl.int32) + (is_level.to(tl.int32) << 16)  # two running counts in one
    ranks = tl.cumsum(ones, 0)
    num_above = tl.sum(is_above.to(tl.int32), 0)
    level_rank = num_above + (ranks >> 16) - 1
    chosen_ptr += kv_head * budget + first_place
    tl.store(chosen_ptr + (ranks & 0xFFFF) - 1, rows, mask=is_above)
    tl.store(chosen_ptr + level_rank, rows, mask=is_level & (level_rank < num_taken))
    for start in tl.range(0, quota, SHARE_ROWS):
        empty = start + places
        tl.store(chosen_ptr + empty, -1, mask=(empty >= num_taken) & (empty < quota))


def _power_of_two(count: int) -> int:
    """The power of two from `count` on, 0 for 0."""
    return triton.next_power_of_2(count) if count else 0


def choose_rows(
    query: Query,
    index: IndexLayer,
    kept: Kept,
    votes: Tensor,
    chosen: Tensor,
    *,
    summed: bool,
    next_weights: Tensor | None = None,
) -> None:
    """Write the rows with the best votes that are not kept anyway.

    votes: scratch [H_kv, shares, rows of a share] fp32, the rows of a share a power of two, with
    room for all rows of the cache; chosen: [H_kv, budget] int32, -1 where rows run out. A row's
    vote is the sum of exp(score - norm) over the heads that share a KV head (`summed`, the vote
    `group`), or the largest score - norm (`group-max`). next_weights: contiguous, what the product
    after the attention reads; it is asked to come into the L2 cache meanwhile.
    """
    num_kv_heads, num_shares, share_rows = votes.shape
    index_dim = index.rows.shape[2]
    group_size = query.codes.shape[0] // num_kv_heads
    group = triton.next_power_of_2(group_size)
    narrowest = 32 // index.rows.element_size()  # of a dot on the tensor cores
    assert query.codes.dtype == index.rows.dtype, "query and rows have codes of one kind"
    assert query.codes.shape == (num_kv_heads * group_size, index_dim)
    assert index.rows.stride()[1:] == (index_dim, 1) and query.codes.is_contiguous()
    assert chosen.is_contiguous() and votes.is_contiguous()
    assert 256 <= share_rows <= 1 << 14 and share_rows & (share_rows - 1) == 0, "a power of two"
    assert num_shares * share_rows >= index.rows.shape[1], "the shares do not hold all rows"
    padded_dim = max(narrowest, triton.next_power_of_2(index_dim))
    row_bytes = padded_dim * index.rows.element_size()
    piece = min(_PIECE, _PIECE_BYTES // row_bytes)
    num_stages = (shared_bytes(votes) - (16 << 10)) // (piece * row_bytes)
    next_chunks = 0
    if next_weights is not None:
        assert next_weights.is_contiguous() and next_weights.data_ptr() % 16 == 0
        next_chunks = next_weights.numel() * next_weights.element_size() // 512
    choose_rows_kernel[(num_kv_heads, num_shares)](
        query.codes,
        query.scale,
        query.offset,
        query.norm,
        index.rows,
        index.rows.stride(0),
        kept.state,
        kept.sink_size,
        kept.window_size,
        votes,
        chosen,
        chosen.shape[1],
        index_dim,
        next_weights if next_weights is not None else votes,
        next_chunks,
        G=group_size,
        GROUP=group,
        INDEX_DIM=padded_dim,
        SUMMED=summed,
        SHARE_ROWS=share_rows,
        STRIPE=STRIPE,
        PIECE=piece,
        CUTS=_CUTS,
        FOLD=max(1, 8 // group),
        STRIPE_BYTES=STRIPE * index_dim * index.rows.element_size(),
        NEXT_CHUNKS=_power_of_two(triton.cdiv(next_chunks, num_kv_heads * num_shares)),
        num_warps=8 if share_rows > 2048 else 4,
        num_stages=max(1, min(4, num_stages)),
        **launch_options(query.codes),
    )
