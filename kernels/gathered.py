"""Attention to a list of rows whose keys are cached before RoPE: a row's place in the list is its
position (TokenSelect's length extrapolation, arXiv 2411.02886).

Few tokens turn the keys where they attend to them, parts of the list side by side (flash decoding).
For a chunk this would turn each key once for every block of queries: there one kernel turns the
list once, and attention takes it as a prefill does.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from longread_kernels.launch import shared_bytes
from longread_kernels.merge import merge_parts
from longread_kernels.rotate import turned
from longread_kernels.turn_rows import attend_turned, check_list
from torch import Tensor

_LOG2_E = 1.4426950408889634
_PROGRAMS = 256  # in all, about two for each multiprocessor of a large GPU
_MOST_SPLITS = 64
_TURNED_TOKENS = 16  # and more of them are a chunk


@triton.jit(do_not_specialize=["num_places", "num_tokens", "list_stride", "logits_stride"])
def attend_listed_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    slab_stride,
    list_ptr,
    list_stride,
    counts_ptr,
    cos_ptr,
    sin_ptr,
    part_ptr,
    part_stats_ptr,
    logits_ptr,
    logits_stride,
    num_places,
    num_tokens,
    num_heads,
    half_dim,
    log2_scale,
    SHARERS: tl.constexpr,
    G: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HALF: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    COUNTED: tl.constexpr,
    TRACED: tl.constexpr,
):
    set_idx = tl.program_id(1).to(tl.int64)
    split, num_splits = tl.program_id(2), tl.num_programs(2)
    if COUNTED:
        num_places = tl.load(counts_ptr + set_idx)
    members = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    tokens = members // G
    token_inside = tokens < num_tokens
    lines = tokens * num_heads + set_idx * G + members % G
    limits = num_places - num_tokens + tokens  # the last place that each token reads
    halves, columns = tl.arange(0, HALF), tl.arange(0, HEAD_DIM)
    half_inside, column_inside = (halves < half_dim)[None, :], (columns < 2 * half_dim)[None, :]
    inside = token_inside[:, None] & half_inside
    cells = lines[:, None] * 2 * half_dim + halves[None, :]
    angles = limits.to(tl.int64)[:, None] * half_dim + halves[None, :]
    lower_q, upper_q = turned(
        tl.load(q_ptr + cells, mask=inside, other=0.0),
        tl.load(q_ptr + cells + half_dim, mask=inside, other=0.0),
        tl.load(cos_ptr + angles, mask=inside, other=0.0),
        tl.load(sin_ptr + angles, mask=inside, other=0.0),
    )
    share = tl.cdiv(tl.cdiv(num_places, num_splits), BLOCK_N) * BLOCK_N
    first = split * share
    last = tl.minimum(first + share, tl.max(tl.where(token_inside, limits, -1), 0) + 1)
    k_ptr += set_idx // SHARERS * slab_stride
    v_ptr += set_idx // SHARERS * slab_stride
    list_ptr += set_idx * list_stride
    acc = tl.zeros([BLOCK_M, HEAD_DIM], tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    top = tl.full([BLOCK_M], -1e38, tl.float32)  # finite: -inf minus -inf is no number
    for start in tl.range(first, last, BLOCK_N):
        places = start + tl.arange(0, BLOCK_N)
        place_inside = places < last
        rows = tl.load(list_ptr + places, mask=place_inside, other=0).to(tl.int64)[:, None]
        key_inside = place_inside[:, None] & half_inside
        key_cells = rows * 2 * half_dim + halves[None, :]
        key_angles = places.to(tl.int64)[:, None] * half_dim + halves[None, :]
        lower_k, upper_k = turned(
            tl.load(k_ptr + key_cells, mask=key_inside, other=0.0),
            tl.load(k_ptr + key_cells + half_dim, mask=key_inside, other=0.0),
            tl.load(cos_ptr + key_angles, mask=key_inside, other=0.0),
            tl.load(sin_ptr + key_angles, mask=key_inside, other=0.0),
        )
        v = tl.load(
            v_ptr + rows * 2 * half_dim + columns[None, :],
            mask=place_inside[:, None] & column_inside,
            other=0.0,
        )
        scores = tl.dot(lower_q, lower_k.T)
        scores = tl.dot(upper_q, upper_k.T, scores) * log2_scale
        attended = place_inside[None, :] & (places[None, :] <= limits[:, None])
        scores = tl.where(attended, scores, float("-inf"))
        if TRACED:
            tl.store(
                logits_ptr + lines[:, None] * logits_stride + places[None, :],
                scores,
                mask=token_inside[:, None] & place_inside[None, :],
            )
        new_top = tl.maximum(top, tl.max(scores, 1))
        probs = tl.exp2(scores - new_top[:, None])
        rescale = tl.exp2(top - new_top)
        total = total * rescale + tl.sum(probs, 1)
        acc = tl.dot(probs.to(v.dtype), v, acc * rescale[:, None])
        top = new_top
    parts = lines * num_splits + split
    tl.store(
        part_ptr + parts[:, None] * 2 * half_dim + columns[None, :],
        acc,
        mask=token_inside[:, None] & column_inside,
    )
    tl.store(part_stats_ptr + parts * 2, top, mask=token_inside)
    tl.store(part_stats_ptr + parts * 2 + 1, total, mask=token_inside)


def attend_turning(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rows: Tensor,
    counts: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    scale: float,
    *,
    traced: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """The last T rows of each list attend to the list, causally; keys are turned on the way.

    q: [T, H_q, D] contiguous; rows: [sets, n] int32 or int64, rows contiguous, each set's queries
    as many heads of one KV head; counts: [sets] int32, the rows of each list, or None for n; cos,
    sin: [n or more, D/2] fp32. Returns [T, H_q, D], and where `traced` (T = 1) each row's share
    [H_q, n] fp32.
    """
    num_tokens, num_heads, head_dim = q.shape
    num_kv_heads, (num_sets, list_len) = k.shape[0], rows.shape
    check_list(q, k, v, rows, cos, sin)
    assert num_heads % num_sets == 0 and (counts is None or counts.dtype == torch.int32)
    assert not traced or num_tokens == 1, "one token is traced"
    group_size = num_heads // num_sets
    half, padded_dim = _padded(head_dim)
    block_m = min(64, max(16, triton.next_power_of_2(num_tokens * group_size)))
    block_n, num_stages = 64, 2
    # Of each stage: keys, values, and cos and sin in fp32.
    while block_n * padded_dim * 8 * num_stages + (4 << 10) > shared_bytes(q) and block_n > 16:
        block_n //= 2
    num_blocks = triton.cdiv(num_tokens * group_size, block_m)
    room = max(1, _PROGRAMS // (num_sets * num_blocks))
    num_splits = min(room, _MOST_SPLITS, triton.cdiv(list_len, block_n))
    num_lines = num_tokens * num_heads
    parts = q.new_empty((num_lines, num_splits, head_dim), dtype=torch.float32)
    stats = q.new_empty((num_lines, num_splits, 2), dtype=torch.float32)
    log_sum = q.new_empty(num_lines, dtype=torch.float32)
    logits = parts
    if traced:  # no program writes the empty places
        logits = q.new_full((num_heads, list_len), -torch.inf, dtype=torch.float32)
    attend_listed_kernel[(num_blocks, num_sets, num_splits)](
        q,
        k,
        v,
        k.stride(0),
        rows,
        rows.stride(0),
        counts if counts is not None else rows,
        cos,
        sin,
        parts,
        stats,
        logits,
        list_len,
        list_len,
        num_tokens,
        num_heads,
        head_dim // 2,
        scale * _LOG2_E,
        SHARERS=num_sets // num_kv_heads,
        G=group_size,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        HALF=half,
        HEAD_DIM=padded_dim,
        COUNTED=counts is not None,
        TRACED=traced,
        num_warps=4,
        num_stages=num_stages,
    )
    out = torch.empty_like(q)
    merge_parts(parts, stats, out, log_sum, early=False)
    return out, torch.exp2(logits - log_sum[:, None]) if traced else None


def attend_listed(
    q: Tensor, k: Tensor, v: Tensor, rows: Tensor, cos: Tensor, sin: Tensor, scale: float
) -> Tensor:
    """T tokens, the last of each KV head's list, attend to the list and causally to each other.

    q: [T, H_q, D]; k, v: slabs [H_kv, rows, D], keys before RoPE; rows: [H_kv, n] ascending; cos,
    sin: [n or more, D/2] fp32. Returns [T, H_q, D].
    """
    if q.shape[0] > _TURNED_TOKENS:
        return attend_turned(q, k, v, rows, cos, sin, scale)
    return attend_turning(q, k, v, rows, None, cos, sin, scale)[0]


def attend_placed(
    q: Tensor, k: Tensor, v: Tensor, rows: Tensor, cos: Tensor, sin: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """One token, the last of each list, attends to the list.

    q: [H_q, D]; k, v, cos, sin: as for `attend_listed`; rows: [sets, n] ascending, then -1 in empty
    places, sets one of H_kv and H_q. Returns [H_q, D] and each row's share [H_q, n] fp32.
    """
    counts = (rows >= 0).sum(dim=1, dtype=torch.int32)
    out, shares = attend_turning(q[None], k, v, rows, counts, cos, sin, scale, traced=True)
    assert shares is not None
    return out[0], shares


def _padded(head_dim: int) -> tuple[int, int]:
    """Half a head and a whole one as the dots take them."""
    half = max(16, triton.next_power_of_2(head_dim // 2))
    return half, max(16, triton.next_power_of_2(head_dim))
