"""The rows with the best votes in the order of rows, between the first and the last ones: a radix
select over shares of the rows that run side by side. No sort, no atomics, and no host.

The bits of a float that is not negative rank as the float does. Two counts of 11 bits each find the
vote down to which rows are taken; of votes that are alike in these 22 bits the first rows win.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_SHARES = 16
_TILE = 2048
_BINS = 2048  # of 11 bits
_SIGN_LESS = tl.constexpr(0x7FFFFFFF)


@triton.jit
def _cut(counts_ptr, share, num_wanted, SHARES: tl.constexpr, BINS: tl.constexpr):
    """The digit down to which `num_wanted` rows are taken, how many rows have a higher one, and how
    many of the shares before `share` have a higher one or the same.
    """
    bins = tl.arange(0, BINS)
    total, before = tl.zeros([BINS], tl.int32), tl.zeros([BINS], tl.int32)
    for other in tl.static_range(SHARES):
        counts = tl.load(counts_ptr + other * BINS + bins)
        total += counts
        before += tl.where(other < share, counts, 0)
    at_least = tl.sum(total, 0) - tl.cumsum(total, 0) + total
    digit = tl.sum((at_least >= num_wanted).to(tl.int32), 0) - 1
    num_over = tl.sum(tl.where(bins > digit, total, 0), 0)
    over_before = tl.sum(tl.where(bins > digit, before, 0), 0)
    same_before = tl.sum(tl.where(bins == digit, before, 0), 0)
    return digit, num_over, over_before, same_before


@triton.jit(do_not_specialize=["num_rows", "num_wanted"])
def count_votes_kernel(
    votes_ptr,
    high_counts_ptr,
    counts_ptr,
    num_rows,
    num_wanted,
    LOW: tl.constexpr,
    SHARES: tl.constexpr,
    TILE: tl.constexpr,
    BINS: tl.constexpr,
):
    head, share = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if LOW:
        high, _, _, _ = _cut(
            high_counts_ptr + head * SHARES * BINS, share, num_wanted, SHARES, BINS
        )
    votes_ptr += head * num_rows
    share_rows = tl.cdiv(tl.cdiv(num_rows, SHARES), TILE) * TILE
    first = share * share_rows
    last = tl.minimum(first + share_rows, num_rows)
    counts = tl.zeros([BINS], tl.int32)
    for start in tl.range(first, last, TILE):
        rows = start + tl.arange(0, TILE)
        inside = rows < last
        votes = tl.load(votes_ptr + rows, mask=inside, other=0.0)
        bits = votes.to(tl.int32, bitcast=True) & _SIGN_LESS
        if LOW:
            counts += tl.histogram((bits >> 9) & (BINS - 1), BINS, inside & (bits >> 20 == high))
        else:
            counts += tl.histogram(bits >> 20, BINS, inside)
    tl.store(counts_ptr + (head * SHARES + share) * BINS + tl.arange(0, BINS), counts)


@triton.jit(do_not_specialize=["num_rows", "num_wanted", "first_row", "tail_shift", "list_len"])
def list_rows_kernel(
    votes_ptr,
    high_counts_ptr,
    low_counts_ptr,
    list_ptr,
    num_rows,
    num_wanted,
    first_row,
    tail_shift,
    list_len,
    SHARES: tl.constexpr,
    TILE: tl.constexpr,
    BINS: tl.constexpr,
):
    head, share = tl.program_id(0).to(tl.int64), tl.program_id(1)
    counts = head * SHARES * BINS
    high, num_over, over_before, _ = _cut(high_counts_ptr + counts, share, num_wanted, SHARES, BINS)
    low, low_over, low_before, same_before = _cut(
        low_counts_ptr + counts, share, num_wanted - num_over, SHARES, BINS
    )
    cut = high * BINS + low
    num_same = num_wanted - num_over - low_over  # that are taken of the rows at the cut
    num_taken = over_before + low_before + tl.minimum(same_before, num_same)
    votes_ptr += head * num_rows
    list_ptr += head * list_len
    share_rows = tl.cdiv(tl.cdiv(num_rows, SHARES), TILE) * TILE
    first = share * share_rows
    last = tl.minimum(first + share_rows, num_rows)
    for start in tl.range(first, last, TILE):
        rows = start + tl.arange(0, TILE)
        inside = rows < last
        votes = tl.load(votes_ptr + rows, mask=inside, other=0.0)
        keys = (votes.to(tl.int32, bitcast=True) & _SIGN_LESS) >> 9
        same = (inside & (keys == cut)).to(tl.int32)
        rank = same_before + tl.cumsum(same, 0) - same
        taken = ((inside & (keys > cut)) | ((same > 0) & (rank < num_same))).to(tl.int32)
        place = first_row + num_taken + tl.cumsum(taken, 0) - taken
        tl.store(list_ptr + place, first_row + rows, mask=taken > 0)
        same_before += tl.sum(same, 0)
        num_taken += tl.sum(taken, 0)
    for start in tl.range(share * TILE, list_len, SHARES * TILE):
        place = start + tl.arange(0, TILE)
        in_tail = (place >= first_row + num_wanted) & (place < list_len)
        tl.store(list_ptr + place, place, mask=place < tl.minimum(first_row, list_len))
        tl.store(list_ptr + place, place + tail_shift, mask=in_tail)


def list_rows(votes: Tensor, num_chosen: int, first_row: int, end: int) -> Tensor:
    """The rows before the voted ones, `num_chosen` of these, and the rows after them, ascending.

    votes: [H_kv, S] fp32 contiguous, none negative, of rows [first_row, first_row + S); num_chosen:
    from 1 to S. Returns [H_kv, first_row + num_chosen + end - first_row - S] int32.
    """
    num_kv_heads, num_rows = votes.shape
    tail = first_row + num_rows
    assert votes.is_contiguous() and votes.dtype == torch.float32
    assert 1 <= num_chosen <= num_rows and tail <= end
    list_len = first_row + num_chosen + end - tail
    rows = torch.empty((num_kv_heads, list_len), dtype=torch.int32, device=votes.device)
    counts = torch.empty((2, num_kv_heads, _SHARES, _BINS), dtype=torch.int32, device=votes.device)
    grid = (num_kv_heads, _SHARES)
    for low in (False, True):
        count_votes_kernel[grid](
            votes,
            counts[0],
            counts[int(low)],
            num_rows,
            num_chosen,
            LOW=low,
            SHARES=_SHARES,
            TILE=_TILE,
            BINS=_BINS,
            num_warps=8,
        )
    list_rows_kernel[grid](
        votes,
        counts[0],
        counts[1],
        rows,
        num_rows,
        num_chosen,
        first_row,
        num_rows - num_chosen,
        list_len,
        SHARES=_SHARES,
        TILE=_TILE,
        BINS=_BINS,
        num_warps=8,
    )
    return rows
