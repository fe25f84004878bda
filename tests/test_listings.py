"""Quest, H2O and TokenButler as branches of one captured step, beside each in torch operations.

In fp32 both read the same rows; on a GPU in bf16, through CUDA graphs, nearly the same. Triton's
interpreter takes seconds for a step of many branches: over long answers the kernels' torch twins
stand in for the kernels, and what lists the rows is the same.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import tiny
import torch
from longread_kernels import reference_decode as twins
from longread_kernels.tables import Kept, Query
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from triton_case import DEVICE, ON_GPU

from longread.bench.prefill import relative_rms
from longread.cache import KVCache
from longread.decode_graph import StepGraph
from longread.evaluate.runner import _RowCounter
from longread.evaluate.together import Answer, Together, answer_together, room_for_branches
from longread.model import Decoder
from longread.policies import H2O, Butler, Dense, KernelPlan, Policy, Quest, SnapKV, Turn
from longread.policies.kept import kept_ranges, row_tensor, rows_read
from longread.reread import DocumentRereader
from longread.trace import Trace
from longread.weights import load_config, load_weights

NUM_DOCUMENT, BRANCH_ROWS, NUM_STEPS = 150, 52, 14
QUESTION_LENS = (9, 21, 1, 16)
POLICIES: tuple[Policy, ...] = (
    Quest(budget=24, window_size=5),
    H2O(budget=20, window_size=5),
    Quest(budget=7, window_size=0, sink_size=0),
    Dense(),
    H2O(budget=1, window_size=0),
    Quest(budget=61, window_size=12, sink_size=19),
    H2O(budget=160, window_size=5),  # rows go when the answer is a few tokens long
    SnapKV(budget=30, window_size=8),
    Quest(budget=500, window_size=5),
    H2O(budget=500, window_size=5),
    H2O(budget=0, window_size=9),
    Quest(budget=133, window_size=3),  # reads all rows at first
    Quest(budget=40, window_size=2, block_len=7),
    Butler(budget=24, window_size=5),
    Butler(budget=61, window_size=1, sink_size=0),
    Butler(budget=33, window_size=12, sink_size=19, neighbours=2),
    Butler(budget=500, window_size=5),
)
DTYPE = torch.bfloat16 if ON_GPU else torch.float32


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    """A tiny model that never ends an answer."""
    root = tmp_path_factory.mktemp("listings")
    folder = tiny.save_hf_folder(root / "hf", "qwen2", num_hidden_layers=3)
    converted = tiny.convert(folder, root / "models")
    weights = load_weights(converted, device=str(DEVICE), dtype=DTYPE)
    config = dataclasses.replace(load_config(converted), eos_token_ids=())
    decoder = Decoder(config, weights, DEVICE, DTYPE)
    decoder.captured.most = 10
    return decoder


@pytest.fixture(autouse=True)
def untrained(decoder: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny.use_untrained_predictor(decoder.config, monkeypatch)


@pytest.fixture
def by_twins(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU's steps in the kernels' torch twins, branch by branch."""
    if ON_GPU:
        return

    def own(kept: Kept, branch: int) -> Kept:
        row, *question = kept.state[branch].tolist()
        state = torch.tensor([row, *(min(end, row + 1) for end in question)])
        sizes = [kept.sink_size, kept.window_size]
        if kept.branches is not None:
            sizes = kept.branches[branch, 1:3].tolist()
        return Kept(state, *sizes)

    def append_token(heads: Tensor, *args: Any, voted: bool) -> None:
        *rope, kept, k, v, query, index = args
        assert index is None, "nothing is chosen by an index here"
        for branch, (some, q) in enumerate(
            zip(heads.chunk(kept.num_branches), query.q.chunk(kept.num_branches), strict=True)
        ):
            first = branch * kept.branch_rows
            slabs = k[:, first:], v[:, first:]
            to = Query(q, q, query.scale, query.offset, query.norm)
            twins.append_token_ref(some, *rope, own(kept, branch), *slabs, to, None, voted=voted)

    def attend_token(q: Tensor, k: Tensor, v: Tensor, kept: Kept, *args: Any, **more: Any) -> None:
        chosen, scale, out, *parts = args
        log_sums = more.pop("log_sum").chunk(kept.num_branches)
        for branch, (own_q, own_out, log_sum) in enumerate(
            zip(q.chunk(kept.num_branches), out.chunk(kept.num_branches), log_sums, strict=True)
        ):
            slabs, listed = (k, v), chosen
            if kept.branches is not None:
                num_shared, _, _, num_listed, _ = kept.branches[branch].tolist()
                first = num_shared + branch * kept.branch_rows
                slabs = tuple(torch.cat((s[:, :num_shared], s[:, first:]), dim=1) for s in (k, v))
                listed = chosen[branch, :, :num_listed] if chosen is not None else None
            elif chosen is not None:
                listed = chosen[0]
            rest = listed, scale, own_out, *parts
            kept_rows = own(kept, branch)
            twins.attend_token_ref(own_q, *slabs, kept_rows, *rest, log_sum=log_sum, **more)

    monkeypatch.setattr("longread.decode_graph.append_token.append_token", append_token)
    monkeypatch.setattr("longread.decode_graph.attend.attend_token", attend_token)
    monkeypatch.setattr("longread.decode_graph.linear.matvec", twins.matvec_ref)


