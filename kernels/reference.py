"""The torch twin of every op of the decode path: what a Triton kernel must compute, and what runs
where there is none. Owns the formulas; knows nothing of models, policies or caches.

Shapes use H_q query heads, H_kv KV heads, G = H_q / H_kv, D head size, S cached rows.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

VOTES = ("group", "group-max", "all", "threshold", "none")


def rms_norm_ref(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root-mean-square norm over the last dimension, accumulated in fp32.

    x: [..., C], weight: [C]; returns [..., C] in x's dtype.
    """
    return F.rms_norm(x, (x.shape[-1],), weight, eps)


def rope_ref(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the two halves of each head (RoPE as Hugging Face lays it out).

    x: [T, H, D]; cos, sin: [T, D/2] fp32; returns [T, H, D] in x's dtype.
    """
    lower, upper = x.float().chunk(2, dim=-1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat((lower * cos - upper * sin, upper * cos + lower * sin), dim=-1).to(x.dtype)


def swiglu_ref(gate_up: Tensor) -> Tensor:
    """silu(gate) * up of a fused projection. gate_up: [T, 2 I]; returns [T, I]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


def score_ref(q: Tensor, rows: Tensor, row_scale: Tensor | None) -> Tensor:
    """Scaled dot products of each query head with the index rows of its KV head.

    q: [H_kv, G, d] already scaled by D ** -0.5; rows: [H_kv, S, d] in any dtype;
    row_scale: [H_kv, S] fp32, or None for 1; returns [H_kv, G, S] fp32.
    """
    scores = torch.matmul(q.float(), rows.float().transpose(-1, -2))
    return scores if row_scale is None else scores * row_scale[:, None]


def vote_ref(scores: Tensor, vote: str, min_votes: int = 1) -> Tensor:
    """Turn the scores of the query heads into one ranking for each set of rows.

    scores: [H_kv, G, S] fp32. Returns [sets, S] fp32, higher is better, -inf for rows with fewer
    than `min_votes` (`threshold` only); sets is H_kv for `group` and `group-max`, 1 for `all` and
    `threshold`, H_q for `none`. `all` is TokenSelect's soft vote (arXiv 2411.02886); `threshold`
    lets a head vote for what lies over its median, ties broken by the soft vote.
    """
    num_kv_heads, group_size, num_rows = scores.shape
    if vote == "group-max":
        return scores.amax(dim=1)
    if vote == "none":
        return scores.reshape(num_kv_heads * group_size, num_rows)
    soft = torch.softmax(scores, dim=-1)
    if vote == "group":
        return soft.sum(dim=1)
    soft_all = soft.sum(dim=(0, 1))[None]
    if vote == "all":
        return soft_all
    assert vote == "threshold", f"unknown vote {vote!r}"
    median = scores.median(dim=-1, keepdim=True).values
    num_votes = (scores > median).sum(dim=(0, 1), dtype=torch.float32)[None]
    ranking = num_votes + soft_all / (num_kv_heads * group_size + 1)  # the soft part stays under 1
    return ranking.masked_fill(num_votes < min_votes, float("-inf"))


def select_rows_ref(votes: Tensor, kept: Tensor, budget: int) -> Tensor:
    """The rows that are always kept, then the `budget` best of the rest.

    votes: [sets, S]; kept: [n] int64 row numbers, ascending; returns [sets, n + min(budget, S - n)]
    int64. Places that no eligible row fills hold -1.
    """
    num_sets, num_rows = votes.shape
    votes = votes.index_fill(1, kept, float("-inf"))
    num_chosen = min(budget, num_rows - kept.shape[0])
    best, chosen = torch.topk(votes, num_chosen, dim=-1, sorted=False)
    chosen = chosen.masked_fill(best == float("-inf"), -1)
    return torch.cat((kept.expand(num_sets, -1), chosen), dim=-1)


def attend_ref(
    q: Tensor, k: Tensor, v: Tensor, indices: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    """Softmax attention of one token over the chosen rows, all others unread.

    q: [H_q, D]; k, v: [H_kv, S, D]; indices: [sets, n] int64 with -1 for empty places, sets one of
    1, H_kv, H_q; None attends to all S rows. Returns the output [H_q, D] in q's dtype and the
    attention probabilities [H_q, n] fp32.
    """
    num_heads, head_dim = q.shape
    if indices is not None:
        num_sets, num_kv_heads = max(indices.shape[0], k.shape[0]), k.shape[0]
        rows = indices.clamp(min=0).expand(num_sets, -1)
        owners = [s * num_kv_heads // num_sets for s in range(num_sets)]
        k = torch.stack([k[h].index_select(0, rows[s]) for s, h in enumerate(owners)])
        v = torch.stack([v[h].index_select(0, rows[s]) for s, h in enumerate(owners)])
    grouped = q.reshape(k.shape[0], -1, head_dim)  # [sets of K, heads that share it, D]
    # Logits reach thousands in some heads, where bf16 would round whole units away.
    scores = torch.matmul(grouped.float(), k.float().transpose(-1, -2)) * scale
    if indices is not None:
        empty = (indices < 0).expand(k.shape[0], -1)
        scores = scores.masked_fill(empty[:, None], float("-inf"))
    probs = torch.softmax(scores, dim=-1)
    out = torch.matmul(probs.to(v.dtype), v)
    return out.reshape(num_heads, head_dim), probs.reshape(num_heads, -1)
