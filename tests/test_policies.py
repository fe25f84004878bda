"""Every policy through the same tests, over the POLICIES table."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest
import tiny
import torch
from longread_kernels.reference import VOTES
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from longread.cache import KVCache
from longread.config import INDEX_NAMES, Settings
from longread.evaluate.selection import measure
from longread.evaluate.variants import parse_variants
from longread.model import Decoder
from longread.policies import POLICIES, Dense, Policy, TokenSelect, Turn
from longread.reread import DocumentRereader
from longread.trace import Trace

NUM_ROWS, QUESTION_LEN = 400, 20
# The others read every row.
SELECTING = [name for name, policy in POLICIES.items() if name != "dense" and not policy.rebuilds]


@pytest.fixture(scope="module")
def decoder(device: str, tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    root = tmp_path_factory.mktemp("policies")
    folder = tiny.save_hf_folder(root / "hf", "qwen2")
    return Decoder.load(tiny.convert(folder, root / "models"), device, "float32")


@pytest.fixture(autouse=True)
def untrained(decoder: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny.use_untrained_predictor(decoder.config, monkeypatch)


@pytest.fixture(scope="module")
def ids(decoder: Decoder) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(0, decoder.config.vocab_size, (NUM_ROWS + 60,), generator=generator)


def _make(name: str, budget: int, window_size: int = 256) -> Policy:
    policy_type = POLICIES[name]
    values = {"budget": budget, "window_size": window_size}
    names = {field.name for field in dataclasses.fields(policy_type)}
    return policy_type(**{name: value for name, value in values.items() if name in names})


def _ask(
    decoder: Decoder,
    ids: Tensor,
    policy: Policy,
    before_decode: Callable[[KVCache], None] | None = None,
    trace: Trace | None = None,
    num_steps: int = 8,
) -> Tensor:
    """Logits [steps, V] of a turn: document, question, then the given tokens as answer."""
    cache = decoder.new_cache(NUM_ROWS)
    start = NUM_ROWS - QUESTION_LEN
    decoder.prefill(ids[:start], cache)
    policy.prepare(cache, DocumentRereader(decoder, ids[:start]))
    policy.start_turn(Turn(start, NUM_ROWS))
    logits = [decoder.extend(ids[start:NUM_ROWS], cache, policy)]
    if before_decode is not None:
        before_decode(cache)
    for position in range(NUM_ROWS, NUM_ROWS + num_steps):
        logits.append(decoder.decode(ids[position : position + 1], cache, policy, trace))
    return torch.stack(logits)


def _trace(decoder: Decoder) -> Trace:
    config = decoder.config
    return Trace(
        config.num_hidden_layers,
        config.num_key_value_heads,
        NUM_ROWS,
        device=decoder.device,
        keep_steps=True,
    )


@pytest.mark.parametrize("name", POLICIES)
def test_a_budget_of_all_rows_gives_dense_logits(decoder: Decoder, ids: Tensor, name: str) -> None:
    dense = _ask(decoder, ids, Dense())
    for budget in (NUM_ROWS, NUM_ROWS + 1000):
        torch.testing.assert_close(_ask(decoder, ids, _make(name, budget)), dense)


@pytest.mark.parametrize("name", POLICIES)
def test_a_policy_that_is_prepared_again_begins_anew(
    decoder: Decoder, ids: Tensor, name: str
) -> None:
    """Nothing of one document may choose rows of the next, be it on another device."""
    policy, other_ids = _make(name, 30), ids.flip(0)
    _ask(decoder, ids, policy)
    found = _ask(decoder, other_ids, policy)
    torch.testing.assert_close(found, _ask(decoder, other_ids, _make(name, 30)))


@pytest.mark.parametrize(
    "policies",
    (
        *("pyramidkv:beta=1", "pyramidkv:beta=1e6:window_size=0:sink_size=0", "quest:block_len=1"),
        *("snapkv:kernel_size=1:observe_size=1", "snapkv:kernel_size=1023:pooling=avg"),
        *("quest:block_len=4096", "razor:period=2:repeats=2", "razor:period=9999:repeats=64"),
        *("razor:echo_share=0:induction_share=0", "razor:echo_share=1", "xkv:value_ratio=1e6"),
        *("xkv:value_ratio=1e-9:group_size=1", "tokenselect:vote=threshold:min_votes=999"),
        *("h2o:window_size=0", "streaming:sink_size=2147483647", "tokenselect:sink_size=999"),
    ),
)
def test_fields_at_their_limits_answer(decoder: Decoder, ids: Tensor, policies: str) -> None:
    (variant,) = parse_variants(policies, "5%", Settings(window_size=16))
    assert _ask(decoder, ids, variant.make(NUM_ROWS), num_steps=2).isfinite().all()


@pytest.mark.parametrize("name", POLICIES)
def test_every_policy_can_be_prepared_on_a_cache_that_a_decode_step_grew(
    decoder: Decoder, ids: Tensor, name: str
) -> None:
    """As a chat that outgrows its cache and then goes on under this policy, old or new."""
    cache, before = decoder.new_cache(100), _make(name, 30, window_size=16)
    rereader = DocumentRereader(decoder, ids[:80])
    decoder.prefill(ids[:80], cache)
    before.prepare(cache, rereader)
    before.start_turn(Turn(80, 100))
    decoder.extend(ids[80:100], cache, before)
    decoder.decode(ids[100:101], cache, before)
    assert cache.capacity > 101
    rows = cache.k[:, :, :101].clone(), cache.v[:, :, :101].clone()
    for policy in (_make(name, 30, window_size=16), before):
        cache.truncate(101)
        policy.prepare(cache, rereader)
        assert torch.equal(cache.k[:, :, :101], rows[0])
        assert torch.equal(cache.v[:, :, :101], rows[1])
        policy.start_turn(Turn(101, 120))
        decoder.extend(ids[101:120], cache, policy)
        assert decoder.decode(ids[120:121], cache, policy).isfinite().all()


@pytest.mark.parametrize("index", INDEX_NAMES)
@pytest.mark.parametrize("vote", VOTES)
def test_all_rows_but_one_are_gathered_and_come_close_to_dense(
    decoder: Decoder, ids: Tensor, vote: str, index: str
) -> None:
    """The gathering path itself: one row of 400 is missing, so the logits barely move."""
    budget = NUM_ROWS - 4 - 16 - QUESTION_LEN
    policy = TokenSelect(budget=budget, vote=vote, index=index, window_size=16)
    trace = _trace(decoder)
    found = _ask(decoder, ids, policy, trace=trace, num_steps=2)
    assert trace.steps[0][0] is not None, "the gathering path was not taken"
    dense = _ask(decoder, ids, Dense(), num_steps=2)
    assert float((found - dense).pow(2).mean().sqrt() / dense.pow(2).mean().sqrt()) < 0.05


@pytest.mark.parametrize("vote", VOTES)
def test_rows_that_are_not_selected_are_never_read(
    decoder: Decoder, ids: Tensor, vote: str
) -> None:
    def make() -> TokenSelect:
        return TokenSelect(budget=30, vote=vote, index_dim=4, window_size=16)

    trace = _trace(decoder)
    expected = _ask(decoder, ids, make(), trace=trace)
    assert torch.isfinite(expected).all()

    def poison(cache: KVCache) -> None:
        for layer_idx in range(cache.num_layers):
            for head in range(cache.k.shape[1]):
                read: set[int] = set()
                for step in trace.steps:
                    indices = step[layer_idx]
                    assert indices is not None
                    per_head = indices.chunk(cache.k.shape[1]) if len(indices) > 1 else [indices]
                    read |= set(per_head[head % len(per_head)].flatten().tolist())
                unread = [row for row in range(NUM_ROWS) if row not in read]
                assert len(unread) > NUM_ROWS // 4
                cache.k[layer_idx, head, unread] = torch.nan
                cache.v[layer_idx, head, unread] = torch.nan

    torch.testing.assert_close(_ask(decoder, ids, make(), before_decode=poison), expected)


def test_two_kv_heads_of_one_layer_choose_different_rows(decoder: Decoder, ids: Tensor) -> None:
    trace = _trace(decoder)
    _ask(decoder, ids, TokenSelect(budget=30, window_size=16), trace=trace)
    indices = trace.steps[0][1]
    assert indices is not None and indices.shape[0] == 2
    first, second = (set(rows.tolist()) for rows in indices)
    assert len(first) == len(second) and len(first - second) >= 3


def test_sinks_window_and_question_are_always_kept(decoder: Decoder, ids: Tensor) -> None:
    trace = _trace(decoder)
    policy = TokenSelect(budget=10, sink_size=3, window_size=5)
    _ask(decoder, ids, policy, trace=trace)
    for step_idx, step in enumerate(trace.steps):
        num_rows = NUM_ROWS + step_idx + 1
        kept = {*range(3), *range(NUM_ROWS - QUESTION_LEN, NUM_ROWS)}
        kept |= set(range(num_rows - 5, num_rows))
        for indices in step:
            assert indices is not None
            for rows in indices.tolist():
                assert kept <= set(rows)
                assert len(rows) == len(set(rows)) == len(kept) + 10


def test_a_row_that_falls_out_of_the_window_competes_for_the_budget(
    decoder: Decoder, ids: Tensor
) -> None:
    trace = _trace(decoder)
    _ask(decoder, ids, TokenSelect(budget=10, window_size=1), trace=trace, num_steps=30)
    last = trace.steps[-1][0]
    assert last is not None
    answer_rows = set(range(NUM_ROWS, NUM_ROWS + 29))
    assert not all(answer_rows <= set(rows) for rows in last.tolist())


def test_the_trace_counts_mass_and_rows(decoder: Decoder, ids: Tensor) -> None:
    config = decoder.config
    for policy in (Dense(), TokenSelect(budget=30, window_size=16)):
        trace = _trace(decoder)
        _ask(decoder, ids, policy, trace=trace)
        assert trace.num_steps == 8
        # Each head gives a mass of 1 a step; what fell on later rows is not counted.
        group_size = config.num_attention_heads // config.num_key_value_heads
        total = trace.mass.sum(dim=-1)
        assert (total <= 8 * group_size + 1e-3).all() and (total > 4 * group_size).all()
        rows = 30 + 4 + QUESTION_LEN + 16 - 8  # the window overlaps the question at first
        kept = trace.fraction_kept
        assert kept == 1.0 if isinstance(policy, Dense) else 0.9 < kept * NUM_ROWS / rows < 1.2
        if not isinstance(policy, Dense):
            inside = sum(
                int((indices < NUM_ROWS).sum())
                for step in trace.steps
                for indices in step  # type: ignore[operator]
            )
            assert int(trace.selected.sum()) == inside * group_size


def test_mass_kept_grows_with_the_budget_and_reaches_one(decoder: Decoder, ids: Tensor) -> None:
    kept = []
    for budget in (1, 20, 100, len(ids)):
        policy = TokenSelect(budget=budget, window_size=8)
        kept.append(measure(decoder, ids, lambda _, policy=policy: policy).mass_kept)
    assert kept == sorted(kept) and kept[0] < 0.9 and abs(kept[-1] - 1.0) < 1e-6


class _NoScalars(TorchDispatchMode):
    """Fails where a tensor's value is asked for, be it by `.item()` or by a branch."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        assert func is not torch.ops.aten._local_scalar_dense.default, "a tensor's value was read"
        return func(*args, **(kwargs or {}))