def _ids(count: int, seed: int) -> Tensor:
    """No token twice: where layer 0 has a key twice, rounding may say whose neighbours are read."""
    return torch.randperm(397, generator=torch.Generator().manual_seed(seed))[:count] + 3


def _read(decoder: Decoder, policy: Policy, num_spare: int) -> KVCache:
    """A cache with the document; what was not written is no number."""
    cache = decoder.new_cache(NUM_DOCUMENT + num_spare)
    cache.k.fill_(torch.nan)
    cache.v.fill_(torch.nan)
    decoder.prefill(_ids(NUM_DOCUMENT, 1), cache)
    policy.prepare(cache, DocumentRereader(decoder, _ids(NUM_DOCUMENT, 1)))
    return cache


def _ask(decoder: Decoder, policy: Policy, cache: KVCache, question: Tensor) -> Tensor:
    start = cache.length
    policy.start_turn(Turn(start, start + len(question)))
    return decoder.extend(question, cache, policy)


def _trace(decoder: Decoder, keep_steps: bool = True) -> Trace:
    config = decoder.config
    sizes = config.num_hidden_layers, config.num_key_value_heads, NUM_DOCUMENT
    return Trace(*sizes, device=decoder.device, keep_steps=keep_steps)


def _read_the_same(
    step: StepGraph, branch: int, turn: Turn, row: int, wanted: Sequence[Tensor | None]
) -> bool:
    """Whether a branch's token in `row` read the rows that torch read, by layer; as many it must.

    In bf16 a near tie may choose another block, and of few rows that is much.
    """
    plan, every, num_other = step.plans[branch], set(range(row + 1)), 0
    if plan.budget is None:
        return True
    ranges = kept_ranges(row + 1, turn, plan.sink_size, plan.window_size)
    kept = row_tensor(ranges, torch.device("cpu")).tolist()
    for layer_idx, expected in enumerate(wanted):
        chosen = step.buffers.chosen[layer_idx, branch, :, : plan.budget]
        for head, rows in enumerate(chosen.tolist()):
            read = [*kept, *(row for row in rows if row >= 0)]
            found = set(read)
            assert len(found) == len(read), "a row comes twice"
            best = every if expected is None else set(expected[head % len(expected)].tolist())
            best -= {-1}
            assert len(found) == len(best)
            num_other += len(found - best)
    assert ON_GPU or num_other == 0
    return num_other == 0


def _assert_same_logits(found: Tensor, wanted: Tensor) -> None:
    assert relative_rms(found, wanted) < (0.05 if ON_GPU else 1e-5)


