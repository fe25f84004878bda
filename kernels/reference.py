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


def add_rms_norm_ref(x: Tensor, delta: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The sum of two [T, C] tensors and its norm, which sees the sum as it was rounded."""
    total = x + delta
    return total, rms_norm_ref(total, weight, eps)


def rope_ref(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the two halves of each head (RoPE as Hugging Face lays it out).

    x: [T, H, D]; cos, sin: [T, D/2] fp32; returns [T, H, D] in x's dtype.
    """
    lower, upper = x.float().chunk(2, dim=-1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat((lower * cos - upper * sin, upper * cos + lower * sin), dim=-1).to(x.dtype)


def rope_append_ref(
    heads: Tensor,
    cos: Tensor,
    sin: Tensor,
    norms: tuple[Tensor, Tensor] | None,
    eps: float,
    k: Tensor,
    v: Tensor,
    start: int,
) -> Tensor:
    """Norm and rotate the queries and keys of a fused projection; write rows [start, start + T).

    heads: [T, H_q + 2 H_kv, D]; cos, sin: [T, D/2] fp32; norms: the weights [D] of the query and
    key norms, or None; k, v: slabs [H_kv, capacity, D], written in place. Returns the queries
    [T, H_q, D].
    """
    num_kv_heads, end = k.shape[0], start + heads.shape[0]
    assert end <= k.shape[1], f"{end} rows do not fit a slab of {k.shape[1]}"
    sizes = (heads.shape[1] - 2 * num_kv_heads, num_kv_heads, num_kv_heads)
    new_q, new_k, new_v = heads.split(sizes, dim=1)
    if norms is not None:
        new_q, new_k = rms_norm_ref(new_q, norms[0], eps), rms_norm_ref(new_k, norms[1], eps)
    k[:, start:end] = rope_ref(new_k, cos, sin).transpose(0, 1)
    v[:, start:end] = new_v.transpose(0, 1)
    return rope_ref(new_q, cos, sin)


def swiglu_ref(gate_up: Tensor) -> Tensor:
    """silu(gate) * up of a fused projection. gate_up: [T, 2 I]; returns [T, I]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


def attend_causal_ref(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """T tokens attend to all S - T earlier rows and to each other.

    q: [T, H_q, D]; k, v: [H_kv, S, D], the last T rows being the tokens' own; returns [T, H_q, D].
    """
    if q.device.type == "cpu":
        return _attend_causal_cpu(q.transpose(0, 1)[None], k[None], v[None], scale)
    # Here, because it brings in torch's compiler, a second of import that the CPU can save.
    from torch.nn.attention.bias import causal_lower_right

    out = F.scaled_dot_product_attention(
        q.transpose(0, 1)[None],
        k[None],
        v[None],
        attn_mask=causal_lower_right(q.shape[0], k.shape[1]),
        scale=scale,
        enable_gqa=q.shape[1] != k.shape[0],
    )
    return out[0].transpose(0, 1)


def _attend_causal_cpu(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """The past without a mask and the chunk with a causal one, merged by their log-sum-exp.

    torch's CPU kernel knows only the causal mask of a square; a mask tensor in its place made
    10,240 tokens 15 % slower. q: [1, H_q, T, D]; k, v: [1, H_kv, S, D]; returns [T, H_q, D].
    """
    num_heads, num_tokens, head_dim = q.shape[1:]
    start = k.shape[2] - num_tokens
    group_size = num_heads // k.shape[1]
    attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    own_k = k[:, :, start:].repeat_interleave(group_size, 1)
    own_v = v[:, :, start:].repeat_interleave(group_size, 1)
    out, own_lse = attend(q, own_k, own_v, 0.0, True, scale=scale)
    if start > 0:
        # Without a mask the G heads of a KV head are just more queries of it.
        past_q = q.reshape(1, k.shape[1], group_size * num_tokens, head_dim)
        past, past_lse = attend(past_q, k[:, :, :start], v[:, :, :start], 0.0, False, scale=scale)
        past, past_lse = past.reshape(q.shape), past_lse.reshape(own_lse.shape)
        own_weight = torch.sigmoid(own_lse - past_lse)[..., None].to(q.dtype)
        out = torch.lerp(past, out, own_weight)
    return out[0].transpose(0, 1)


def score_ref(q: Tensor, rows: Tensor) -> Tensor:
    """Dot products of each query head with the index rows of its KV head.

    q: [H_kv, G, d] already scaled; rows: [H_kv, S, d] in any dtype; returns [H_kv, G, S] fp32.
    """
    return torch.matmul(q.float(), rows.float().transpose(-1, -2))


def vote_ref(scores: Tensor, vote: str, min_votes: int = 1) -> Tensor:
    """Turn the scores of the query heads into one ranking for each set of rows.

    scores: [H_kv, G, S] fp32, each head's less its norm, which makes the heads comparable. Returns
    [sets, S] fp32, higher is better, -inf for rows with fewer than `min_votes` (`threshold` only);
    sets is H_kv for `group` (the logarithm of the heads' summed exponentials) and `group-max`, 1
    for `all` and `threshold`, H_q for `none`. `all` is TokenSelect's soft vote (arXiv 2411.02886);
    `threshold` lets a head vote for what lies over its median, ties broken by the soft vote.
    """
    num_kv_heads, group_size, num_rows = scores.shape
    if vote == "group-max":
        return scores.amax(dim=1)
    if vote == "none":
        return scores.reshape(num_kv_heads * group_size, num_rows)
    if vote == "group":
        return torch.logsumexp(scores, dim=1)
    soft_all = torch.softmax(scores, dim=-1).sum(dim=(0, 1))[None]
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
