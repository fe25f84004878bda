"""Each policy's rule against a naive computation in float64, on caches of random rows."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from longread.cache import KVCache
from longread.policies import H2O, Policy, PyramidKV, Quest, SnapKV, Streaming, Turn
from longread.policies.kept import kept_ranges
from longread.policies.mass import column_mass

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


def _kernel_rows(policy: Policy, layer_idx: int, head: int, num_rows: int) -> list[int]:
    """What the decode kernels would read, in their order."""
    plan, turn = policy.kernel_plan(), policy.kernel_turn()
    assert plan is not None and plan.budget is not None
    ranges = kept_ranges(num_rows, turn, plan.sink_size, plan.window_size)
    rows = [row for start, end in ranges for row in range(start, end)]
    if turn.listed:
        listed = turn.listed[layer_idx][head].tolist()
        assert len(listed) <= plan.budget, "there is no room for the list"
        rows += [row for row in listed if row >= 0]
    assert len(rows) == len(set(rows))
    return rows


@pytest.mark.parametrize("kind", (SnapKV, PyramidKV))
@pytest.mark.parametrize("question_lens", ((60, 20), (12, 40), (40, 1)))
@pytest.mark.parametrize("window_size", (8, 16, 50))
def test_kernels_read_what_was_left_of_an_earlier_question(
    kind: type[SnapKV], question_lens: tuple[int, int], window_size: int
) -> None:
    """The first answer had no token: the prompt is judged when the second question begins."""
    policy, cache = kind(20, window_size=window_size), _cache(400)
    cache.length = start = 200
    policy.prepare(cache)
    for question_len in question_lens:
        policy.start_turn(Turn(start, start + question_len))
        for layer_idx in range(NUM_LAYERS):
            policy.observe(layer_idx, _queries(question_len, 2), start)
        start = cache.length = start + question_len
    for layer_idx in range(NUM_LAYERS):
        left = policy.select(layer_idx, _queries(1, 2)[0], start + 1)
        for head in range(NUM_KV_HEADS):
            expected = _rows_of(left, head, start + 1)
            assert set(_kernel_rows(policy, layer_idx, head, start + 1)) == expected


def test_streaming_brings_nothing_back_when_a_turn_is_undone() -> None:
    policy, cache = Streaming(budget=60, sink_size=4, window_size=40), _cache(600)
    policy.prepare(cache)

    def turn(start: int, num_answered: int) -> set[int]:
        """The rows of the last token."""
        policy.start_turn(Turn(start, start + 20))
        policy.observe(0, _queries(20, 1), start)
        cache.length = start + 20
        rows: set[int] = set()
        for _ in range(num_answered):
            rows = _rows_of(policy.select(0, _queries(1, 1)[0], cache.length + 1), 0, 600)
            cache.length += 1
        return rows

    cache.length = 300
    assert turn(300, 200) == {0, 1, 2, 3, *range(420, 520)}
    assert policy.kernel_plan() is not None
    cache.length = 300  # undone: rows before it are gone, those from it on are new
    assert turn(300, 5) == {0, 1, 2, 3, *range(300, 325)}
    assert policy.kernel_plan() is None, "its window would reach back past row 300"
    turn(325, 60)
    assert policy.kernel_plan() is not None
    assert set(_kernel_rows(policy, 0, 0, 406)) == {0, 1, 2, 3, *range(306, 406)}


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


@pytest.mark.parametrize("block_len", (1, 7, 16))
@pytest.mark.parametrize("budget", (1, 15, 16, 40, 150))
def test_quest_fills_its_budget_from_blocks_that_are_kept_in_part(
    budget: int, block_len: int
) -> None:
    num_rows, question, group = 200, (101, 118), 3
    cache, q = _cache(num_rows), _queries(1, group)[0]
    policy = Quest(budget, sink_size=3, window_size=21, block_len=block_len)
    policy.prepare(cache)
    policy.start_turn(Turn(*question))
    indices = policy.select(0, q, num_rows)
    kept = {*range(3), *range(*question), *range(num_rows - 21, num_rows)}
    for head in range(NUM_KV_HEADS):
        starts, heads = range(0, num_rows, block_len), q[head * group : (head + 1) * group]
        blocks = [cache.k[0, head, start : start + block_len] for start in starts]
        bounds = [torch.maximum(heads * b.amin(0), heads * b.amax(0)).sum(-1) for b in blocks]
        share = torch.softmax(torch.stack(bounds, -1) / HEAD_DIM**0.5, dim=-1).sum(0)
        expected: set[int] = set()
        for block in share.argsort(descending=True).tolist():
            rows = range(block * block_len, min((block + 1) * block_len, num_rows))
            for row in rows:
                if row not in kept and len(expected) < budget:
                    expected.add(row)
        assert len(expected) == budget
        assert _rows_of(indices, head, num_rows) == expected | kept


def _probs(cache: KVCache, layer_idx: int, head: int, q: Tensor, start: int) -> Tensor:
    """Causal attention [T, G, S] fp64 of one KV head, q: [T, H_q, D] standing at row `start`."""
    group = q.shape[1] // NUM_KV_HEADS
    k, own = cache.k[layer_idx, head].double(), q[:, head * group : (head + 1) * group].double()
    probs = torch.zeros(q.shape[0], group, k.shape[0], dtype=torch.float64)
    for token in range(q.shape[0]):
        end = start + token + 1
        logits = own[token] @ k[:end].T / HEAD_DIM**0.5
        probs[token, :, :end] = torch.softmax(logits, dim=-1)
    return probs


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("num_rows", LENGTHS)
def test_column_mass_is_the_sum_of_probabilities(
    num_rows: int, group: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("longread.policies.mass._MAX_SCORES", 3 * group * num_rows)  # 3 queries
    cache, num_queries = _cache(num_rows), min(num_rows, 7)
    q, start = _queries(num_queries, group), num_rows - num_queries
    found = column_mass(q, cache.k[0], start)
    for head in range(NUM_KV_HEADS):
        expected = _probs(cache, 0, head, q, start).sum(dim=(0, 1))
        torch.testing.assert_close(found[head].double(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("pooling", ("max", "avg"))
@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("num_rows", LENGTHS)
def test_snapkv_keeps_what_the_end_of_the_question_attends_to(
    num_rows: int, group: int, pooling: str
) -> None:
    cache, question_len = _cache(num_rows), min(num_rows, 12)
    q, question = _queries(question_len, group), num_rows - question_len
    policy = SnapKV(10, sink_size=2, window_size=5, observe_size=8, pooling=pooling, kernel_size=5)
    _ask(policy, cache, q, question_len)
    indices = policy.select(1, q[-1], num_rows)
    assert (indices is None) == (num_rows == 1)
    kept = {*range(min(num_rows, 2)), *range(question, num_rows)}
    first = num_rows - min(question_len, 8)
    for head in range(NUM_KV_HEADS if indices is not None else 0):
        mass = _probs(cache, 1, head, q[-8:], first).sum(dim=(0, 1))[:first]
        around = [mass[max(row - 2, 0) : row + 3] for row in range(first)]
        votes = [float(near.max() if pooling == "max" else near.sum() / 5) for near in around]
        eligible = {row: votes[row] for row in range(question) if row not in kept}
        found = _rows_of(indices, head, num_rows)
        assert kept <= found and len(found) == len(kept) + 10
        least = min(eligible[row] for row in found - kept)
        assert least >= sorted(eligible.values(), reverse=True)[9] - 1e-6
    later = policy.select(1, q[-1], num_rows - 1 + 3)
    assert indices is None or later is not None and later.shape[1] == indices.shape[1] + 2


def test_snapkv_observes_a_question_that_comes_in_chunks() -> None:
    cache, q = _cache(100), _queries(12, 3)
    whole, chunked = (SnapKV(10, window_size=5, observe_size=8) for _ in range(2))
    _ask(whole, cache, q, 12)
    chunked.prepare(cache)
    chunked.start_turn(Turn(88, 100))
    chunked.observe(0, q[:7], 88)
    chunked.observe(0, q[7:], 95)
    found, expected = (policy.select(0, q[0], 100) for policy in (chunked, whole))
    assert _rows_of(found, 0, 100) == _rows_of(expected, 0, 100)


@pytest.mark.parametrize("num_layers", (1, 2, 7, 30))
@pytest.mark.parametrize(("budget", "eligible"), ((100, 1000), (800, 1000), (1, 1000), (1000, 999)))
def test_pyramidkv_gives_the_layers_a_line_with_the_same_total(
    num_layers: int, budget: int, eligible: int
) -> None:
    policy = PyramidKV(budget)
    cache = KVCache(num_layers, 1, 1, 1, device=torch.device("cpu"), dtype=torch.float32)
    policy.prepare(cache)
    budgets = [policy.layer_budget(layer, eligible) or 0 for layer in range(num_layers)]
    assert sum(budgets) == num_layers * budget and max(budgets) <= max(eligible, budget)
    if budget == 100 and num_layers > 1:
        assert budgets[0] == 195 and budgets[-1] == 5
        assert all(upper <= lower for lower, upper in zip(budgets, budgets[1:], strict=False))


class _Rereader:
    """Shows an observer the given queries [T, H_q, D] of each layer, in chunks."""

    vocab_size, window = 50, 4096

    def __init__(self, q: Tensor) -> None:
        self.q, self.num_rows, self.num_readings = q, q.shape[0], 0

    def documents(self, cache: KVCache, observer: Policy) -> None:
        self.num_readings += 1
        for start in range(0, self.num_rows, 50):
            for layer_idx in range(NUM_LAYERS):
                observer.observe(layer_idx, self.q[start : start + 50], start)

    def text(self, token_ids: Tensor, observer: Policy) -> None:
        raise AssertionError("no other text is asked for")


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("num_rows", (1, 63, 64, 65, 300))
def test_h2o_keeps_what_all_queries_attended_to(num_rows: int, group: int) -> None:
    num_steps, question_len = 4, 9
    cache = _cache(num_rows + 2 * question_len + 2 * num_steps)
    q = _queries(cache.capacity, group)
    policy = H2O(budget=12, window_size=6)
    cache.length = num_rows
    policy.prepare(cache, _Rereader(q[:num_rows]))
    left = [set(range(num_rows)) for _ in range(NUM_KV_HEADS)]
    mass = torch.zeros(NUM_KV_HEADS, cache.capacity, dtype=torch.float64)

    def attend(head: int, start: int, end: int) -> None:
        """Queries [start, end) add what they pay to the rows that are left."""
        k = cache.k[1, head].double()
        for token in range(start, end):
            rows = sorted({row for row in left[head] if row < start} | {*range(start, token + 1)})
            own = q[token, head * group : (head + 1) * group].double()
            logits = own @ k[rows].T / HEAD_DIM**0.5
            mass[head, rows] += torch.softmax(logits, dim=-1).sum(dim=0)
        left[head] |= set(range(start, end))

    def evict(head: int, length: int) -> None:
        old = sorted(row for row in left[head] if row < length - 6)
        heavy = sorted(old, key=lambda row: -float(mass[head, row]))[:12]
        left[head] = {*heavy, *(row for row in left[head] if row >= length - 6)}
        room = 18 - len(left[head])  # only before there are 18 rows
        assert room >= 0

    for head in range(NUM_KV_HEADS):
        attend(head, 0, num_rows)
    for _ in range(2):
        start, end = cache.length, cache.length + question_len
        policy.start_turn(Turn(start, end))
        readable = policy.left(1, start)
        for head in range(NUM_KV_HEADS):
            if start > num_rows:
                evict(head, start)
                assert _rows_of(readable, head, start) == left[head]
            attend(head, start, end)
        for layer_idx in range(NUM_LAYERS):
            policy.observe(layer_idx, q[start:end], start)
        for row in range(end, end + num_steps):
            indices = policy.select(1, q[row], row + 1)
            for head in range(NUM_KV_HEADS):
                evict(head, row)
                attend(head, row, row + 1)
                assert _rows_of(indices, head, row + 1) == left[head]
        cache.length = end + num_steps


def test_h2o_reads_the_documents_again_once_for_an_entry() -> None:
    class Extras(dict[str, dict[str, Tensor]]):
        read_extra, write_extra = dict.get, dict.__setitem__

    cache, rereader = _cache(100), _Rereader(_queries(100, 3))
    cache.by_products = Extras()
    first, second = H2O(budget=5), H2O(budget=5)
    for policy in (first, second):
        policy.prepare(cache, rereader)
    assert rereader.num_readings == 1 and list(cache.by_products) == ["attention-mass"]
    for layer_idx in range(NUM_LAYERS):
        torch.testing.assert_close(first._left.mass[layer_idx], second._left.mass[layer_idx])
        total = first._left.mass[layer_idx].sum(dim=1)
        torch.testing.assert_close(total, torch.full_like(total, 3 * 100))
