"""Reading past the model's window: a prefill that selects (TokenSelect, arXiv 2411.02886).

Keys are cached before RoPE. A chunk of tokens attends to the first rows, to the last ones, and to
the rows between them that its queries vote for, all heads of a layer together. What is attended to
has contiguous positions from 0 on, so that the model meets no distance that it was not trained for.
A question is read in the same way; a token of the answer reads what its policy selects. For
scoring, queries stand at one distance from every key.

Differences from the paper: several mean queries of a chunk vote in place of one, each token of a
question votes for itself, and a row counts by the best vote near it, so that a passage is read as a
whole. What each is worth is in docs/quality.md.
"""

from __future__ import annotations

import dataclasses

import torch
import torch.nn.functional as F
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
_QUESTION_VOTERS = 64  # of a question: its tokens, or means of them where it has more
_PASSAGE_LEN = 9  # rows, the voted one in the middle, that share the best vote among them
_OUTER_NORM = False  # votes count from the rows that are read anyway, and not from one another


def widened(config: ModelConfig) -> ModelConfig:
    """The config of a model that reads by selection."""
    return dataclasses.replace(config, window=MOST_ROWS)


class SelectedAttention:
    """To a part of the rows at contiguous positions, of keys that are cached before RoPE."""

    captured = False
    chunk_tokens: int | None = 512

    def __init__(self, network: Network) -> None:
        self._network = network
        self._head_dim = network.config.head_dim
        sizes = (_SINK_SIZE, _NUM_CHOSEN, _LOCAL_SIZE, self.chunk_tokens, _NUM_VOTERS, _PASSAGE_LEN)
        self.kv_layout = (
            "k,v [L, H_kv, n, D], k before RoPE, read by selection with first, chosen, local, "
            f"chunk, voters, passage, outer norm {(*sizes, _OUTER_NORM)}, one list a layer"
        )

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
        k, v = cache.k[layer_idx], cache.v[layer_idx]
        rows = self._rows(q, k, start, _NUM_VOTERS if policy is None else _QUESTION_VOTERS)
        cos, sin = self._network.rope_rows(0, rows.shape[1])
        scale = self._head_dim**-0.5
        if trace is not None:
            _, probs = ops.attend_placed(q[-1], k, v, rows, cos, sin, scale)
            spread = probs.new_zeros((probs.shape[0], start + q.shape[0]))
            places = rows.repeat_interleave(probs.shape[0] // rows.shape[0], 0).long()
            trace.record(layer_idx, None, spread.scatter_(1, places, probs))
        return ops.attend_listed(q, k, v, rows, cos, sin, scale).reshape(q.shape[0], -1)

    def step(
        self,
        q: Tensor,
        cache: KVCache,
        layer_idx: int,
        num_rows: int,
        policy: Policy,
        trace: Trace | None,
    ) -> Tensor:
        k, v = cache.k[layer_idx], cache.v[layer_idx]
        indices = policy.select(layer_idx, self.scored(q), num_rows)
        if indices is None:
            indices = torch.arange(num_rows, device=q.device)[None]
        # In order of rows, empty places last: a row's place is its position.
        rows = indices.masked_fill(indices < 0, num_rows).sort(dim=-1).values
        rows = rows.masked_fill(rows == num_rows, -1).expand(max(k.shape[0], rows.shape[0]), -1)
        cos, sin = self._network.rope_rows(0, rows.shape[1])
        out, probs = ops.attend_placed(q, k, v, rows, cos, sin, self._head_dim**-0.5)
        if trace is not None:
            trace.record(layer_idx, rows, probs)
        return out.reshape(-1)

    def _rows(self, q: Tensor, k: Tensor, start: int, num_voters: int) -> Tensor:
        """The rows that rows [start, start + T) attend to, their own last, [H_kv, n] ascending.

        q: [T, H_q, D] before RoPE; k: a layer's slab. Every KV head reads the same rows.
        """
        num_kv_heads, end = k.shape[0], start + q.shape[0]
        local_start = start - _LOCAL_SIZE
        if local_start <= _SINK_SIZE + _NUM_CHOSEN:
            return torch.arange(end, device=q.device).expand(num_kv_heads, -1)
        edge = self._network.rope_rows(_LOCAL_SIZE, _LOCAL_SIZE + 1)
        voters = ops.mean_queries(q, min(num_voters, q.shape[0]), num_kv_heads, *edge)
        votes = ops.soft_votes(
            voters,
            k,
            self._head_dim**-0.5,
            _SINK_SIZE,
            local_start,
            start,
            outer_norm=_OUTER_NORM,
        )
        votes = F.max_pool1d(votes.sum(0, keepdim=True), _PASSAGE_LEN, 1, _PASSAGE_LEN // 2)
        rows = ops.list_rows(votes, _NUM_CHOSEN, _SINK_SIZE, end)
        return rows.expand(num_kv_heads, -1)