def _moved(
    decoder: Decoder, policy: Policy, joint: KVCache, bounds: dict[int, Quest | Butler]
) -> Policy:
    """A policy like one that has followed a question in a cache of its own, for the joint one."""
    moved = dataclasses.replace(policy)
    moved.turn = policy.turn
    if isinstance(moved, Quest):
        if moved.block_len not in bounds:
            bounds[moved.block_len] = moved
            moved.prepare(joint)
        first = bounds[moved.block_len]
        assert isinstance(first, Quest)
        moved.borrow_bounds(first)
    elif isinstance(moved, Butler):
        if 0 not in bounds:
            bounds[0] = moved
            moved.prepare(joint, DocumentRereader(decoder, _ids(NUM_DOCUMENT, 1)))
        first = bounds[0]
        assert isinstance(first, Butler)
        moved.borrow_keys(first)
    elif isinstance(moved, H2O):
        assert isinstance(policy, H2O)
        moved._left.cache = joint
        moved._left.rows = [rows.clone() for rows in policy._left.rows]
        moved._left.mass = [mass.clone() for mass in policy._left.mass]
    return policy if isinstance(policy, SnapKV) else moved


def _compare_branches(decoder: Decoder, policies: Sequence[Policy], num_steps: int) -> StepGraph:
    """Each policy with a question of its own, alone in torch operations and all in one step."""
    lens = [QUESTION_LENS[place % len(QUESTION_LENS)] for place in range(len(policies))]
    policies = [dataclasses.replace(policy) for policy in policies]
    caches = []
    for place, policy in enumerate(policies):
        caches.append(_read(decoder, policy, BRANCH_ROWS))
        _ask(decoder, policy, caches[-1], _ids(lens[place], 2 + place))
    joint = _read(decoder, Dense(), len(policies) * BRANCH_ROWS)
    plans, turns, all_moved, bounds = [], [], [], dict[int, Quest | Butler]()
    for place, (policy, cache) in enumerate(zip(policies, caches, strict=True)):
        start = NUM_DOCUMENT + place * BRANCH_ROWS
        for slab, own in ((joint.k, cache.k), (joint.v, cache.v)):
            slab[:, :, start : start + BRANCH_ROWS] = own[:, :, NUM_DOCUMENT:]
        joint.length = NUM_DOCUMENT
        moved = _moved(decoder, policy, joint, bounds)
        joint.length = NUM_DOCUMENT + lens[place]
        plan = moved.kernel_plan()
        assert plan is not None
        plans.append(plan)
        turns.append(moved.kernel_turn())
        all_moved.append(moved)
    step = StepGraph(decoder.network, joint, plans, None, BRANCH_ROWS)
    for number, token in enumerate(_ids(num_steps, 99).to(decoder.device)):
        rows = [NUM_DOCUMENT + count + number for count in lens]
        found = step.step_branches(token.expand(len(plans)), rows, turns, NUM_DOCUMENT).clone()
        wanted, same = [], []
        for branch, policy in enumerate(policies):
            trace = _trace(decoder)
            wanted.append(decoder.decode_with_torch(token[None], caches[branch], policy, trace))
            same.append(_read_the_same(step, branch, turns[branch], rows[branch], trace.steps[0]))
            read = rows_read(plans[branch], turns[branch], rows[branch] + 1)
            assert read / (rows[branch] + 1) == pytest.approx(trace.fraction_kept)
        assert sum(same) >= 0.5 * len(same)
        _assert_same_logits(found[same], torch.stack(wanted)[same])
    for moved, row in zip(all_moved, rows, strict=True):
        if isinstance(moved, H2O) and moved.budget == 500:  # each query was counted once
            for sums in moved._left.mass:
                total = sums.masked_fill(sums.isinf(), 0).sum(dim=1)
                assert total.tolist() == pytest.approx([3 * (row + 1)] * len(total), rel=1e-4)
    return step


