"""RazorAttention: which heads retrieve, what the others keep, and the row that stands in."""

from __future__ import annotations

import pytest
import torch
from test_policy_rules import (
    GROUPS,
    HEAD_DIM,
    LENGTHS,
    NUM_KV_HEADS,
    NUM_LAYERS,
    _cache,
    _probs,
    _queries,
    _rows_of,
)
from torch import Tensor

from longread.attention import causal_attention, decode_attention
from longread.cache import KVCache
from longread.policies import Policy, Razor, Turn

PERIOD, REPEATS = 6, 3


class _Texts:
    """A Rereader that shows given queries on a given cache for the text it is handed."""

    num_rows, vocab_size, window = 0, 50, 4096

    def __init__(self, cache: KVCache, q: Tensor) -> None:
        self.cache, self.q, self.num_readings = cache, q, 0

    def documents(self, cache: KVCache, observer: Policy) -> None:
        raise AssertionError("the documents are not read again")

    def text(self, token_ids: Tensor, observer: Policy) -> None:
        self.num_readings += 1
        assert torch.equal(token_ids[:PERIOD], token_ids[PERIOD : 2 * PERIOD])
        observer.prepare(self.cache)
        for start in range(0, len(token_ids), 5):
            for layer_idx in range(NUM_LAYERS):
                observer.observe(layer_idx, self.q[start : start + 5], start)


def _razor(budget: int, cache: KVCache, group: int, **shares: float) -> Razor:
    text = _cache(PERIOD * REPEATS)
    policy = Razor(budget, 2, 5, period=PERIOD, repeats=REPEATS, **shares)
    policy.prepare(cache, _Texts(text, _queries(text.length, group)))
    return policy


@pytest.mark.parametrize("group", GROUPS)
def test_heads_are_scored_by_what_they_pay_to_repetitions(group: int) -> None:
    text = _cache(PERIOD * REPEATS)
    q, first = _queries(text.length, group), PERIOD * (REPEATS - 1)
    rereader = _Texts(text, q)
    found = Razor(5, period=PERIOD, repeats=REPEATS)._scores(_cache(30), rereader)
    for layer_idx in range(NUM_LAYERS):
        for head in range(NUM_KV_HEADS):
            probs, echo, induction = _probs(text, layer_idx, head, q[first:], first), 0.0, 0.0
            for place in range(PERIOD):
                before = [place + PERIOD * i for i in range(REPEATS - 1)]
                echo = echo + probs[place][:, before].sum(dim=-1)
                after = [row + 1 for row in before if row + 1 <= first + place]
                induction = induction + probs[place][:, after].sum(dim=-1)
            for score, expected in zip(found[:, layer_idx, head], (echo, induction), strict=True):
                assert float(score) == pytest.approx(float(expected.max()) / PERIOD, rel=1e-5)


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("num_rows", LENGTHS)
def test_retrieval_heads_read_all_and_the_mean_is_the_budget(num_rows: int, group: int) -> None:
    cache, budget = _cache(num_rows), 600
    policy = _razor(budget, cache, group)
    assert sum(map(sum, policy.retrieval_heads)) in (1, 2)
    question = max(num_rows - 3, 0)
    policy.start_turn(Turn(question, num_rows))
    counts = []
    for layer_idx in range(NUM_LAYERS):
        indices = policy.select(layer_idx, _queries(1, group)[0], num_rows)
        for head in range(NUM_KV_HEADS):
            rows = _rows_of(indices, head, num_rows)
            counts.append(len(rows))
            if policy.retrieval_heads[layer_idx][head]:
                assert rows == set(range(num_rows))
            else:
                window = set(range(num_rows - len(rows) + min(2, num_rows), num_rows))
                assert rows == window | set(range(min(2, num_rows)))
    assert num_rows < 1000 or len(set(counts)) == 2
    most = NUM_LAYERS * NUM_KV_HEADS * (budget + 7)
    assert max(most - 4, 0) < sum(counts) <= most or 1000 > num_rows == min(counts)


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("num_tokens", (1, 4))
def test_the_mean_row_counts_for_all_that_were_dropped(num_tokens: int, group: int) -> None:
    """A question and an answer token against the weighted softmax in float64."""
    num_rows = 65
    cache = _cache(num_rows + num_tokens)
    policy = _razor(1, cache, group, induction_share=0.3)
    policy.start_turn(Turn(num_rows - 3, num_rows))
    q, flags = _queries(num_tokens, group), policy.retrieval_heads
    for layer_idx in range(NUM_LAYERS):
        policy.select(layer_idx, q[0], num_rows)
        left = policy.left(layer_idx, num_rows)
        assert left is not None or all(flags[layer_idx])
        stand_in = policy.stand_in_of(layer_idx)
        if num_tokens == 1:
            args = (q[0], cache, layer_idx, num_rows + 1, policy, None)
            found = decode_attention(*args)[None]
        else:
            found = causal_attention(q, cache, layer_idx, num_rows, left, stand_in)
        found = found.view(num_tokens, -1, HEAD_DIM).double()
        for head in range(NUM_KV_HEADS):
            k, v = cache.k[layer_idx, head].double(), cache.v[layer_idx, head].double()
            dropped = set[int]() if flags[layer_idx][head] else set(range(2, num_rows - 5))
            for token in range(num_tokens):
                rows = [row for row in range(num_rows + token + 1) if row not in dropped]
                keys, values, weights = k[rows], v[rows], torch.ones(len(rows)).double()
                if dropped:
                    gone = sorted(dropped)
                    keys = torch.cat((keys, k[gone].mean(0)[None]))
                    values = torch.cat((values, v[gone].mean(0)[None]))
                    weights = torch.cat((weights, torch.tensor([len(gone)]).double()))
                own = q[token, head * group : (head + 1) * group].double()
                logits = own @ keys.T / HEAD_DIM**0.5 + weights.log()
                expected = torch.softmax(logits, dim=-1) @ values
                torch.testing.assert_close(
                    found[token, head * group : (head + 1) * group], expected, rtol=1e-4, atol=1e-5
                )


def test_the_text_is_read_once_for_an_entry() -> None:
    class Extras(dict[str, dict[str, Tensor]]):
        read_extra, write_extra = dict.get, dict.__setitem__

    cache, text = _cache(30), _cache(PERIOD * REPEATS)
    cache.by_products = Extras()
    rereader = _Texts(text, _queries(text.length, 3))
    policies = [Razor(5, period=PERIOD, repeats=REPEATS) for _ in range(2)]
    for policy in policies:
        policy.prepare(cache, rereader)
    assert rereader.num_readings == 1
    assert policies[0].retrieval_heads == policies[1].retrieval_heads
