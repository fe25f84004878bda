"""The decode step as kernels (on a GPU as CUDA graphs) beside the step in torch operations."""

from __future__ import annotations

import itertools
import weakref
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from longread_kernels import reference
from torch import Tensor
from triton_case import ON_GPU, narrow_decoder

from longread.bench.prefill import relative_rms
from longread.cache import KVCache
from longread.decode_graph import StepGraph
from longread.index import KeyIndex
from longread.model import Decoder
from longread.policies import (
    Dense,
    KernelPlan,
    Policy,
    PyramidKV,
    SnapKV,
    Streaming,
    TokenSelect,
    Turn,
)
from longread.policies.kept import kept_ranges, row_tensor
from longread.step_buffers import can_choose
from longread.trace import Trace

NUM_ROWS, QUESTION_LEN, NUM_STEPS = 400, 20, 2


@pytest.fixture(scope="module")
def narrow(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    """With biases on queries, keys and values."""
    return narrow_decoder(tmp_path_factory.mktemp("graph"))


@pytest.fixture(scope="module")
def ids(narrow: Decoder) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(0, narrow.config.vocab_size, (NUM_ROWS + 60,), generator=generator)


def _asked(decoder: Decoder, ids: Tensor, policy: Policy) -> KVCache:
    """A cache with document and question."""
    cache = decoder.new_cache(NUM_ROWS + 60)
    start = NUM_ROWS - QUESTION_LEN
    decoder.prefill(ids[:start], cache)
    policy.prepare(cache)
    policy.start_turn(Turn(start, NUM_ROWS))
    decoder.extend(ids[start:NUM_ROWS], cache, policy)
    return cache


def _trace(decoder: Decoder, keep_steps: bool) -> Trace:
    config = decoder.config
    return Trace(
        config.num_hidden_layers,
        config.num_key_value_heads,
        NUM_ROWS - QUESTION_LEN,
        device=decoder.device,
        keep_steps=keep_steps,
    )


@dataclass
class _Replay(Policy):
    """Reads the rows that a graph chose, step by step."""

    kept: TokenSelect
    chosen: list[Tensor]  # [L, H_kv, budget] of each step
    step: int = -1

    def prepare(self, cache: KVCache) -> None:
        pass

    def select(self, layer_idx: int, q: Tensor, num_rows: int) -> Tensor | None:
        self.step += layer_idx == 0
        kept = self.kept
        ranges = kept_ranges(num_rows, self.turn, kept.sink_size, kept.window_size)
        always = row_tensor(ranges, q.device)
        chosen = self.chosen[self.step][layer_idx].long()
        return torch.cat((always.expand(chosen.shape[0], -1), chosen), dim=1)


@torch.inference_mode()
def _with_graph(
    decoder: Decoder, ids: Tensor, policy: Policy, trace: Trace | None
) -> tuple[Tensor, list[Tensor]]:
    """Logits [steps, V], and what was chosen in each step."""
    cache = _asked(decoder, ids, policy)
    plan = policy.kernel_plan()
    assert plan is not None
    graph = StepGraph(decoder.network, cache, [plan], trace.mass.shape[2] if trace else None)
    logits, chosen = [], []
    for row in range(NUM_ROWS, NUM_ROWS + NUM_STEPS):
        logits.append(graph.step(ids[row : row + 1], policy.kernel_turn(), trace).clone())
        chosen.append(graph.buffers.chosen[:, 0].clone())
        cache.length = row + 1
    return torch.stack(logits), chosen


def _with_torch(decoder: Decoder, ids: Tensor, policy: Policy, trace: Trace) -> Tensor:
    cache = _asked(decoder, ids, policy)
    rows = range(NUM_ROWS, NUM_ROWS + NUM_STEPS)
    return torch.stack([decoder.decode(ids[r : r + 1], cache, policy, trace) for r in rows])


@pytest.mark.parametrize("policy", (Dense(), TokenSelect(budget=NUM_ROWS + 100)), ids=str)
def test_all_rows_give_the_logits_of_torch(narrow: Decoder, ids: Tensor, policy: Policy) -> None:
    trace, steps = _trace(narrow, False), _trace(narrow, True)
    found, _ = _with_graph(narrow, ids, policy, trace)
    _assert_equal_steps(found, trace, _with_torch(narrow, ids, policy, steps), steps)


@pytest.mark.parametrize(
    "policy",
    (
        Streaming(budget=50, window_size=30),
        Streaming(budget=0, window_size=7),
        SnapKV(budget=60, window_size=16),
        SnapKV(budget=NUM_ROWS + 100, window_size=16),
        SnapKV(budget=None, window_size=16),
        PyramidKV(budget=60, window_size=QUESTION_LEN + 9),
    ),
    ids=str,
)
def test_listed_rows_give_the_logits_of_torch(narrow: Decoder, ids: Tensor, policy: Policy) -> None:
    trace, steps = _trace(narrow, False), _trace(narrow, True)
    found, _ = _with_graph(narrow, ids, policy, trace)
    _assert_equal_steps(found, trace, _with_torch(narrow, ids, policy, steps), steps)


@pytest.mark.parametrize(
    "policy",
    (
        TokenSelect(budget=60, window_size=16),
        TokenSelect(budget=60, window_size=16, vote="group-max", index="exact", reselect=2),
        TokenSelect(budget=60, window_size=QUESTION_LEN + 9),  # joins the question
    ),
    ids=str,
)
def test_chosen_rows_give_the_logits_of_torch(
    narrow: Decoder, ids: Tensor, policy: TokenSelect
) -> None:
    trace, steps = _trace(narrow, False), _trace(narrow, True)
    found, chosen = _with_graph(narrow, ids, policy, trace)
    for previous, now in itertools.pairwise(chosen[: policy.reselect]):
        assert torch.equal(previous, now), "rows were chosen anew too early"
    expected = _with_torch(narrow, ids, _Replay(policy, chosen), steps)
    _assert_equal_steps(found, trace, expected, steps)
    # What torch chooses for the same tokens, over all rows and not share by share.
    whole = _trace(narrow, True)
    _with_torch(narrow, ids, policy, whole)
    for step, layers in enumerate(whole.steps):
        for layer_idx, rows in enumerate(layers):
            assert rows is not None
            for head in range(rows.shape[0]):
                both = set(rows[head].tolist()) & set(chosen[step][layer_idx, head].tolist())
                assert len(both) > 0.7 * policy.budget  # type: ignore[operator]
    if policy.reselect == 1:
        assert not torch.equal(chosen[0], chosen[1]), "another token wants other rows"


def test_a_model_with_head_norms(ids: Tensor, tmp_path: Path) -> None:
    decoder, policy = narrow_decoder(tmp_path, "qwen3"), TokenSelect(budget=60, window_size=16)
    trace, steps = _trace(decoder, False), _trace(decoder, True)
    found, chosen = _with_graph(decoder, ids, policy, trace)
    expected = _with_torch(decoder, ids, _Replay(policy, chosen), steps)
    _assert_equal_steps(found, trace, expected, steps)


def _assert_equal_steps(found: Tensor, trace: Trace, expected: Tensor, steps: Trace) -> None:
    assert relative_rms(found, expected) < 0.01
    assert trace.num_steps == steps.num_steps == NUM_STEPS
    assert trace.fraction_kept == pytest.approx(steps.fraction_kept, abs=1e-6)
    assert torch.equal(trace.selected, steps.selected)
    assert relative_rms(trace.mass.cpu(), steps.mass.cpu()) < 0.01


def test_without_a_trace_the_logits_are_the_same(narrow: Decoder, ids: Tensor) -> None:
    policy = TokenSelect(budget=100, window_size=16)
    traced, _ = _with_graph(narrow, ids, policy, _trace(narrow, False))
    plain, _ = _with_graph(narrow, ids, policy, None)
    torch.testing.assert_close(plain, traced)


@torch.inference_mode()
def test_rows_that_are_not_chosen_are_never_read(narrow: Decoder, ids: Tensor) -> None:
    policy = TokenSelect(budget=40, window_size=16, reselect=100)

    def second_step(poisoned: bool) -> Tensor:
        cache, trace = _asked(narrow, ids, policy), _trace(narrow, False)
        plan = policy.kernel_plan()
        assert plan is not None
        graph = StepGraph(narrow.network, cache, [plan], trace.mass.shape[2])
        graph.step(ids[NUM_ROWS : NUM_ROWS + 1], policy.turn, trace)
        read = trace.selected.bool()
        assert 0.05 < read.float().mean() < 0.3
        assert not torch.equal(read[:, 0], read[:, 1]), "each KV head chooses for itself"
        if poisoned:
            for slab in (cache.k, cache.v):
                slab[:, :, : read.shape[2]][~read] = torch.nan
        cache.length = NUM_ROWS + 1
        return graph.step(ids[NUM_ROWS + 1 : NUM_ROWS + 2], policy.turn, trace).clone()

    torch.testing.assert_close(second_step(poisoned=True), second_step(poisoned=False))


def test_after_an_undo_the_step_is_as_before(narrow: Decoder, ids: Tensor) -> None:
    policy = TokenSelect(budget=60, window_size=16)
    cache = _asked(narrow, ids, policy)
    plan = policy.kernel_plan()
    assert plan is not None
    with torch.inference_mode():
        graph = StepGraph(narrow.network, cache, [plan], None)
        first = []
        for row in range(NUM_ROWS, NUM_ROWS + 2):
            first.append(graph.step(ids[row : row + 1], policy.turn, None).clone())
            cache.length = row + 1
        cache.truncate(NUM_ROWS)
        for row, expected in zip(range(NUM_ROWS, NUM_ROWS + 2), first, strict=True):
            found = graph.step(ids[row : row + 1], policy.turn, None)
            torch.testing.assert_close(found, expected)
            cache.length = row + 1


def test_a_step_is_of_its_own_cache_policy_and_trace_only(
    narrow: Decoder, ids: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy, other = TokenSelect(budget=60), TokenSelect(budget=61)
    cache = _asked(narrow, ids, policy)
    other.prepare(cache)
    trace, longer = _trace(narrow, False), _trace(narrow, False)
    longer.mass = longer.mass.new_zeros((*longer.mass.shape[:2], longer.mass.shape[2] + 1))
    monkeypatch.setattr("longread.captured.ops.on_triton", lambda x: True)
    monkeypatch.setattr(narrow.captured, "most", 10)
    with torch.inference_mode():
        steps = [
            narrow.captured.step(cache, asked, followed)
            for asked in (policy, other)
            for followed in (None, trace, longer)
        ]
        assert None not in steps and len({id(step) for step in steps}) == 6
        assert narrow.captured.step(cache, policy, trace) is steps[1]
        cache.reserve(cache.capacity + 1)
        assert steps[1] is not None and not steps[1].fits(cache)
        assert narrow.captured.step(cache, policy, trace) is not steps[1]
        assert len(narrow.captured) == 1
    narrow.captured.clear()


@pytest.mark.parametrize("vote", ("all", "threshold"))
def test_votes_without_kernels_have_no_plan(vote: str) -> None:
    assert TokenSelect(budget=10, vote=vote).kernel_plan() is None


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """The decoder takes the graph on the CPU too, whose kernels the interpreter runs."""
    monkeypatch.setattr("longread.model.ops.on_triton", lambda x: True)
    for name in ("rope_append", "add_rms_norm", "swiglu", "attend_causal"):
        monkeypatch.setattr(f"longread.model.ops.{name}", getattr(reference, f"{name}_ref"))


@pytest.mark.usefixtures("kernels")
def test_the_decoder_takes_the_graph_and_captures_anew_when_the_cache_grows(
    narrow: Decoder, ids: Tensor
) -> None:
    policy = TokenSelect(budget=60, window_size=16)
    cache, trace = _asked(narrow, ids, policy), _trace(narrow, False)
    token = ids[NUM_ROWS : NUM_ROWS + 1]
    narrow.decode(token, cache, policy, trace)
    (captured,) = narrow.captured._steps.values()
    graph = weakref.ref(captured)
    del captured
    slab = weakref.ref(cache.k)
    assert graph() is not None and cache.length == NUM_ROWS + 1
    counted, mass = int(trace.selected.sum()), trace.mass.clone()
    assert counted > 0
    cache.length = cache.capacity  # the rows between do not matter here
    cache.k[:, :, NUM_ROWS + 1 :] = 0
    cache.v[:, :, NUM_ROWS + 1 :] = 0
    narrow.decode(token, cache, policy, trace)
    assert graph() is None and slab() is None, "the slabs that the cache outgrew are still held"
    assert int(trace.selected.sum()) > counted and (trace.mass >= mass).all()


@pytest.mark.usefixtures("kernels")
def test_a_policy_without_kernels_lets_go_of_the_graph(narrow: Decoder, ids: Tensor) -> None:
    policy = TokenSelect(budget=60, window_size=16)
    cache = _asked(narrow, ids, policy)
    narrow.decode(ids[:1], cache, policy)
    assert len(narrow.captured)
    other = TokenSelect(budget=60, window_size=16, vote="all")
    other.prepare(cache)
    other.start_turn(Turn(NUM_ROWS - QUESTION_LEN, NUM_ROWS))
    narrow.decode(ids[:1], cache, other)
    assert not len(narrow.captured)


@pytest.mark.usefixtures("kernels")
def test_the_trace_of_the_answer_before_keeps_its_counts(narrow: Decoder, ids: Tensor) -> None:
    policy = TokenSelect(budget=60, window_size=16)
    cache = _asked(narrow, ids, policy)
    first, second = _trace(narrow, False), _trace(narrow, False)
    narrow.decode(ids[:1], cache, policy, first)
    counts = first.selected.clone(), first.mass.clone()
    narrow.decode(ids[1:2], cache, policy, second)
    assert torch.equal(first.selected, counts[0]) and torch.equal(first.mass, counts[1])
    assert int(second.selected.sum()) == int(counts[0].sum())


def test_a_budget_past_the_rows_takes_no_memory_for_it(narrow: Decoder, ids: Tensor) -> None:
    policy = TokenSelect(budget=10**17)
    cache = _asked(narrow, ids, policy)
    plan = policy.kernel_plan()
    assert plan is not None
    with torch.inference_mode():
        assert StepGraph(narrow.network, cache, [plan], 10).buffers.budget <= cache.capacity


def test_a_budget_that_leaves_shares_without_rows_is_not_for_the_kernels() -> None:
    cache = KVCache(1, 1, 8, 1, device=torch.device("cpu"), dtype=torch.float32)
    index = KeyIndex(cache, "exact", 0)
    few, many = KernelPlan(budget=32, index=index), KernelPlan(budget=2048, index=index)
    assert can_choose((many,), 131072)
    assert can_choose((KernelPlan(budget=1, index=index),), 300)
    assert not can_choose((few,), 1 << 20)
    assert not can_choose((many, few), 1 << 20), "the smallest budget decides"
    assert can_choose((many, KernelPlan(budget=32)), 131072), "a list is not chosen"
    assert can_choose((KernelPlan(index=index),), 1 << 20)


@pytest.mark.skipif(not ON_GPU, reason="on the CPU the torch operations are the path")
@pytest.mark.gpu
def test_the_decoder_takes_the_graph_on_a_gpu(narrow: Decoder, ids: Tensor) -> None:
    policy = TokenSelect(budget=60, window_size=16)
    cache = _asked(narrow, ids, policy)
    trace = _trace(narrow, False)
    narrow.decode(ids[NUM_ROWS : NUM_ROWS + 1], cache, policy, trace)
    assert len(narrow.captured) and cache.length == NUM_ROWS + 1
    assert int(trace.selected.sum()) > 0
    capacity = cache.capacity
    for _ in range(capacity - cache.length + 2):  # grows, and captures anew
        logits = narrow.decode(ids[:1], cache, policy, trace)
    assert cache.capacity > capacity and torch.isfinite(logits).all()
