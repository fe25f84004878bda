"""Attention of the runner: exact causal attention over the cache for many tokens, and one decode
token over the rows that a policy chose. Owns no weights and no selection rule.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from longread_kernels import dispatch as ops
from torch import Tensor

from longread.cache import KVCache
from longread.policies import Policy
from longread.trace import Trace


def causal_attention(q: Tensor, cache: KVCache, layer_idx: int, start: int) -> Tensor:
    """T tokens attend to all earlier rows and to each other.

    q: [T, H_q, D] after RoPE, for rows [start, start + T), which the cache already holds.
    Returns [T, H_q * D] in q's dtype.
    """
    num_tokens, num_heads, head_dim = q.shape
    end = start + num_tokens
    k, v = cache.k[layer_idx, None, :, :end], cache.v[layer_idx, None, :, :end]
    if q.device.type == "cpu":
        out = _causal_attention_cpu(q.transpose(0, 1)[None], k, v, start)
    else:
        # Here, because it brings in torch's compiler, a second of import that the CPU can save.
        from torch.nn.attention.bias import causal_lower_right

        out = F.scaled_dot_product_attention(
            q.transpose(0, 1)[None],
            k,
            v,
            attn_mask=causal_lower_right(num_tokens, end),
            enable_gqa=num_heads != k.shape[1],
        )
    return out[0].transpose(0, 1).reshape(num_tokens, num_heads * head_dim)


def _causal_attention_cpu(q: Tensor, k: Tensor, v: Tensor, start: int) -> Tensor:
    """The past without a mask and the chunk with a causal one, merged by their log-sum-exp.

    torch's CPU kernel knows only the causal mask of a square; a mask tensor in its place made
    10,240 tokens 15 % slower. q: [1, H_q, T, D]; k, v: [1, H_kv, S, D]; returns [1, H_q, T, D].
    """
    num_heads, num_tokens, head_dim = q.shape[1:]
    group_size = num_heads // k.shape[1]
    attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    own_k = k[:, :, start:].repeat_interleave(group_size, 1)
    own_v = v[:, :, start:].repeat_interleave(group_size, 1)
    own, own_lse = attend(q, own_k, own_v, 0.0, True)
    if start == 0:
        return own
    # Without a mask the G heads of a KV head are just more queries of it.
    past_q = q.reshape(1, k.shape[1], group_size * num_tokens, head_dim)
    past, past_lse = attend(past_q, k[:, :, :start], v[:, :, :start], 0.0, False)
    past, past_lse = past.reshape(q.shape), past_lse.reshape(own_lse.shape)
    own_weight = torch.sigmoid(own_lse - past_lse)[..., None].to(q.dtype)
    return torch.lerp(past, own, own_weight)


def decode_attention(
    q: Tensor, cache: KVCache, layer_idx: int, num_rows: int, policy: Policy, trace: Trace | None
) -> Tensor:
    """One token attends to the rows its policy selects.

    q: [H_q, D] after RoPE, the token's own row being num_rows - 1. Returns [H_q * D].
    """
    indices = policy.select(layer_idx, q, num_rows)
    k, v = cache.k[layer_idx, :, :num_rows], cache.v[layer_idx, :, :num_rows]
    out, probs = ops.attend(q, k, v, indices, q.shape[-1] ** -0.5)
    if trace is not None:
        trace.record(layer_idx, indices, probs)
    return out.reshape(-1)


def prompt_mass(q: Tensor, cache: KVCache, layer_idx: int, num_rows: int, trace: Trace) -> None:
    """Record where the last token of a prompt attends; its answer is not used. q: [H_q, D]."""
    k = cache.k[layer_idx, :, :num_rows]
    scores = ops.score(q.reshape(k.shape[0], -1, q.shape[-1]) * q.shape[-1] ** -0.5, k, None)
    trace.record(layer_idx, None, torch.softmax(scores, dim=-1).flatten(0, 1))