def _two_turns(
    decoder: Decoder,
    ids: Tensor,
    policy: Policy,
    between: Callable[[KVCache, Trace], None] | None = None,
) -> tuple[Tensor, Trace, Trace]:
    """Logits of a second question and its answer, and the traces of both turns."""
    cache, traces, logits = decoder.new_cache(NUM_ROWS), (_trace(decoder), _trace(decoder)), []
    decoder.prefill(ids[:300], cache)
    policy.prepare(cache, DocumentRereader(decoder, ids[:300]))
    for turn, trace in enumerate(traces):
        if turn == 1 and between is not None:
            between(cache, traces[0])
        start, end = cache.length, cache.length + QUESTION_LEN
        policy.start_turn(Turn(start, end))
        logits = [decoder.extend(ids[start:end], cache, policy, trace)]
        for position in range(end, end + 4):
            logits.append(decoder.decode(ids[position : position + 1], cache, policy, trace))
    return torch.stack(logits), *traces


def _read_in(step: list[Tensor | None], layer_idx: int, head: int, num_heads: int) -> set[int]:
    """The rows that one KV head of a layer read in a step of a trace."""
    indices = step[layer_idx]
    assert indices is not None, "everything was read"
    return set(indices[head * len(indices) // num_heads].tolist()) - {-1}


@pytest.mark.parametrize("name", SELECTING)
def test_evicted_rows_are_gone_for_the_next_turn_and_others_are_not(
    decoder: Decoder, ids: Tensor, name: str
) -> None:
    num_heads = decoder.config.num_key_value_heads

    def dropped(trace: Trace, layer_idx: int, head: int) -> set[int]:
        return set(range(300)) - _read_in(trace.steps[-1], layer_idx, head, num_heads)

    def poison(cache: KVCache, trace: Trace) -> None:
        for layer_idx in range(cache.num_layers):
            for head in range(num_heads):
                rows = sorted(dropped(trace, layer_idx, head))
                cache.k[layer_idx, head, rows] = torch.nan
                cache.v[layer_idx, head, rows] = torch.nan

    logits, first, second = _two_turns(decoder, ids, _make(name, 30, 16))
    num_dropped, back = 0, set[int]()
    for layer_idx in range(decoder.config.num_hidden_layers):
        for head in range(num_heads):
            gone = dropped(first, layer_idx, head)
            num_dropped += len(gone)
            for step in second.steps:
                back |= gone & _read_in(step, layer_idx, head, num_heads)
    assert num_dropped > 300 and torch.isfinite(logits).all()
    if not POLICIES[name].evicts:
        assert back
        return
    assert not back
    poisoned, _, second = _two_turns(decoder, ids, _make(name, 30, 16), between=poison)
    torch.testing.assert_close(poisoned, logits)  # the second question did not read them either
    assert torch.isfinite(second.mass).all()


@pytest.mark.parametrize("name", POLICIES)
def test_undone_turns_leave_no_trace_in_what_is_left(
    decoder: Decoder, ids: Tensor, name: str
) -> None:
    """After an undo the rows of the turn are written anew: none may be named twice, or too many."""
    policy, cache = _make(name, 30, 16), decoder.new_cache(NUM_ROWS)
    decoder.prefill(ids[:300], cache)
    policy.prepare(cache, DocumentRereader(decoder, ids[:300]))
    for question_len in (20, 3, 40):
        cache.truncate(300)
        start, end = 300, 300 + question_len
        policy.start_turn(Turn(start, end))
        decoder.extend(ids[start:end], cache, policy)
        trace = _trace(decoder)
        for position in range(end, end + 4):
            decoder.decode(ids[position : position + 1], cache, policy, trace)
            for indices in trace.steps[-1]:
                for rows in [] if indices is None else indices.tolist():
                    named = [row for row in rows if row >= 0]
                    assert len(named) == len(set(named))
                    assert {*range(max(start, position - 15), position)} <= {*named}
                    assert max(named) == position


@pytest.mark.parametrize("name", POLICIES)
def test_an_answer_without_tokens_is_followed_by_another_turn(
    decoder: Decoder, ids: Tensor, name: str
) -> None:
    policy, cache = _make(name, 30, 16), decoder.new_cache(NUM_ROWS)
    decoder.prefill(ids[:300], cache)
    policy.prepare(cache, DocumentRereader(decoder, ids[:300]))
    for start in (300, 310):
        policy.start_turn(Turn(start, start + 10))
        decoder.extend(ids[start : start + 10], cache, policy)
    trace = _trace(decoder)
    assert torch.isfinite(decoder.decode(ids[:1], cache, policy, trace)).all()
    assert (policy.left(0, 320) is not None) == policy.evicts


@pytest.mark.parametrize("name", ["dense", *SELECTING])
def test_each_policy_keeps_more_mass_with_a_larger_budget(
    decoder: Decoder, ids: Tensor, name: str
) -> None:
    kept = [
        measure(decoder, ids, lambda _, rows=rows: _make(name, rows, 16))
        for rows in (10, 150, 1000)
    ]
    masses = [figures.mass_kept for figures in kept]
    assert masses == sorted(masses) and abs(masses[-1] - 1.0) < 1e-6
    assert name == "dense" or (masses[0] < 0.95 and kept[0].fraction_kept < 0.5)


@pytest.mark.parametrize(
    "policy",
    [
        *(_make(name, 30, 16) for name in POLICIES),
        *(TokenSelect(budget=30, vote=vote, window_size=16) for vote in VOTES),
    ],
    ids=repr,
)
def test_the_decode_path_never_waits_for_a_tensor(
    decoder: Decoder, ids: Tensor, policy: Policy
) -> None:
    cache = decoder.new_cache(NUM_ROWS)
    documents = ids[: NUM_ROWS - QUESTION_LEN]
    decoder.prefill(documents, cache)
    policy.prepare(cache, DocumentRereader(decoder, documents))
    policy.start_turn(Turn(NUM_ROWS - QUESTION_LEN, NUM_ROWS))
    decoder.extend(ids[NUM_ROWS - QUESTION_LEN : NUM_ROWS], cache, policy)
    trace = _trace(decoder)
    with _NoScalars():
        decoder.decode(ids[:1], cache, policy, trace)
        with pytest.raises(AssertionError, match="a tensor's value was read"):
            bool(ids[0] > 0)
    assert trace.num_steps == 1


@pytest.mark.weights
@pytest.mark.parametrize(("index", "least"), (("exact", 0.980), ("int8", 0.979), ("fp8", 0.979)))
def test_20_percent_keeps_the_attention_of_smollm2(
    smollm2_dir: Path, index: str, least: float
) -> None:
    from longread.tokenizer import Tokenizer

    text = Path(__file__).parent.parent.joinpath("sample_docs/us_constitution.txt").read_text()
    token_ids = torch.tensor(Tokenizer.load(smollm2_dir).encode(text)[:4096])
    smollm2 = Decoder.load(smollm2_dir, "cpu", "bfloat16")
    kept = measure(smollm2, token_ids, lambda rows: TokenSelect(budget=rows // 5, index=index))
    assert kept.mass_kept >= least


@pytest.mark.parametrize("vote", ("group", "all"))
def test_rows_of_the_last_turn_are_not_read_again(decoder: Decoder, ids: Tensor, vote: str) -> None:
    """After an undo there may be fewer rows than the last turn chose from."""
    policy = TokenSelect(budget=30, window_size=8, vote=vote, reselect=50)
    cache = decoder.new_cache(NUM_ROWS)
    decoder.prefill(ids[:100], cache)
    policy.prepare(cache)
    policy.start_turn(Turn(100, 300))
    decoder.extend(ids[100:300], cache, policy)
    decoder.decode(ids[300:301], cache, policy)
    cache.truncate(100)
    policy.start_turn(Turn(100, 110))
    decoder.extend(ids[100:110], cache, policy)
    trace = _trace(decoder)
    decoder.decode(ids[110:111], cache, policy, trace)
    rows = trace.steps[0][0]
    assert rows is not None
    for chosen in rows.tolist():
        assert len(set(chosen)) == len(chosen) and max(chosen) == 110


@pytest.mark.parametrize("reselect", (1, 2, 3))
def test_rows_are_chosen_anew_every_so_many_steps(
    decoder: Decoder, ids: Tensor, reselect: int
) -> None:
    policy = TokenSelect(budget=30, window_size=8, reselect=reselect)
    trace = _trace(decoder)
    _ask(decoder, ids, policy, trace=trace, num_steps=6)
    num_kept = 4 + 8 + QUESTION_LEN
    for step in range(1, 6):
        before, now = trace.steps[step - 1][1], trace.steps[step][1]
        assert before is not None and now is not None
        same = torch.equal(before[:, -30:], now[:, -30:])
        assert same == (step % reselect != 0), f"step {step} of rows [2, {num_kept + 30}]"
