"""Each policy's rule against a naive computation in float64, on caches of random rows."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from longread.cache import KVCache
from longread.policies import Policy, Streaming, Turn

LENGTHS, GROUPS = (1, 63, 64, 65, 1000), (1, 3, 4, 7)
NUM_KV_HEADS, HEAD_DIM, NUM_LAYERS = 2, 8, 2


def _cache(num_rows: int) -> KVCache:
    """Random keys and values; all rows count."""
    cache = KVCache(
        NUM_LAYERS,
        NUM_KV_HEADS,
        HEAD_DIM,
        num_rows,
        device=torch.device("cpu"),
        dtype=torch.float32,
    )
    generator = torch.Generator().manual_seed(num_rows)
    cache.k.normal_(generator=generator)
    cache.v.normal_(generator=generator)
    cache.length = num_rows
    return cache


def _queries(num_tokens: int, group: int) -> Tensor:
    """[T, H_q, D]"""
    generator = torch.Generator().manual_seed(group)
    return 3 * torch.randn(num_tokens, NUM_KV_HEADS * group, HEAD_DIM, generator=generator)


def _rows_of(indices: Tensor | None, head: int, num_rows: int) -> set[int]:
    if indices is None:
        return set(range(num_rows))
    rows = [row for row in indices[head % len(indices)].tolist() if row >= 0]
    assert len(rows) == len(set(rows))
    return set(rows)


def _ask(policy: Policy, cache: KVCache, q: Tensor, question_len: int) -> None:
    """Read the cache's last rows as the question. q: [T, H_q, D] of these."""
    start = cache.length - question_len
    cache.length = start
    policy.prepare(cache)
    policy.start_turn(Turn(start, start + question_len))
    for layer_idx in range(NUM_LAYERS):
        policy.observe(layer_idx, q, start)
        policy.appended(layer_idx, start, start + question_len)
    cache.length = start + question_len


@pytest.mark.parametrize("num_rows", LENGTHS)
def test_streaming_reads_sinks_and_a_window_that_never_moves_back(num_rows: int) -> None:
    policy = Streaming(budget=20, sink_size=3, window_size=10)
    policy.prepare(_cache(num_rows))
    policy.start_turn(Turn(num_rows - 1, num_rows))
    q, window = _queries(1, 1)[0], set(range(max(num_rows - 30, 0), num_rows))
    expected = window | set(range(min(num_rows, 3)))
    assert _rows_of(policy.select(0, q, num_rows), 0, num_rows) == expected
    for fewer in range(max(num_rows - 20, 1), num_rows):  # the last turn was undone
        rows = _rows_of(policy.select(0, q, fewer), 0, fewer)
        assert rows == {row for row in expected if row < fewer}
