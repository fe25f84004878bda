"""Reading past the model's window: contiguous positions, chosen rows, a session that does so."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import inline_reader  # noqa: F401
import pytest
import tiny
import torch
from last_event import last_event
from torch import Tensor

from longread import context, past_window
from longread.config import Settings
from longread.errors import ContextError, UsageError
from longread.events import Answer, Opened
from longread.model import Decoder
from longread.past_window import Reading
from longread.policies import Dense, TokenSelect, Turn
from longread.session import Session
from longread.trace import Trace
from longread.weights import load_config, load_weights

SINKS, CHOSEN, LOCAL, CHUNK = 4, 12, 8, 16
# Few rows, so that a short document is already past what is read at once.
NARROW = Reading(SINKS, LOCAL, CHOSEN, CHUNK, num_voters=2, question_voters=4, passage_len=3)
NUM_ROWS = 150
CONSTITUTION = Path(__file__).parent.parent / "sample_docs" / "us_constitution.txt"


@pytest.fixture(scope="module", params=("qwen2", "qwen3"))
def converted(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("past")
    return tiny.convert(tiny.save_hf_folder(root / "hf", request.param), root / "models")


def _decoder(converted: Path, past: Reading | None) -> Decoder:
    weights = load_weights(converted, device="cpu", dtype=torch.float32)
    config = load_config(converted)
    return Decoder(config, weights, torch.device("cpu"), torch.float32, past_window=past)


@pytest.fixture
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(context, "Reading", lambda: NARROW)


def _ids(decoder: Decoder) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    return torch.randint(0, decoder.config.vocab_size, (NUM_ROWS + 30,), generator=generator)


@torch.inference_mode()
def _logits(decoder: Decoder, policy: TokenSelect | Dense, trace: Trace | None = None) -> Tensor:
    """Of the question's last token and of two tokens of an answer."""
    ids, cache = _ids(decoder), decoder.new_cache(NUM_ROWS + 30)
    cache.k.fill_(torch.nan)
    cache.v.fill_(torch.nan)
    decoder.prefill(ids[:NUM_ROWS], cache)
    policy.prepare(cache)
    policy.start_turn(Turn(NUM_ROWS, NUM_ROWS + 10))
    logits = [decoder.extend(ids[NUM_ROWS : NUM_ROWS + 10], cache, policy, trace)]
    for row in (NUM_ROWS + 10, NUM_ROWS + 11):
        logits.append(decoder.decode(ids[row : row + 1], cache, policy, trace))
    return torch.stack(logits)


@pytest.mark.parametrize("policy", (Dense(), TokenSelect(budget=NUM_ROWS)), ids=str)
def test_what_can_be_read_at_once_is_read_as_within_the_window(
    converted: Path, policy: TokenSelect | Dense
) -> None:
    """All rows have the positions that they stand at, turned later and not before."""
    near, far = _decoder(converted, None), _decoder(converted, Reading())
    torch.testing.assert_close(_logits(far, policy), _logits(near, policy), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    "family, rope",
    (
        ("llama", {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}),
        ("mistral", {"rope_type": "yarn"}),
        ("qwen3", {"rope_type": "linear"}),
        ("llama", {"rope_type": "dynamic"}),
    ),
    ids=lambda value: value["rope_type"] if isinstance(value, dict) else value,
)
def test_each_family_and_kind_of_rope_is_read_by_selection(
    tmp_path: Path, family: str, rope: dict[str, object]
) -> None:
    rope |= {"rope_theta": 1e4, "factor": 2.0, "original_max_position_embeddings": 64}
    folder = tiny.save_hf_folder(tmp_path / "hf", family, rope_parameters=rope)
    converted = tiny.convert(folder, tmp_path / "models")
    near, far = _decoder(converted, None), _decoder(converted, Reading())
    policy = TokenSelect(budget=NUM_ROWS)
    torch.testing.assert_close(_logits(far, policy), _logits(near, policy), rtol=1e-3, atol=1e-3)


