"""Attention mass that rows receive from many queries, in bounded memory."""

from __future__ import annotations

import torch
from longread_kernels import dispatch as ops
from torch import Tensor

_MAX_SCORES = 1 << 26  # fp32 numbers at a time, 256 MB


def column_mass(q: Tensor, k: Tensor, start: int, empty: Tensor | None = None) -> Tensor:
    """Column sums of the causal attention probabilities, and sums over the heads of a KV head.

    q: [T, H_q, D] after RoPE, query t attending to rows [0, start + t]; k: [H_kv, S, D] with
    S >= start + T; empty: [H_kv, S] bool, rows that nothing attends to. Returns [H_kv, S] fp32,
    which sum to T * G for each KV head.
    """
    num_kv_heads, num_rows, head_dim = k.shape
    group_size = q.shape[1] // num_kv_heads
    mass = torch.zeros((num_kv_heads, num_rows), dtype=torch.float32, device=q.device)
    rows = torch.arange(num_rows, device=q.device)
    num_at_once = max(1, _MAX_SCORES // (group_size * num_rows))
    for first in range(0, q.shape[0], num_at_once):
        chunk = q[first : first + num_at_once] * head_dim**-0.5
        last_rows = torch.arange(first, first + chunk.shape[0], device=q.device) + start
        future = rows > last_rows[:, None]  # [t, S]
        for head in range(num_kv_heads):
            own = chunk[:, head * group_size : (head + 1) * group_size]  # [t, G, D]
            scores = ops.score(own.reshape(1, -1, head_dim), k[head : head + 1])
            scores = scores.view(-1, group_size, num_rows)
            hidden = future if empty is None else future | empty[head]
            probs = torch.softmax(scores.masked_fill_(hidden[:, None], float("-inf")), dim=-1)
            mass[head] += probs.sum(dim=(0, 1))
    return mass
