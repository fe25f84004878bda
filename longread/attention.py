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


def causal_attention(
    q: Tensor, cache: KVCache, layer_idx: int, start: int, left: Tensor | None = None
) -> Tensor:
    """T tokens attend to all earlier rows, or to those that are left, and to each other.

    q: [T, H_q, D] after RoPE, for rows [start, start + T), which the cache already holds; left: as
    a policy names them. Returns [T, H_q * D] in q's dtype.
    """
    end = start + q.shape[0]
    k, v = cache.k[layer_idx, :, :end], cache.v[layer_idx, :, :end]
    scale = q.shape[-1] ** -0.5
    if left is None:
        return ops.attend_causal(q, k, v, scale).reshape(q.shape[0], -1)
    own = torch.arange(start, end, device=q.device)
    outs = []
    for head, head_q in enumerate(q.chunk(k.shape[0], dim=1)):  # heads may differ in what is left
        rows = left[head % left.shape[0]]
        rows = torch.cat((rows[rows >= 0], own))
        head_k, head_v = (slab[head : head + 1].index_select(1, rows) for slab in (k, v))
        outs.append(ops.attend_causal(head_q, head_k, head_v, scale))
    return torch.cat(outs, dim=1).reshape(q.shape[0], -1)


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


def prompt_mass(
    q: Tensor,
    cache: KVCache,
    layer_idx: int,
    start: int,
    end: int,
    left: Tensor | None,
    trace: Trace,
) -> None:
    """Record where the last token of a prompt attends; its answer is not used.

    q: [H_q, D]; the prompt is rows [start, end); left: the rows before it that it may read.
    """
    k = cache.k[layer_idx, :, :end]
    scores = ops.score(q.reshape(k.shape[0], -1, q.shape[-1]) * q.shape[-1] ** -0.5, k)
    if left is not None:
        readable = torch.zeros((k.shape[0], end + 1), dtype=torch.bool, device=q.device)
        rows = left.masked_fill(left < 0, end).expand(k.shape[0], -1)  # the extra place is cut off
        readable.scatter_(1, rows, True)
        readable[:, start:] = True
        scores = scores.masked_fill(~readable[:, None, :end], float("-inf"))
    trace.record(layer_idx, None, torch.softmax(scores, dim=-1).flatten(0, 1))
