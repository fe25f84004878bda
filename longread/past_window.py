"""Reading past the model's window: a prefill that selects (TokenSelect, arXiv 2411.02886).

Keys are cached before RoPE. A chunk of tokens attends to the first rows, to the last ones, and for
each KV head to the rows between them that its queries vote for. What is attended to has contiguous
positions from 0 on, so that the model meets no distance that it was not trained for. A question is
read in the same way; a token of the answer reads what its policy selects. For scoring, queries
stand at one distance from every key.

Differences from the paper: each KV head chooses rows of its own, and eight mean queries of a chunk
vote in place of one.
"""

from __future__ import annotations

import dataclasses

import torch
from longread_kernels import dispatch as ops
from torch import Tensor

from longread.cache import KVCache
from longread.network import Network
from longread.policies import Policy
from longread.trace import Trace
from longread.weights import ModelConfig

MOST_ROWS = 1 << 22  # that can be read; before it the memory sets a limit
_SINK_SIZE = 128
_LOCAL_SIZE = 512
_NUM_CHOSEN = 2048
_NUM_VOTERS = 8  # mean queries of a chunk


def widened(config: ModelConfig) -> ModelConfig:
    """The config of a model that reads by selection."""
    return dataclasses.replace(config, window=MOST_ROWS)


class SelectedAttention:
    """To a part of the rows at contiguous positions, of keys that are cached before RoPE."""

    kv_layout = "k,v [L, H_kv, n, D], k before RoPE, read by selection"
    captured = False
    chunk_tokens: int | None = 512

    def __init__(self, network: Network) -> None:
        self._network = network
        self._head_dim = network.config.head_dim

    def rope(self, start: int, end: int) -> tuple[Tensor, Tensor]:
        cos = self._network.rope_rows(0, 1)[0].new_ones((end - start, self._head_dim // 2))
        return cos, torch.zeros_like(cos)

    def scored(self, q: Tensor) -> Tensor:
        cos, sin = self._network.rope_rows(_LOCAL_SIZE, _LOCAL_SIZE + 1)
        flat = q.reshape(-1, *q.shape[-2:])
        return ops.rope(flat, cos.expand(len(flat), -1), sin.expand(len(flat), -1)).view(q.shape)

    def read(
        self,
        q: Tensor,
        cache: KVCache,
        layer_idx: int,
        start: int,
        policy: Policy | None,
        trace: Trace | None,
    ) -> Tensor:
        num_tokens, num_kv_heads = q.shape[0], cache.k.shape[1]
        own = torch.arange(start, start + num_tokens, device=q.device)
        rows = self._earlier(q, cache, layer_idx, start)
        rows = torch.cat((rows, own.expand(num_kv_heads, -1)), dim=1)
        k, v = self._gathered(cache, layer_idx, rows)
        num_rows = rows.shape[1]
        q = ops.rope(q, *self._network.rope_rows(num_rows - num_tokens, num_rows))
        if trace is not None:
            grouped = q[-1].reshape(num_kv_heads, -1, q.shape[-1]) * q.shape[-1] ** -0.5
            probs = torch.softmax(ops.score(grouped, k), dim=-1)  # [H_kv, G, n]
            spread = probs.new_zeros((*probs.shape[:2], start + num_tokens))
            spread.scatter_(2, rows[:, None].expand_as(probs), probs)
            trace.record(layer_idx, None, spread.flatten(0, 1))
        return ops.attend_causal(q, k, v, q.shape[-1] ** -0.5).reshape(num_tokens, -1)

    def step(
        self,
        q: Tensor,
        cache: KVCache,
        layer_idx: int,
        num_rows: int,
        policy: Policy,
        trace: Trace | None,
    ) -> Tensor:
        num_kv_heads, head_dim = cache.k.shape[1], cache.k.shape[3]
        indices = policy.select(layer_idx, self.scored(q), num_rows)
        if indices is None:
            indices = torch.arange(num_rows, device=q.device)[None]
        # In order of rows, empty places last: a row's place is its position.
        rows = indices.masked_fill(indices < 0, num_rows).sort(dim=-1).values
        rows = rows.expand(max(num_kv_heads, rows.shape[0]), -1)
        num_places = (rows < num_rows).sum(dim=-1)  # [sets]
        rows = rows.masked_fill(rows >= num_rows, -1)
        k, v = self._gathered(cache, layer_idx, rows)
        cos, sin = self._network.rope_rows(0, rows.shape[1])
        positions = (num_places - 1).repeat_interleave(q.shape[0] // rows.shape[0])
        turned = ops.rope(q[:, None], cos[positions], sin[positions])[:, 0]
        grouped = turned.reshape(rows.shape[0], -1, head_dim) * head_dim**-0.5
        scores = ops.score(grouped, k).masked_fill((rows < 0)[:, None], float("-inf"))
        probs = torch.softmax(scores, dim=-1)  # [sets, G, n]
        out = torch.matmul(probs, v.float()).to(q.dtype)
        if trace is not None:
            trace.record(layer_idx, rows, probs.flatten(0, 1))
        return out.reshape(-1)

    def _earlier(self, q: Tensor, cache: KVCache, layer_idx: int, start: int) -> Tensor:
        """The rows before `start` that rows from it on attend to, [H_kv, n] int64 ascending.

        q: [T, H_q, D] before RoPE.
        """
        device, num_kv_heads = q.device, cache.k.shape[1]
        if start <= _SINK_SIZE + _NUM_CHOSEN + _LOCAL_SIZE:
            return torch.arange(start, device=device).expand(num_kv_heads, -1)
        parts = self.scored(q).float().tensor_split(min(_NUM_VOTERS, q.shape[0]))
        voters = torch.stack([part.mean(dim=0) for part in parts])  # [N, H_q, D]
        grouped = voters.unflatten(1, (num_kv_heads, -1)).transpose(0, 1)  # [H_kv, N, G, D]
        scores = ops.score(
            grouped.flatten(1, 2) * q.shape[-1] ** -0.5,
            cache.k[layer_idx, :, _SINK_SIZE : start - _LOCAL_SIZE],
        )
        votes = torch.softmax(scores, dim=-1).sum(dim=1)  # [H_kv, S]
        chosen = votes.topk(_NUM_CHOSEN, dim=-1).indices.sort(dim=-1).values + _SINK_SIZE
        sinks = torch.arange(_SINK_SIZE, device=device).expand(num_kv_heads, -1)
        local = torch.arange(start - _LOCAL_SIZE, start, device=device).expand(num_kv_heads, -1)
        return torch.cat((sinks, chosen, local), dim=1)

    def _gathered(self, cache: KVCache, layer_idx: int, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Keys, turned to the places that their rows have in the list, and values.

        rows: [sets, n] int64, sets one of H_kv and H_q, -1 for empty; returns [sets, n, D] both.
        """
        k, v = cache.k[layer_idx], cache.v[layer_idx]
        owners = torch.arange(rows.shape[0], device=rows.device) * k.shape[0] // rows.shape[0]
        places = rows.clamp(min=0)
        k, v = k[owners[:, None], places], v[owners[:, None], places]
        turned = ops.rope(k.transpose(0, 1), *self._network.rope_rows(0, rows.shape[1]))
        return turned.transpose(0, 1).contiguous(), v
