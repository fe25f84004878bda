"""Attention of the runner: exact causal attention over the cache for many tokens, and one decode
token over the rows that a policy chose. Owns no weights and no selection rule.
"""

from __future__ import annotations

import torch
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
    end = start + q.shape[0]
    k, v = cache.k[layer_idx, :, :end], cache.v[layer_idx, :, :end]
    return ops.attend_causal(q, k, v, q.shape[-1] ** -0.5).reshape(q.shape[0], -1)


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
    scores = ops.score(q.reshape(k.shape[0], -1, q.shape[-1]) * q.shape[-1] ** -0.5, k)
    trace.record(layer_idx, None, torch.softmax(scores, dim=-1).flatten(0, 1))
