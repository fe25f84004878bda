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
from dataclasses import dataclass

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
VOTES = ("all", "group")


@dataclass(frozen=True)
class Reading:
    """What a chunk of `chunk_tokens` tokens attends to.

    sink_size, window_size: rows before and behind those that are chosen, `budget` of them; vote:
    `all` heads of a layer choose one list, or the `group` of a KV head its own; num_voters: mean
    queries of a chunk; question_voters: of a question, its tokens where it has no more;
    passage_len: rows, the voted one in the middle, that share the best vote among them; outer_norm:
    votes count from the rows that are read anyway, and not from one another.
    """

    sink_size: int = 128
    window_size: int = 512
    budget: int = 2048
    chunk_tokens: int = 512
    vote: str = "all"
    num_voters: int = 32
    question_voters: int = 64
    passage_len: int = 9
    outer_norm: bool = False

    @property
    def num_positions(self) -> int:
        """The most that a token attends to, itself among them."""
        return self.sink_size + self.budget + self.window_size + self.chunk_tokens

    def fitting(self, window: int) -> Reading:
        """The reading with its sizes halved until a model of so many positions can take it."""
        reading = self
        names = ("sink_size", "window_size", "budget", "chunk_tokens")
        while reading.num_positions > window:
            halves = {name: max(1, getattr(reading, name) // 2) for name in names}
            reading = dataclasses.replace(reading, **halves)
        return reading

    @property
    def label(self) -> str:
        """The fields that are not the default, as `:budget=4096:vote=group`."""
        fields = dataclasses.fields(self)
        values = {field.name: getattr(self, field.name) for field in fields}
        return "".join(f":{f.name}={values[f.name]}" for f in fields if values[f.name] != f.default)


def widened(config: ModelConfig) -> ModelConfig:
    """The config of a model that reads by selection."""
    return dataclasses.replace(config, window=MOST_ROWS)


class SelectedAttention:
    """To a part of the rows at contiguous positions, of keys that are cached before RoPE."""

    captured = False

    def __init__(self, network: Network, reading: Reading) -> None:
        self._network = network
        self._reading = reading
        self._head_dim = network.config.head_dim
        self.chunk_tokens: int | None = reading.chunk_tokens
        self.most_of_share: int | None = reading.budget
        # How questions are read is no part of it.
        kept = dataclasses.replace(reading, question_voters=0)
        self.kv_layout = f"k,v [L, H_kv, n, D], k before RoPE, read by selection: {kept}"

    def rope(self, start: int, end: int) -> tuple[Tensor, Tensor]:
        cos = self._network.rope_rows(0, 1)[0].new_ones((end - start, self._head_dim // 2))
        return cos, torch.zeros_like(cos)

    def scored(self, q: Tensor) -> Tensor:
        cos, sin = self._network.rope_rows(*self._edge)
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
        reading = self._reading
        num_voters = reading.num_voters if policy is None else reading.question_voters
        rows = self._rows(q, k, start, num_voters)
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

        q: [T, H_q, D] before RoPE; k: a layer's slab.
        """
        reading, num_kv_heads, end = self._reading, k.shape[0], start + q.shape[0]
        window_start = start - reading.window_size
        if window_start <= reading.sink_size + reading.budget:
            return torch.arange(end, device=q.device).expand(num_kv_heads, -1)
        edge = self._network.rope_rows(*self._edge)
        voters = ops.mean_queries(q, min(num_voters, q.shape[0]), num_kv_heads, *edge)
        votes = ops.soft_votes(
            voters,
            k,
            self._head_dim**-0.5,
            reading.sink_size,
            window_start,
            start,
            outer_norm=reading.outer_norm,
        )
        if reading.vote == "all":
            votes = votes.sum(dim=0, keepdim=True)
        votes = F.max_pool1d(votes, reading.passage_len, 1, reading.passage_len // 2)
        rows = ops.list_rows(votes, reading.budget, reading.sink_size, end)
        return rows.expand(num_kv_heads, -1)

    @property
    def _edge(self) -> tuple[int, int]:
        """The position, and the one after it, of a query that is scored: behind the window."""
        return self._reading.window_size, self._reading.window_size + 1
