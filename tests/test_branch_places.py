"""Questions as branches of the captured step, beside each alone in torch operations."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import tiny
import torch
from longread_kernels import attend
from torch import Tensor
from triton_case import narrow_decoder

from longread.batch import Question, Siblings, answer_each
from longread.branches import BranchPlaces
from longread.cache import KVCache
from longread.model import Decoder
from longread.policies import (
    H2O,
    XKV,
    Butler,
    Dense,
    KernelPlan,
    Policy,
    Quest,
    Razor,
    SnapKV,
    TokenSelect,
    Turn,
)
from longread.reread import DocumentRereader
from longread.sampling import SamplingParams
from longread.trace import Trace

NUM_ROWS, MOST_TOKENS, NUM_PLACES = 181, 3, 3
QUESTION_LENS = (9, 20, 1, 17)
MakePolicy = Callable[[], Policy]


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    return narrow_decoder(tmp_path_factory.mktemp("places"))


@pytest.fixture(autouse=True)
def untrained(decoder: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny.use_untrained_predictor(decoder.config, monkeypatch)


@pytest.fixture
def on_kernels(decoder: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels in Triton's interpreter count as there."""

    def plan(cache: KVCache, policy: Policy, trace: Trace | None = None) -> KernelPlan | None:
        found = policy.kernel_plan()
        return None if found is None or (trace is not None and found.apart) else found

    monkeypatch.setattr(decoder.captured, "plan", plan)


def _document(decoder: Decoder) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(0, decoder.config.vocab_size, (NUM_ROWS,), generator=generator)


def _read(decoder: Decoder) -> KVCache:
    cache = decoder.new_cache(NUM_ROWS + 60)
    cache.k.fill_(torch.nan)
    cache.v.fill_(torch.nan)
    decoder.prefill(_document(decoder), cache)
    return cache


def _questions(decoder: Decoder) -> list[Question]:
    generator = torch.Generator().manual_seed(2)
    size = decoder.config.vocab_size
    return [
        Question(
            number,
            torch.randint(0, size, (length,), generator=generator).tolist(),
            MOST_TOKENS - (number == 2),  # one place is free before the others
            SamplingParams(),
        )
        for number, length in enumerate(QUESTION_LENS, 1)
    ]


def _places(decoder: Decoder, cache: KVCache, make_policy: MakePolicy) -> BranchPlaces | None:
    rereader = DocumentRereader(decoder, _document(decoder))
    policy = make_policy()
    policy.prepare(cache, rereader)
    siblings = Siblings(policy, make_policy, cache, rereader)
    siblings.reserve(NUM_PLACES)
    num_own = max(QUESTION_LENS) + MOST_TOKENS
    return BranchPlaces.make(decoder, cache, siblings, num_own, cache.capacity)


@torch.inference_mode()
def _alone(decoder: Decoder, policy: Policy, question: Question) -> tuple[list[int], Trace]:
    cache, trace = _read(decoder), decoder.new_trace(NUM_ROWS)
    policy.prepare(cache, DocumentRereader(decoder, _document(decoder)))
    policy.start_turn(Turn(NUM_ROWS, NUM_ROWS + len(question.ids)))
    logits = decoder.extend(torch.tensor(question.ids), cache, policy, trace)
    ids: list[int] = []
    while True:
        ids.append(int(logits.argmax()))
        if len(ids) == question.max_tokens:
            return ids, trace
        logits = decoder.decode_with_torch(torch.tensor(ids[-1:]), cache, policy, trace)


@pytest.mark.parametrize(
    "make_policy",
    (
        Dense,
        lambda: TokenSelect(budget=60, window_size=12),
        lambda: TokenSelect(budget=60, window_size=12, index="exact", reselect=2),
        lambda: SnapKV(budget=60, window_size=12),
        lambda: H2O(budget=60, window_size=12),
        lambda: Quest(budget=60, window_size=12),
        lambda: Razor(budget=90, window_size=12, period=16),
        lambda: Butler(budget=60, window_size=12, neighbours=1),
        lambda: Butler(budget=60, window_size=12, reselect=2),
    ),
    ids=(
        "dense",
        "tokenselect",
        "reselect",
        "snapkv",
        "h2o",
        "quest",
        "razor",
        "butler",
        "kept choice",
    ),
)
@pytest.mark.usefixtures("on_kernels")
def test_each_answer_is_the_one_alone(decoder: Decoder, make_policy: MakePolicy) -> None:
    cache, questions = _read(decoder), _questions(decoder)
    places = _places(decoder, cache, make_policy)
    assert places is not None
    assert places.refills == (getattr(make_policy(), "reselect", 1) == 1)
    found = {}
    for asked in answer_each(decoder, places, questions, lambda: decoder.new_trace(NUM_ROWS)):
        trace = asked.trace
        counts = trace.mass.clone(), trace.selected.clone(), trace.fraction_kept
        found[asked.question.number] = asked.reply.ids, *counts
    assert sorted(found) == [1, 2, 3, 4] and cache.length == NUM_ROWS
    for question in questions:
        ids, trace = _alone(decoder, make_policy(), question)
        found_ids, mass, selected, kept = found[question.number]
        assert found_ids == ids
        # A near tie may choose another row.
        assert (mass - trace.mass).abs().sum() < 0.02 * trace.mass.sum()
        assert (selected != trace.selected).float().mean() < 0.02
        assert kept == pytest.approx(trace.fraction_kept, rel=0.02)


@pytest.mark.usefixtures("on_kernels")
def test_programs_take_a_part_of_the_branches_each(
    decoder: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two of the three in one, and the last one alone in another."""
    monkeypatch.setattr(attend, "_MOST_JOINED_HEADS", 6)
    test_each_answer_is_the_one_alone(decoder, Dense)


@pytest.mark.usefixtures("on_kernels")
def test_what_has_no_branches_has_no_places(decoder: Decoder) -> None:
    for policy in (
        TokenSelect(budget=60, vote="none"),  # sets of single heads are not traced
        TokenSelect(budget=60, vote="all"),
        XKV(budget=60),  # reads a cache of its own
    ):
        cache = _read(decoder)
        capacity = cache.capacity
        assert _places(decoder, cache, lambda policy=policy: policy) is None  # type: ignore[misc]
        assert cache.capacity == capacity


def test_without_a_gpu_there_are_no_places(decoder: Decoder) -> None:
    if decoder.device.type == "cpu":
        assert _places(decoder, _read(decoder), Dense) is None
