"""What the decode kernels pass to one another, as tensors that a CUDA graph can own."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

NORM_ROWS = 256
STRIPE = 16  # rows; the stripes of a KV head are dealt out to its shares in turn


@dataclass(frozen=True)
class IndexLayer:
    """The key index of one layer.

    A query q is scored against row s as codes(q . q_basis) . rows[s] + q . q_offset, and a key k is
    stored as (k - k_mean) . k_basis, rounded. rows: [H_kv, capacity, d] int8 or fp8 (e4m3);
    q_basis, k_basis: [H_kv, D, d] fp32; q_offset, k_mean: [H_kv, D] fp32. The softmax scale is part
    of q_basis and q_offset. The exact index has the slab of keys as its rows, and no bases.
    """

    rows: Tensor
    q_basis: Tensor | None = None
    q_offset: Tensor | None = None
    k_basis: Tensor | None = None
    k_mean: Tensor | None = None

    @property
    def is_exact(self) -> bool:
        return self.q_basis is None


@dataclass(frozen=True)
class Kept:
    """Which rows every step reads besides the chosen ones.

    state: [B, 3] int32, or [3] for one branch: the row of the token that is decoded (all rows
    before it are in the cache), the first row of its question and the one after the last. Sinks and
    window in rows, of several branches the largest ones. branches: of each of several branches
    [B, 5] int32: the rows that all share, its sinks and window, how many rows of its list are read,
    and how many of these are chosen anew (none where the list is fixed). Past the shared rows, row
    r of branch b lies in row r + b * branch_rows of the slab.
    """

    state: Tensor
    sink_size: int
    window_size: int
    branches: Tensor | None = None
    branch_rows: int = 0

    @property
    def num_branches(self) -> int:
        return self.state.numel() // 3


@dataclass(frozen=True)
class Query:
    """One token's queries of a layer, those of each branch after those of the branch before.

    q: [B H_q, D] after RoPE; codes: [B H_q, d] in the index's dtype (q itself where the index is
    exact); scale, offset: [B H_q] fp32; norm: [B H_q] fp32, the log-sum-exp of each head's exact
    scores on the sinks and the newest rows, NORM_ROWS at most.
    """

    q: Tensor
    codes: Tensor
    scale: Tensor
    offset: Tensor
    norm: Tensor


@dataclass(frozen=True)
class StandIns:
    """One more row in each head's softmax, of a layer and each branch, for rows that are not read.

    It counts exp(q . k * scale + log_weight) times, and exp(norm) * unread / G times besides. k, v:
    [B, H_kv, D] fp32, the key after RoPE; log_weight: [B, H_kv] fp32, -inf for none; unread:
    [B H_kv, shares] fp32, the votes of the rows that `choose_rows` left, 0 for none; norm: [B H_q]
    fp32, that of the query for which rows were chosen.
    """

    k: Tensor
    v: Tensor
    log_weight: Tensor
    unread: Tensor
    norm: Tensor
