"""Answers of many policies side by side, beside each alone in torch operations."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from triton_case import narrow_decoder

from longread.cache import KVCache
from longread.evaluate.together import (
    Answer,
    Together,
    answer_together,
    branch_rows,
    room_for_branches,
)
from longread.model import Decoder
from longread.policies import (
    H2O,
    Dense,
    KernelPlan,
    Policy,
    PyramidKV,
    Quest,
    SnapKV,
    Streaming,
    TokenSelect,
    Turn,
)
from longread.policies.kept import rows_read
from longread.reread import DocumentRereader
from longread.trace import Trace

NUM_ROWS, QUESTION_LEN, MOST_TOKENS = 320, 12, 4


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    return narrow_decoder(tmp_path_factory.mktemp("together"))


def _policies() -> list[Policy]:
    return [
        Dense(),
        TokenSelect(budget=60, window_size=12),
        TokenSelect(budget=20, window_size=0),
        TokenSelect(budget=60, window_size=12, vote="none"),
        TokenSelect(budget=60, window_size=12, vote="group-max"),
        TokenSelect(budget=60, window_size=12, vote="all"),
        Streaming(budget=50, window_size=20),
        SnapKV(budget=60, window_size=12),
        PyramidKV(budget=80, window_size=12),
        H2O(budget=60, window_size=12),
        Quest(budget=60, window_size=12),
    ]


def _read(decoder: Decoder, policy: Policy, num_spare: int) -> tuple[KVCache, Tensor]:
    """A cache with a document, and the logits after a question that the policy has followed."""
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(0, decoder.config.vocab_size, (NUM_ROWS,), generator=generator)
    cache = decoder.new_cache(NUM_ROWS + num_spare)
    start = NUM_ROWS - QUESTION_LEN
    decoder.prefill(ids[:start], cache)
    policy.prepare(cache, DocumentRereader(decoder, ids[:start]))
    policy.start_turn(Turn(start, NUM_ROWS))
    return cache, decoder.extend(ids[start:], cache, policy)


def _alone(decoder: Decoder, policy: Policy) -> Answer:
    cache, logits = _read(decoder, policy, MOST_TOKENS)
    answer = Answer([])
    while len(answer.ids) < MOST_TOKENS:
        token = logits.argmax(dim=-1, keepdim=True)
        if int(token) in decoder.config.eos_token_ids:
            break
        answer.ids.append(int(token))
        if len(answer.ids) == MOST_TOKENS:
            break
        logits = decoder.decode_with_torch(token, cache, policy)
        answer.rows_cached += cache.length
        plan = policy.kernel_plan()
        if plan is not None:
            answer.rows_read += rows_read(plan, policy.kernel_turn(), cache.length)
    return answer


@torch.inference_mode()
def test_answers_are_those_of_each_policy_alone(
    decoder: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    policies = _policies()

    def plan(cache: KVCache, policy: Policy, trace: Trace | None = None) -> KernelPlan | None:
        return policy.kernel_plan()

    monkeypatch.setattr(decoder.captured, "plan", plan)
    monkeypatch.setattr(decoder.captured, "most", 10)
    group = Together(policies)
    cache, logits = _read(decoder, group, room_for_branches(len(policies), MOST_TOKENS))
    assert len({id(p._index) for p in policies if isinstance(p, TokenSelect)}) == 1
    found = answer_together(decoder, cache, policies, logits, MOST_TOKENS)
    assert cache.length == NUM_ROWS
    in_torch = {place for place, policy in enumerate(policies) if policy.kernel_plan() is None}
    assert set(found) == set(range(len(policies))) - in_torch
    assert len(decoder.captured) == 4  # group at two sizes of share, group-max and none
    for place, answer in found.items():
        assert answer == _alone(decoder, _policies()[place]), policies[place]


@torch.inference_mode()
def test_no_answer_depends_on_the_budgets_beside_it(
    decoder: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A small budget takes larger shares: it is a step of its own."""
    monkeypatch.setattr(
        decoder.captured, "plan", lambda cache, policy, trace=None: policy.kernel_plan()
    )
    monkeypatch.setattr(decoder.captured, "most", 10)
    policies: list[Policy] = [TokenSelect(budget=40), TokenSelect(budget=200), Dense()]
    decoder.captured.clear()
    cache, logits = _read(decoder, Together(policies), 4096)
    answer_together(decoder, cache, policies, logits, 2)
    shares = {
        tuple(plan.budget for plan in step.plans): step.buffers.votes.shape[2]
        for step in decoder.captured._steps.values()
    }
    assert set(shares) == {(40, None), (200,)}
    assert shares[40, None] > shares[200,]


def test_an_answers_rows_are_few_sizes() -> None:
    assert [branch_rows(n) for n in (1, 128, 129, 2048)] == [128, 128, 256, 2048]
    assert room_for_branches(3, 200) == 768
