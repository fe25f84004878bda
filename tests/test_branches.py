"""Several answers on one document in one step, beside each of them alone."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from triton_case import narrow_decoder

from longread.bench.prefill import relative_rms
from longread.cache import KVCache
from longread.decode_graph import StepGraph
from longread.evaluate.together import Together
from longread.model import Decoder
from longread.policies import Dense, Policy, PyramidKV, SnapKV, Streaming, TokenSelect, Turn
from longread.step_buffers import most_rows

NUM_SHARED, BRANCH_ROWS = 301, 40
QUESTION_LENS = (9, 17, 1)
NUM_STEPS = 3


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    return narrow_decoder(tmp_path_factory.mktemp("branches"))


def _asked(
    decoder: Decoder,
    policy: Policy,
    capacity: int,
    question: Tensor,
    others: tuple[Policy, ...] = (),
) -> KVCache:
    """A cache with the document and a question, which the policy and the others have followed."""
    generator = torch.Generator().manual_seed(1)
    document = torch.randint(0, decoder.config.vocab_size, (NUM_SHARED,), generator=generator)
    cache = decoder.new_cache(capacity)
    cache.k.fill_(torch.nan)
    cache.v.fill_(torch.nan)
    decoder.prefill(document, cache)
    group = Together((policy, *others))
    group.prepare(cache)
    group.start_turn(Turn(NUM_SHARED, NUM_SHARED + len(question)))
    decoder.extend(question, cache, group)
    return cache


def _questions(decoder: Decoder) -> list[Tensor]:
    generator = torch.Generator().manual_seed(2)
    size = decoder.config.vocab_size
    return [torch.randint(0, size, (n,), generator=generator) for n in QUESTION_LENS]


@pytest.mark.parametrize(
    "policy",
    (
        Dense(),
        TokenSelect(budget=60, window_size=12),
        TokenSelect(budget=60, window_size=12, index="exact", reselect=2),
        TokenSelect(budget=310, window_size=12),  # some branches read all of their rows
    ),
    ids=str,
)
@torch.inference_mode()
def test_branches_give_the_logits_of_each_alone(decoder: Decoder, policy: Policy) -> None:
    questions, tokens = _questions(decoder), torch.tensor([[3, 4, 5], [6, 7, 8], [9, 10, 11]])
    turns = [Turn(NUM_SHARED, NUM_SHARED + n) for n in QUESTION_LENS]
    alone, chosen_alone, caches = [], [], []
    for branch, question in enumerate(questions):
        cache = _asked(decoder, policy, NUM_SHARED + BRANCH_ROWS, question)
        caches.append((cache.k.clone(), cache.v.clone()))
        plan = policy.kernel_plan()
        assert plan is not None
        graph = StepGraph(decoder.network, cache, [plan], None)
        for step in range(NUM_STEPS):
            token = tokens[step, branch : branch + 1]
            alone.append(graph.step(token, turns[branch], None).clone())
            cache.length += 1
        chosen_alone.append(graph.buffers.chosen[:, 0].clone())

    capacity = NUM_SHARED + len(questions) * BRANCH_ROWS
    joint = _asked(decoder, policy, capacity, questions[0])
    for branch, (k, v) in enumerate(caches):
        start = NUM_SHARED + branch * BRANCH_ROWS
        joint.k[:, :, start : start + BRANCH_ROWS] = k[:, :, NUM_SHARED:]
        joint.v[:, :, start : start + BRANCH_ROWS] = v[:, :, NUM_SHARED:]
        for layer_idx in range(decoder.config.num_hidden_layers):
            policy.appended(layer_idx, start, start + QUESTION_LENS[branch])
    plan = policy.kernel_plan()
    assert plan is not None
    graph = StepGraph(decoder.network, joint, [plan] * len(questions), None, BRANCH_ROWS)
    found = []
    for step in range(NUM_STEPS):
        rows = [NUM_SHARED + n + step for n in QUESTION_LENS]
        found.append(graph.step_branches(tokens[step], rows, turns, NUM_SHARED).clone())
    together = torch.stack(found, dim=1).flatten(0, 1)  # branch after branch, as alone
    limit = 0.01 if isinstance(policy, Dense) else 0.02  # a near tie may choose another row
    assert relative_rms(together, torch.stack(alone)) < limit
    for branch, wanted in enumerate(chosen_alone):
        found_sets = graph.buffers.chosen[:, branch].flatten(0, 1).tolist()
        for rows, wanted_rows in zip(found_sets, wanted.flatten(0, 1).tolist(), strict=True):
            assert len(set(rows) & set(wanted_rows)) >= 0.95 * len(set(wanted_rows))


MIXED = (
    Dense(),
    TokenSelect(budget=60, window_size=12),
    TokenSelect(budget=24, window_size=0),
    TokenSelect(budget=90, window_size=40, sink_size=9),
    Streaming(budget=50, window_size=20),
    Streaming(budget=0, window_size=5),  # without all of the question
    SnapKV(budget=60, window_size=12),
    SnapKV(budget=400, window_size=12),
    PyramidKV(budget=80, window_size=12),
    PyramidKV(budget=30, window_size=30),
)
APART = (TokenSelect(budget=60, window_size=12, vote="none"), TokenSelect(40, vote="none"))


@pytest.mark.parametrize("policies", (MIXED, APART), ids=("mixed", "apart"))
@torch.inference_mode()
def test_branches_of_many_policies_read_what_each_does_alone(
    decoder: Decoder, policies: tuple[Policy, ...]
) -> None:
    question = _questions(decoder)[1]
    num_rows, tokens = NUM_SHARED + len(question), torch.tensor([3, 4, 5])
    alone = []
    for policy in policies:
        cache = _asked(decoder, policy, num_rows + BRANCH_ROWS, question)
        turn = Turn(NUM_SHARED, num_rows)
        policy.start_turn(turn)
        logits = [decoder.decode_with_torch(token[None], cache, policy) for token in tokens]
        alone.append(torch.stack(logits))

    joint = _asked(
        decoder, policies[0], num_rows + len(policies) * BRANCH_ROWS, question, policies[1:]
    )
    plans = []
    for policy in policies:
        policy.start_turn(Turn(NUM_SHARED, num_rows))
        plan = policy.kernel_plan()
        assert plan is not None
        plans.append(plan)
    graph = StepGraph(decoder.network, joint, plans, None, BRANCH_ROWS)
    for other in (0, 1):  # the second time over the rows of the first
        turns = [policy.kernel_turn() for policy in policies]
        found = []
        for step, token in enumerate(tokens):
            rows = [num_rows + step] * len(policies)
            logits = graph.step_branches(token.expand(len(policies)), rows, turns, num_rows)
            found.append(logits.clone())
        for branch, wanted in enumerate(alone):
            together = torch.stack(found, dim=0)[:, branch]
            limit = 0.02 if isinstance(policies[branch], TokenSelect) else 0.01
            assert relative_rms(together, wanted) < limit, (policies[branch], other)


def test_branches_need_room(decoder: Decoder) -> None:
    with pytest.raises(AssertionError, match="no room for branches"):
        most_rows(119, 4, 30)
    with pytest.raises(AssertionError, match="a branch needs rows of its own"):
        most_rows(119, 4, 0)
    assert most_rows(220, 4, 30) == 130
    assert most_rows(220, 1, 0) == 220


@torch.inference_mode()
def test_a_full_branch_is_not_written_past(decoder: Decoder) -> None:
    policy = Dense()
    cache = _asked(decoder, policy, NUM_SHARED + 2 * 10, torch.tensor([1, 2]))
    plan = policy.kernel_plan()
    assert plan is not None
    graph = StepGraph(decoder.network, cache, [plan, plan], None, 10)
    turns = [Turn(NUM_SHARED, NUM_SHARED + 2)] * 2
    tokens, row = torch.tensor([1, 1]), NUM_SHARED + 2
    with pytest.raises(AssertionError, match="a branch has no room for the token"):
        graph.step_branches(tokens, (row, NUM_SHARED + 10), turns, NUM_SHARED)
    with pytest.raises(AssertionError, match="a row of all branches would be overwritten"):
        graph.step_branches(tokens, (NUM_SHARED - 1, row), turns, NUM_SHARED)
    with pytest.raises(AssertionError, match="the cache has no room for the branches"):
        graph.step_branches(tokens, (row, row), turns, NUM_SHARED + 1)