def test_no_distance_is_longer_than_what_is_read_at_once(
    converted: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder = _decoder(converted, NARROW)
    ends = []
    real = decoder.network.rope_rows

    def rope_rows(start: int, end: int) -> tuple[Tensor, Tensor]:
        ends.append(end)
        return real(start, end)

    monkeypatch.setattr(decoder.network, "rope_rows", rope_rows)
    policy = TokenSelect(budget=20, sink_size=2, window_size=5)
    assert _logits(decoder, policy).isfinite().all()
    assert max(ends) <= max(SINKS + CHOSEN + LOCAL + CHUNK, 20 + 2 + 5 + 10)


@pytest.mark.parametrize(
    "reading, policy, num_voters",
    (
        (NARROW, None, 2),
        (replace(NARROW, outer_norm=True), None, 2),
        (replace(NARROW, vote="group", passage_len=1), None, 2),
        (NARROW, Dense(), 4),
    ),
    ids=("chunk", "outer norm", "group", "question"),
)
@torch.inference_mode()
def test_a_chunk_attends_to_the_rows_that_its_queries_vote_for(
    converted: Path, reading: Reading, policy: Dense | None, num_voters: int
) -> None:
    decoder = _decoder(converted, reading)
    attention = past_window.SelectedAttention(decoder.network, reading)
    ids, cache = _ids(decoder), decoder.new_cache(NUM_ROWS)
    decoder.prefill(ids[:NUM_ROWS], cache)
    start, head_dim, num_kv_heads = 128, decoder.config.head_dim, 2
    generator = torch.Generator().manual_seed(5)
    q = torch.randn(CHUNK, 6, head_dim, generator=generator)
    found = attention.read(q, cache, 1, start, policy, None).view(CHUNK, 6, head_dim)

    def turned(x: Tensor, position: int) -> Tensor:
        cos, sin = decoder.network.rope_rows(position, position + 1)
        low, high = x.chunk(2)
        return torch.cat((low * cos[0] - high * sin[0], high * cos[0] + low * sin[0]))

    expected = torch.empty_like(found)
    votes = torch.zeros(3 * num_kv_heads, start - SINKS - LOCAL)
    for head in range(3 * num_kv_heads):
        for part in q.split(CHUNK // num_voters):
            scored = [turned(one, LOCAL) for one in part[:, head]]
            mean = torch.stack(scored).mean(dim=0)
            scores = cache.k[1, head // 3, :start] @ mean * head_dim**-0.5
            voted, outer = scores[SINKS:-LOCAL], (scores[:SINKS], scores[-LOCAL:])
            norm = torch.logsumexp(torch.cat(outer) if reading.outer_norm else voted, dim=0)
            votes[head] += torch.exp(voted - norm)
    for kv_head in range(num_kv_heads):
        own = slice(3 * kv_head, 3 * kv_head + 3) if reading.vote == "group" else slice(None)
        best = votes[own].sum(dim=0)
        if reading.passage_len == 3:
            padded = torch.nn.functional.pad(best, (1, 1), value=-1.0)
            best = torch.stack((padded[:-2], best, padded[2:])).amax(dim=0)
        chosen = sorted((SINKS + best.topk(CHOSEN).indices).tolist())
        rows = [*range(SINKS), *chosen, *range(start - LOCAL, start + CHUNK)]
        k, v = cache.k[1, kv_head], cache.v[1, kv_head]
        keys = torch.stack([turned(k[row], place) for place, row in enumerate(rows)])
        num_earlier = len(rows) - CHUNK
        for token in range(CHUNK):
            seen = num_earlier + token + 1
            for head in range(3 * kv_head, 3 * kv_head + 3):
                query = turned(q[token, head], seen - 1)
                probs = torch.softmax(keys[:seen] @ query * head_dim**-0.5, dim=0)
                expected[token, head] = probs @ v[rows[:seen]]
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)


def test_the_trace_names_rows_of_the_document(converted: Path) -> None:
    decoder = _decoder(converted, NARROW)
    config = decoder.config
    trace = Trace(
        config.num_hidden_layers,
        config.num_key_value_heads,
        NUM_ROWS,
        device=decoder.device,
        keep_steps=True,
    )
    _logits(decoder, TokenSelect(budget=20, sink_size=2, window_size=5), trace)
    assert trace.num_steps == 2 and 0.1 < trace.fraction_kept < 0.4
    for layers in trace.steps:
        for rows in layers:
            assert rows is not None and rows.shape[0] == 2
            for head_rows in rows.tolist():
                there = [row for row in head_rows if row >= 0]
                assert there == sorted(set(there)) and set(range(2)) <= set(there)
    per_head = trace.mass.sum(dim=-1)  # of three query heads, at the question's end and two steps
    assert (per_head > 0).all() and (per_head <= 9.001).all()


@torch.inference_mode()
def test_reading_goes_on_where_it_was_left(converted: Path) -> None:
    decoder = _decoder(converted, NARROW)
    ids = _ids(decoder)[:NUM_ROWS]
    whole, parts = decoder.new_cache(NUM_ROWS), decoder.new_cache(NUM_ROWS)
    decoder.prefill(ids, whole)
    for part in ids.split(3 * CHUNK):
        decoder.prefill(part, parts)
    torch.testing.assert_close(parts.k, whole.k)
    torch.testing.assert_close(parts.v, whole.v)


def test_sizes_fit_the_window_of_a_small_model() -> None:
    assert Reading().fitting(32_768) == Reading()
    small = Reading().fitting(1024)
    assert (small.sink_size, small.window_size, small.budget, small.chunk_tokens) == (
        *(32, 128, 512, 128),
    )
    assert Reading().fitting(4).num_positions == 4
    assert replace(Reading(), budget=4096, vote="group").label == ":budget=4096:vote=group"
    assert Reading().label == ""


@pytest.fixture
def long_settings(converted: Path, settings: Settings, tmp_path: Path) -> Settings:
    """A model whose window the Constitution passes by far."""
    return replace(settings, model=str(converted), max_tokens=20, budget="60", window_size=32)


@pytest.mark.usefixtures("narrow")
def test_a_session_reads_on_by_selection_and_says_so(long_settings: Settings) -> None:
    notices: list[str] = []
    session = Session(long_settings)
    opened = last_event(session.open([str(CONSTITUTION)]), notices)
    assert isinstance(opened, Opened) and opened.cache.tokens_prefilled > tiny.WINDOW
    assert any("are read by selection" in text and "1,024" in text for text in notices)
    answers = []
    for _ in range(2):
        answer = last_event(session.ask("When was Amendment XXVII ratified?"))
        assert isinstance(answer, Answer) and 0 < answer.selection.fraction_kept < 0.1
        answers.append(answer.text)
    again = Session(long_settings)
    reopened = last_event(again.open([str(CONSTITUTION)]))
    assert isinstance(reopened, Opened) and reopened.cache.hit
    answer = last_event(again.ask("When was Amendment XXVII ratified?"))
    assert isinstance(answer, Answer) and answer.text == answers[0]


@pytest.mark.usefixtures("narrow")
def test_how_documents_are_read_is_part_of_the_entry(
    long_settings: Settings, tmp_path: Path
) -> None:
    short = tmp_path / "short.txt"
    short.write_text(CONSTITUTION.read_text()[:1000])
    for way in ("dense", "select"):
        opened = last_event(Session(replace(long_settings, context=way)).open([str(short)]))
        assert isinstance(opened, Opened) and not opened.cache.hit


def test_what_cannot_go_on_past_the_window_is_refused(long_settings: Settings) -> None:
    def open_with(**changes: str) -> None:
        last_event(Session(replace(long_settings, **changes)).open([str(CONSTITUTION)]))  # type: ignore[arg-type]

    with pytest.raises(ContextError, match="the window of .* is 1,024"):
        open_with(context="dense")
    with pytest.raises(ContextError, match="--policy tokenselect"):
        open_with(policy="dense")
    with pytest.raises(UsageError, match="leave one of the two out"):
        open_with(policy="snapkv", context="select")
    with pytest.raises(UsageError, match="give a smaller budget than 900"):
        open_with(budget="900")
    with pytest.raises(UsageError, match="give a smaller budget than 100%"):
        open_with(budget="100%")


@pytest.mark.usefixtures("narrow")
def test_what_another_document_begins_with_is_read_as_a_whole(
    long_settings: Settings, tmp_path: Path
) -> None:
    """Its prefix ends inside a chunk: the rows are those of a reading without it."""
    text = CONSTITUTION.read_text(encoding="utf-8")[:1500]
    first, second = (tmp_path / name / "book.txt" for name in ("first", "second"))
    for path in (first, second):
        path.parent.mkdir()
    first.write_text(text[:1003] + " But here the first one ends otherwise.", encoding="utf-8")
    second.write_text(text, encoding="utf-8")
    fresh = replace(long_settings, no_cache=True, context="select")
    alone, after = Session(fresh), Session(replace(long_settings, context="select"))
    last_event(alone.open([str(second)]))
    last_event(after.open([str(first)]))
    after.close()
    after = Session(replace(long_settings, context="select"))
    opened = last_event(after.open([str(second)]))
    assert isinstance(opened, Opened)
    assert opened.cache.tokens_reused > CHUNK and opened.cache.tokens_reused % CHUNK == 0
    whole, joined = alone._cache, after._cache
    assert joined.length == whole.length
    torch.testing.assert_close(joined.k[:, :, : whole.length], whole.k[:, :, : whole.length])
