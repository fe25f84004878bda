"""Index scores of one token for some rows, and the vote of the heads that share a KV head.

A tensor core's tile has eight columns at least, and few models have eight query heads to a KV head.
So a line of the tile holds FOLD rows of the index side by side, and the queries stand FOLD times in
the other factor, each time opposite one of them.
"""

from __future__ import annotations

import triton
import triton.language as tl
from longread_kernels.launch import slab_row

_LOG2_E = tl.constexpr(1.4426950408889634)
_HIGHEST = tl.constexpr(120.0)  # of a score over its norm, in base 2; fp32 ends at 128


@triton.jit
def load_codes(
    codes_ptr,
    scale_ptr,
    offset_ptr,
    norm_ptr,
    first_head,
    index_dim,
    G: tl.constexpr,
    GROUP: tl.constexpr,
    INDEX_DIM: tl.constexpr,
    FOLD: tl.constexpr,
):
    """The queries of one KV head as the right side of a dot [FOLD d, FOLD G], and their scale and
    shift [FOLD G] in base 2; the heads that only fill the tile have a shift of -inf.
    """
    places, lines = tl.arange(0, FOLD * GROUP), tl.arange(0, FOLD * INDEX_DIM)
    group, columns = places % GROUP, lines % INDEX_DIM
    in_group = group < G
    heads = first_head + group
    opposite = (places // GROUP)[None, :] == (lines // INDEX_DIM)[:, None]
    codes = tl.load(
        codes_ptr + heads[None, :] * index_dim + columns[:, None],
        mask=opposite & in_group[None, :] & (columns < index_dim)[:, None],
        other=0.0,
    )
    scale = tl.load(scale_ptr + heads, mask=in_group, other=0.0) * _LOG2_E
    offset = tl.load(offset_ptr + heads, mask=in_group, other=0.0)
    offset -= tl.load(norm_ptr + heads, mask=in_group, other=0.0)
    return codes, scale, tl.where(in_group, offset * _LOG2_E, float("-inf"))


@triton.jit
def line_votes(
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
    SUMMED: tl.constexpr,
    GROUP: tl.constexpr,
    INDEX_DIM: tl.constexpr,
    FOLD: tl.constexpr,
    BRANCHED: tl.constexpr,
):
    """The votes [lines, FOLD] of FOLD rows from each first row on: the sum of exp(score - norm)
    over the heads, or the largest exp(score - norm).
    """
    lines = tl.arange(0, FOLD * INDEX_DIM)
    columns = lines % INDEX_DIM
    rows = first_rows[:, None] + (lines // INDEX_DIM)[None, :]
    places = slab_row(rows, num_shared, branch, branch_rows, BRANCHED)
    tile = tl.load(
        rows_ptr + places.to(tl.int64) * index_dim + columns[None, :],
        mask=(rows < num_rows) & (columns < index_dim)[None, :],
        other=0.0,
    )
    scores = tl.dot(tile, codes).to(tl.float32) * scale[None, :] + shift[None, :]
    weights = tl.exp2(tl.minimum(scores, _HIGHEST))
    weights = tl.reshape(weights, [first_rows.shape[0], FOLD, GROUP])
    if SUMMED:
        votes = tl.sum(weights, 2)
    else:
        votes = tl.max(weights, 2)
    return votes
