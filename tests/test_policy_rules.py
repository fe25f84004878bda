"""Each policy's rule against a naive computation in float64, on caches of random rows."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from longread.cache import KVCache
from longread.policies import Policy, Quest, Streaming, Turn

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


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("num_rows", LENGTHS)
def test_quest_reads_the_blocks_with_the_highest_bounds(num_rows: int, group: int) -> None:
    cache, q = _cache(num_rows), _queries(1, group)[0]
    policy = Quest(budget=32, sink_size=0, window_size=1)
    split = num_rows // 2  # half of the rows come one by one
    whole_length, cache.length = cache.length, split
    policy.prepare(cache)
    policy.start_turn(Turn(num_rows, num_rows))
    for layer_idx in range(NUM_LAYERS):
        for row in range(split, whole_length):
            policy.appended(layer_idx, row, row + 1)
    cache.length = whole_length
    indices = policy.select(1, q, num_rows)
    assert (indices is None) == (num_rows <= 33)
    for head in range(NUM_KV_HEADS):
        k, votes = cache.k[1, head].double(), {}
        heads = q[head * group : (head + 1) * group].double()
        starts = range(0, num_rows, 16)
        bounds = torch.stack(
            [torch.maximum(heads * k[s : s + 16].amin(0), heads * k[s : s + 16].amax(0)).sum(-1)
             for s in starts], dim=-1,
        )  # fmt: skip
        for row, start in enumerate(starts):  # no row of the block is over the bound
            assert (heads @ k[start : start + 16].T <= bounds[:, row, None] + 1e-9).all()
        share = torch.softmax(bounds / HEAD_DIM**0.5, dim=-1).sum(0)
        votes = {row: float(share[row // 16]) for row in range(num_rows - 1)}
        best = sorted(votes.values(), reverse=True)[:32]
        found = sorted(votes[r] for r in _rows_of(indices, head, num_rows) - {num_rows - 1})
        assert found[::-1][:32] == pytest.approx(best)