@pytest.mark.usefixtures("by_twins")
@torch.inference_mode()
def test_branches_read_and_say_what_each_does_alone(decoder: Decoder) -> None:
    """Rows go over the window, and budgets over the rows."""
    _compare_branches(decoder, POLICIES, NUM_STEPS)


@pytest.mark.usefixtures("by_twins")
@torch.inference_mode()
def test_some_choose_anew_only_now_and_then(decoder: Decoder) -> None:
    policies = [Butler(30, window_size=3, reselect=4, neighbours=n) for n in (0, 1)]
    others = Quest(budget=24, window_size=5), Dense(), Dense()
    _compare_branches(decoder, (*policies, *others), NUM_STEPS)


@torch.inference_mode()
def test_branches_do_so_with_the_kernels(decoder: Decoder) -> None:
    _compare_branches(decoder, (*POLICIES[:4], POLICIES[-2]), 2)


@pytest.mark.gpu
@torch.inference_mode()
def test_branches_do_so_as_cuda_graphs(decoder: Decoder) -> None:
    assert _compare_branches(decoder, POLICIES, 3 * NUM_STEPS // 2)._graphs, "nothing was captured"


class _NoValues(TorchDispatchMode):
    """Fails where the host asks for a tensor's value, or for a shape that depends on one."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        asks = {torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default}
        assert func not in asks, "a captured step waits for nothing"
        return func(*args, **(kwargs or {}))


@pytest.mark.usefixtures("by_twins")
@torch.inference_mode()
def test_listings_wait_for_nothing_and_stay_where_they_are(decoder: Decoder) -> None:
    step = _compare_branches(decoder, (*POLICIES[:2], POLICIES[-2]), 1)
    assert len(step._listings) == 3
    q = step.buffers.query.q.unflatten(0, (3, -1))
    for listing in step._listings:
        places = [tensor.data_ptr() for tensor in listing.state]
        with _NoValues():
            listing.start_step()
            listing.list_rows(0, q, step.buffers.chosen[0])
        assert [tensor.data_ptr() for tensor in listing.state] == places and listing.fits()


@pytest.mark.parametrize("policy", POLICIES[:2], ids=str)
@torch.inference_mode()
def test_a_trace_counts_what_the_step_read(decoder: Decoder, policy: Policy) -> None:
    traces = _trace(decoder), _trace(decoder, keep_steps=False)
    for trace, in_torch in zip(traces, (True, False), strict=True):
        cache = _read(decoder, policy, BRANCH_ROWS)
        _ask(decoder, policy, cache, _ids(9, 3))
        plan = policy.kernel_plan()
        assert plan is not None
        step = StepGraph(decoder.network, cache, [plan], NUM_DOCUMENT)
        for token in _ids(2, 4).to(decoder.device):
            if in_torch:
                decoder.decode_with_torch(token[None], cache, policy, trace)
            else:
                step.step(token[None], policy.kernel_turn(), trace)
                cache.length += 1
    wanted, found = traces
    assert found.fraction_kept == pytest.approx(wanted.fraction_kept)
    assert relative_rms(found.mass, wanted.mass) < (0.05 if ON_GPU else 1e-5)
    differing = (found.selected != wanted.selected).float().mean()
    assert differing < 0.03 if ON_GPU else differing == 0


@pytest.fixture
def captured(decoder: Decoder, monkeypatch: pytest.MonkeyPatch, by_twins: None) -> None:
    """The decoder takes the step on the CPU too."""

    def plan(cache: KVCache, policy: Policy, trace: Trace | None = None) -> KernelPlan | None:
        return None if trace is not None and trace.keeps_steps else policy.kernel_plan()

    monkeypatch.setattr(decoder.captured, "plan", plan)
    decoder.captured.clear()


def _alone(decoder: Decoder, policy: Policy, question: Tensor, num_tokens: int) -> Answer:
    """As the runner decodes a policy without kernels, with the rows that torch counts."""
    cache = _read(decoder, policy, BRANCH_ROWS)
    logits, answer = _ask(decoder, policy, cache, question), Answer([])
    counter = _RowCounter(decoder)
    while True:
        answer.ids.append(int(logits.argmax()))
        if len(answer.ids) == num_tokens:
            answer.rows_read = counter.rows_read
            return answer
        token = torch.tensor(answer.ids[-1:], device=decoder.device)
        logits = decoder.decode_with_torch(token, cache, policy, counter)
        answer.rows_cached += cache.length


@pytest.mark.skipif(ON_GPU, reason="in bf16 a near tie may choose another token")
@pytest.mark.usefixtures("captured")
@torch.inference_mode()
def test_each_question_begins_anew_and_counts_the_rows_that_torch_reads(decoder: Decoder) -> None:
    group = Together([dataclasses.replace(policy) for policy in POLICIES])
    cache = _read(decoder, group, room_for_branches(len(POLICIES), NUM_STEPS) + 40)
    rereader = DocumentRereader(decoder, _ids(NUM_DOCUMENT, 1))
    steps = []
    for number in range(3):
        cache.truncate(NUM_DOCUMENT)
        if number:
            group.begin_anew(cache, rereader)
        question = _ids(QUESTION_LENS[number], number)
        logits = _ask(decoder, group, cache, question)
        found = answer_together(decoder, cache, group.policies, logits, NUM_STEPS)
        steps.append(list(decoder.captured._steps.values()))
        for place, policy in enumerate(POLICIES):
            alone = _alone(decoder, dataclasses.replace(policy), question, NUM_STEPS)
            assert found[place] == dataclasses.replace(
                alone, rows_read=pytest.approx(alone.rows_read)
            ), (policy, number)
    assert len(steps[0]) == 1 and steps[0] == steps[1] == steps[2], "one step serves all questions"


def _conversation(decoder: Decoder, policy: Policy, step: Callable[..., Tensor]) -> Tensor:
    """Logits of four turns, of which the third was undone, in a cache that grows in the last."""
    cache, logits, before = _read(decoder, policy, 85), [], 0
    for turn, num_tokens in enumerate((9, 6, 4, 40)):
        if turn == 3:
            cache.truncate(before)
        before = cache.length
        logits.append(_ask(decoder, policy, cache, _ids(QUESTION_LENS[turn], 10 + turn)))
        for number, token in enumerate(_ids(num_tokens, 20 + turn).to(decoder.device)):
            logits.append(step(token[None], cache, policy, number).clone())
    assert cache.capacity > NUM_DOCUMENT + 85
    return torch.stack(logits)


@pytest.mark.parametrize(
    "policy",
    (
        Quest(budget=24, window_size=5),
        H2O(budget=20, window_size=5),
        H2O(budget=170, window_size=5),
        H2O(budget=1000, window_size=5),
        Butler(budget=24, window_size=5, neighbours=1),
    ),
    ids=str,
)
@pytest.mark.skipif(ON_GPU, reason="in bf16 a near tie may choose another row")
@pytest.mark.usefixtures("captured")
@torch.inference_mode()
def test_a_conversation_goes_on_from_what_the_steps_left(decoder: Decoder, policy: Policy) -> None:
    taken = {True: 0, False: 0}

    def alone(token: Tensor, cache: KVCache, policy: Policy, number: int) -> Tensor:
        return decoder.decode_with_torch(token, cache, policy)

    def mixed(token: Tensor, cache: KVCache, policy: Policy, number: int) -> Tensor:
        in_torch = number % 7 == 4  # a step that torch takes in the middle of an answer
        taken[in_torch] += 1
        trace = _trace(decoder) if in_torch else None
        logits = decoder.decode(token, cache, policy, trace)
        (graph,) = decoder.captured._steps.values()
        assert (graph.buffers.logits.data_ptr() == logits.data_ptr()) != in_torch
        return logits

    wanted = _conversation(decoder, dataclasses.replace(policy), alone)
    _assert_same_logits(_conversation(decoder, dataclasses.replace(policy), mixed), wanted)
    assert min(taken.values()) > 5
