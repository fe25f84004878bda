"""Attention of the runner: exact causal attention over the cache for many tokens, and one decode
token over the rows that a policy chose. Owns no weights and no selection rule.
"""

from __future__ import annotations

from typing import Protocol

import torch
from longread_kernels import dispatch as ops
from torch import Tensor

from longread.cache import KVCache
from longread.network import Network
from longread.policies import Policy, StandIn
from longread.trace import Trace


class Attention(Protocol):
    """How a decoder's rows are turned, read many at a time, and read for one token of an answer."""

    kv_layout: str  # what the cache holds, as a store entry's key names it
    captured: bool  # whether a step may become a CUDA graph
    most_of_share: int | None  # rows that a budget given as a share is at most
    chunk_tokens: int | None  # of a prefill at a time, where the result depends on it

    def rope(self, start: int, end: int) -> tuple[Tensor, Tensor]:
        """cos and sin [T, D/2] fp32 by which rows [start, end) are turned and then cached."""

    def scored(self, q: Tensor) -> Tensor:
        """Queries as they are scored against cached keys. q: [..., H_q, D] as the cache's keys."""

    def read(
        self,
        q: Tensor,
        cache: KVCache,
        layer_idx: int,
        start: int,
        policy: Policy | None,
        trace: Trace | None,
    ) -> Tensor:
        """Rows [start, start + T), which are in the cache, attend; q: [T, H_q, D].

        policy: None while documents are read. Returns [T, H_q * D].
        """

    def step(
        self,
        q: Tensor,
        cache: KVCache,
        layer_idx: int,
        num_rows: int,
        policy: Policy,
        trace: Trace | None,
    ) -> Tensor:
        """The token in row num_rows - 1 attends; q: [H_q, D]; returns [H_q * D]."""


class FullAttention:
    """To every row, or to those that a policy leaves or selects, where they stand."""

    kv_layout = "k,v [L, H_kv, n, D] after RoPE"
    captured = True
    most_of_share: int | None = None
    chunk_tokens: int | None = None

    def __init__(self, network: Network) -> None:
        self._network = network

    def rope(self, start: int, end: int) -> tuple[Tensor, Tensor]:
        return self._network.rope_rows(start, end)

    def scored(self, q: Tensor) -> Tensor:
        return q

    def read(
        self,
        q: Tensor,
        cache: KVCache,
        layer_idx: int,
        start: int,
        policy: Policy | None,
        trace: Trace | None,
    ) -> Tensor:
        if policy is None:
            return causal_attention(q, cache, layer_idx, start)
        left, cache = policy.left(layer_idx, start), policy.read_from(cache)
        if trace is not None:
            prompt_mass(q[-1], cache, layer_idx, start, start + q.shape[0], left, trace)
        return causal_attention(q, cache, layer_idx, start, left, policy.stand_in_of(layer_idx))

    def step(
        self,
        q: Tensor,
        cache: KVCache,
        layer_idx: int,
        num_rows: int,
        policy: Policy,
        trace: Trace | None,
    ) -> Tensor:
        return decode_attention(q, cache, layer_idx, num_rows, policy, trace)


def causal_attention(
    q: Tensor,
    cache: KVCache,
    layer_idx: int,
    start: int,
    left: Tensor | None = None,
    stand_in: StandIn | None = None,
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
    outs, log_norms = [], []
    for head, head_q in enumerate(q.chunk(k.shape[0], dim=1)):  # heads may differ in what is left
        rows = left[head % left.shape[0]]
        rows = torch.cat((rows[rows >= 0], own))
        head_k, head_v = (slab[head : head + 1].index_select(1, rows) for slab in (k, v))
        outs.append(ops.attend_causal(head_q.contiguous(), head_k, head_v, scale))
        if stand_in is not None:
            log_norms.append(_log_norms(head_q, head_k, scale))
    out = torch.cat(outs, dim=1)
    if stand_in is not None:
        out, _ = _with_stand_in(q, out, torch.cat(log_norms, dim=1), stand_in)
    return out.reshape(q.shape[0], -1)


def decode_attention(
    q: Tensor, cache: KVCache, layer_idx: int, num_rows: int, policy: Policy, trace: Trace | None
) -> Tensor:
    """One token attends to the rows its policy selects.

    q: [H_q, D] after RoPE, the token's own row being num_rows - 1. Returns [H_q * D].
    """
    indices = policy.select(layer_idx, q, num_rows)
    cache = policy.read_from(cache)
    k, v = cache.k[layer_idx, :, :num_rows], cache.v[layer_idx, :, :num_rows]
    out, probs = ops.attend(q, k, v, indices, q.shape[-1] ** -0.5)
    stand_in = policy.stand_in_of(layer_idx)
    if stand_in is not None and indices is not None:
        # The row with the largest share tells the normaliser: p = exp(q . k) / norm.
        best, place = probs.max(dim=-1, keepdim=True)
        rows = indices.repeat_interleave(q.shape[0] // indices.shape[0], 0).gather(1, place)
        owners = torch.arange(q.shape[0], device=q.device) // (q.shape[0] // k.shape[0])
        scores = (q.float() * k[owners, rows[:, 0]].float()).sum(dim=-1) * q.shape[-1] ** -0.5
        log_norm = scores - best[:, 0].log()
        merged, share = _with_stand_in(q[None], out[None], log_norm[None], stand_in)
        out, probs = merged[0], probs * (1 - share[0])[:, None]
    if trace is not None:
        trace.record(layer_idx, indices, probs)
    return out.reshape(-1)


def _log_norms(q: Tensor, k: Tensor, scale: float) -> Tensor:
    """Log-sum-exp of each query's causal scores, [T, G] fp32. q: [T, G, D]; k: [1, S, D]."""
    num_tokens, num_rows = q.shape[0], k.shape[1]
    scores = torch.matmul(q.float() * scale, k[0].float().T)  # [T, G, S]
    rows = torch.arange(num_rows, device=q.device) - (num_rows - num_tokens)
    future = rows > torch.arange(num_tokens, device=q.device)[:, None]
    return torch.logsumexp(scores.masked_fill_(future[:, None], float("-inf")), dim=-1)


def _with_stand_in(
    q: Tensor, out: Tensor, log_norms: Tensor, stand_in: StandIn
) -> tuple[Tensor, Tensor]:
    """The output with one more row in the softmax, and that row's share.

    q, out: [T, H_q, D]; log_norms: [T, H_q] fp32; returns [T, H_q, D] in out's dtype and [T, H_q].
    """
    grouped = q.unflatten(1, (stand_in.k.shape[0], -1)).float()  # [T, H_kv, G, D]
    scores = torch.einsum("thgd,hd->thg", grouped, stand_in.k) * q.shape[-1] ** -0.5
    log_weight = stand_in.log_weight.view(scores.shape[1], -1)  # [H_kv, 1 or G]
    share = torch.sigmoid((scores + log_weight).flatten(1) - log_norms)
    value = stand_in.v.repeat_interleave(grouped.shape[2], 0)  # [H_q, D]
    return torch.lerp(out.float(), value, share[..., None]).to(out.dtype), share


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
