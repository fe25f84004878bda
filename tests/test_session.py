"""A session end to end on a tiny random model: reuse, turns, undo, limits, interruption."""

from __future__ import annotations

import io
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from filelock import FileLock
from last_event import last_event

from longread.config import Settings
from longread.document import document_text
from longread.errors import ContextError, ModelError, StoreError, UsageError
from longread.events import Answer, Notice, Opened, Progress, Text
from longread.manifest import BLOCK_LEN
from longread.model import Decoder
from longread.session import Session

CONSTITUTION = Path(__file__).parent.parent / "sample_docs/us_constitution.txt"


@pytest.fixture
def document(tmp_path: Path) -> Path:
    path = tmp_path / "document.txt"
    path.write_text(CONSTITUTION.read_text()[:2000])
    return path


def _open(session: Session, *sources: Path, pages: str | None = None) -> Opened:
    opened = last_event(session.open([str(source) for source in sources], pages=pages))
    assert isinstance(opened, Opened)
    return opened


def _ask(session: Session, question: str = "Who makes laws?") -> Answer:
    answer = last_event(session.ask(question))
    assert isinstance(answer, Answer)
    return answer


def test_the_second_open_reuses_every_token_and_gives_the_same_answer(
    settings: Settings, document: Path
) -> None:
    first = Session(settings)
    opened = _open(first, document)
    assert not opened.cache.hit and opened.cache.tokens_reused == 0
    num_tokens = opened.cache.tokens_prefilled
    assert num_tokens > opened.documents[0].num_tokens > 500
    second = Session(settings)
    events = list(second.open([str(document)]))
    again = events[-1]
    assert isinstance(again, Opened)
    assert again.cache.hit and again.cache.tokens_prefilled == 0
    assert again.cache.tokens_reused == num_tokens and again.cache.store_bytes > 0
    assert not [event for event in events if isinstance(event, Progress) and event.stage == "read"]
    assert _ask(second).text == _ask(first).text


def test_progress_of_a_first_open_names_its_stages_in_order(
    settings: Settings, document: Path
) -> None:
    events = list(Session(settings).open([str(document)]))
    stages = [event.stage for event in events if isinstance(event, Progress)]
    assert stages.index("read") < stages.index("prefill")
    prefill = [
        event for event in events if isinstance(event, Progress) and event.stage == "prefill"
    ]
    assert prefill[-1].done == prefill[-1].total
    assert [event.done for event in prefill] == sorted(event.done for event in prefill)


def test_a_renamed_document_is_a_hit(settings: Settings, document: Path) -> None:
    _open(Session(settings), document)
    renamed = document.rename(document.with_name("other.txt"))
    opened = _open(Session(settings), renamed)
    assert opened.cache.hit and opened.documents[0].name == "other.txt"


def test_an_appended_document_prefills_only_its_tail(
    settings: Settings, document: Path, tmp_path: Path
) -> None:
    alone = _open(Session(settings), document).cache.tokens_prefilled
    second = tmp_path / "second.txt"
    second.write_text(CONSTITUTION.read_text()[20000:21000])
    both = Session(settings)
    opened = _open(both, document, second)
    assert opened.cache.tokens_reused == alone
    assert 0 < opened.cache.tokens_prefilled < opened.documents[1].num_tokens + 20
    fresh = Session(replace(settings, no_cache=True))
    _open(fresh, document, second)
    num_rows = len(both._prompt.token_ids)
    for found, expected in ((both._cache.k, fresh._cache.k), (both._cache.v, fresh._cache.v)):
        torch.testing.assert_close(
            found[:, :, :num_rows], expected[:, :, :num_rows], rtol=1e-3, atol=1e-3
        )


def test_a_document_that_grew_prefills_only_what_is_new(settings: Settings, document: Path) -> None:
    before = _open(Session(settings), document)
    document.write_text(document.read_text() + CONSTITUTION.read_text()[2000:2600])
    after = _open(Session(settings), document)
    assert after.cache.tokens_reused >= before.cache.tokens_prefilled - 3
    assert after.cache.tokens_prefilled < 400


@pytest.mark.parametrize(
    "change",
    (
        {"kv_dtype": "int8"},
        {"dtype": "bfloat16"},
    ),
)
def test_what_changes_the_kv_is_not_a_hit(
    settings: Settings, document: Path, change: dict[str, str]
) -> None:
    _open(Session(settings), document)
    opened = _open(Session(replace(settings, **change)), document)  # type: ignore[arg-type]
    assert opened.cache.tokens_reused == 0


def test_what_does_not_change_the_kv_is_a_hit(settings: Settings, document: Path) -> None:
    _open(Session(settings), document)
    changed = replace(settings, policy="dense", budget="3", seed=5, temperature=1.0)
    assert _open(Session(changed), document).cache.hit


def test_int8_entries_are_smaller_and_answer_the_same_from_disk(
    settings: Settings, document: Path
) -> None:
    plain = _open(Session(replace(settings, dtype="bfloat16")), document)
    int8 = replace(settings, dtype="bfloat16", kv_dtype="int8")
    first, second = Session(int8), Session(int8)
    opened = _open(first, document)
    assert opened.cache.store_bytes < 0.75 * plain.cache.store_bytes
    assert _open(second, document).cache.hit
    assert _ask(first).text == _ask(second).text


def test_no_cache_leaves_nothing_on_disk(settings: Settings, document: Path) -> None:
    session = Session(replace(settings, no_cache=True))
    assert not _open(session, document).cache.hit
    assert _ask(session).usage.answer_tokens > 0
    assert not settings.cache_dir.exists()


def test_long_documents_are_stored_block_by_block(settings: Settings, tmp_path: Path) -> None:
    document = tmp_path / "long.txt"
    document.write_text(CONSTITUTION.read_text()[:26000])
    first = Session(settings)
    num_tokens = _open(first, document).cache.tokens_prefilled
    assert num_tokens > 2 * BLOCK_LEN
    second = Session(settings)
    assert _open(second, document).cache.hit
    assert _ask(first).text == _ask(second).text
    fresh = Session(replace(settings, no_cache=True))
    _open(fresh, document)
    assert _ask(fresh).text == first.turns[0].answer.text


def test_an_interrupted_prefill_goes_on_at_its_last_block(
    settings: Settings, tmp_path: Path
) -> None:
    document = tmp_path / "long.txt"
    document.write_text(CONSTITUTION.read_text()[:26000])
    events = Session(settings).open([str(document)])
    for event in events:
        if isinstance(event, Progress) and event.stage == "prefill" and event.done > BLOCK_LEN:
            break
    events.close()  # type: ignore[attr-defined]
    opened = _open(Session(settings), document)
    assert opened.cache.tokens_reused == BLOCK_LEN and not opened.cache.hit


def test_a_damaged_block_is_quarantined_and_made_again(settings: Settings, tmp_path: Path) -> None:
    document = tmp_path / "long.txt"
    document.write_text(CONSTITUTION.read_text()[:26000])
    first = Session(settings)
    num_tokens = _open(first, document).cache.tokens_prefilled
    blocks = sorted(settings.cache_dir.rglob("block-*.safetensors"))
    assert len(blocks) == -(-num_tokens // BLOCK_LEN)
    data = bytearray(blocks[1].read_bytes())
    data[-100] ^= 1
    blocks[1].write_bytes(data)
    second = Session(settings)
    events = list(second.open([str(document)]))
    notices = [event.message for event in events if isinstance(event, Notice)]
    assert len(notices) == 1 and "quarantined" in notices[0]
    opened = events[-1]
    assert isinstance(opened, Opened)
    assert opened.cache.tokens_prefilled == BLOCK_LEN  # the block behind it was kept
    assert _ask(second).text == _ask(first).text
    assert _open(Session(settings), document).cache.hit


def test_turns_build_on_each_other_and_undo_forgets(settings: Settings, document: Path) -> None:
    session = Session(settings)
    _open(session, document)
    first = _ask(session, "One?")
    second = _ask(session, "Two?")
    assert first.usage.history_tokens == 0
    assert second.usage.history_tokens >= first.usage.question_tokens
    assert [turn.question for turn in session.turns] == ["One?", "Two?"]
    assert session.undo()
    again = _ask(session, "Two?")
    assert again.text == second.text and again.usage == second.usage
    assert session.undo() and session.undo() and not session.undo()
    assert _ask(session, "One?").text == first.text


def test_restored_turns_continue_as_the_conversation_did(
    settings: Settings, document: Path
) -> None:
    session = Session(settings)
    _open(session, document)
    _ask(session, "One?")
    resumed = Session(settings)
    _open(resumed, document)
    list(resumed.restore(session.turns))
    assert resumed.turns == session.turns
    answer = _ask(resumed, "Two?")
    assert answer.usage.history_tokens > 0
    assert resumed.undo() and resumed.undo() and not resumed.undo()


def test_ctrl_c_ends_the_answer_and_keeps_what_was_said(settings: Settings, document: Path) -> None:
    session = Session(settings)
    _open(session, document)
    whole = _ask(session, "One?")
    session.undo()
    events = session.ask("One?")
    said = ""
    for event in events:
        assert isinstance(event, Text)
        said += event.text
        break
    answer = events.throw(KeyboardInterrupt())  # type: ignore[attr-defined]
    assert isinstance(answer, Answer) and answer.finish_reason == "interrupted"
    assert answer.text == said.strip() and whole.text.startswith(answer.text)
    assert len(session.turns) == 1
    assert _ask(session, "Two?").usage.history_tokens > 0


def test_a_question_that_nobody_waits_for_leaves_no_trace(
    settings: Settings, document: Path
) -> None:
    session = Session(settings)
    _open(session, document)
    events = session.ask("One?")
    next(iter(events))
    events.close()  # type: ignore[attr-defined]
    assert session.turns == [] and not session.undo()
    assert _ask(session, "Two?").usage.history_tokens == 0


def test_answers_stop_at_the_cap_and_say_so(settings: Settings, document: Path) -> None:
    session = Session(replace(settings, max_tokens=1))
    _open(session, document)
    answer = _ask(session)
    assert answer.finish_reason == "length" and answer.usage.answer_tokens == 1


def test_seeds_repeat_and_differ(settings: Settings, document: Path) -> None:
    def ask(seed: int) -> str:
        session = Session(replace(settings, temperature=1.5, top_p=0.95, seed=seed))
        _open(session, document)
        return _ask(session).text

    assert ask(1) == ask(1)
    assert len({ask(seed) for seed in range(4)}) > 1


def test_configure_changes_the_next_answer_only_as_asked(
    settings: Settings, document: Path
) -> None:
    session = Session(settings)
    _open(session, document)
    assert _ask(session).selection.policy == "tokenselect"
    session.configure(replace(settings, policy="dense"))
    answer = _ask(session)
    assert answer.selection.policy == "dense" and answer.selection.fraction_kept == 1.0
    with pytest.raises(UsageError):
        session.configure(replace(settings, index_dim=1000))
    assert _ask(session).selection.policy == "dense"


def test_the_budget_is_a_share_of_the_document(settings: Settings, document: Path) -> None:
    session = Session(replace(settings, budget="10%"))
    opened = _open(session, document)
    selection = _ask(session).selection
    assert selection.budget == -(-opened.cache.tokens_prefilled // 10)
    assert 0.1 < selection.fraction_kept < 0.25


def test_sources_quote_the_document(settings: Settings, document: Path) -> None:
    session = Session(settings)
    _open(session, document)
    answer = _ask(session)
    text = " ".join(document.read_text().split())
    assert answer.citations
    for citation in answer.citations:
        assert citation.quote in text and citation.document == "document.txt"
    assert abs(sum(answer.selection.strip) - 1.0) < 1e-6
    masses = [passage.mass for passage in answer.selection.passages]
    assert 0 < sum(masses) <= 1.0 + 1e-6
    shown = [(passage.page, passage.text) for passage in answer.selection.passages]
    cited = [(citation.page, citation.quote) for citation in answer.citations]
    assert cited == shown[: len(cited)]
    for passage in answer.selection.passages:
        for start, end in passage.marks:
            assert passage.text[start:end].strip() == passage.text[start:end] != ""
    shares = torch.tensor(answer.selection.heads)
    assert shares.shape == session.trace.mass.shape[:2]
    assert ((shares > 0) & (shares <= 1)).all()


def test_too_long_documents_are_refused_with_the_numbers(
    settings: Settings, tmp_path: Path
) -> None:
    document = tmp_path / "long.txt"
    document.write_text(CONSTITUTION.read_text() * 2)
    settings = replace(settings, context="dense")
    with pytest.raises(ContextError) as caught:
        _open(Session(settings), document)
    message = str(caught.value)
    assert "16,384" in message and "long.txt" in message and "--pages 1-" in message
    assert not list(settings.cache_dir.rglob("block-*"))
    pages = message.split("--pages ")[1].split(",")[0]
    assert _open(Session(settings), document, pages=pages).cache.tokens_prefilled > 10000


def test_truncate_cuts_the_end_and_is_recorded(settings: Settings, tmp_path: Path) -> None:
    document = tmp_path / "long.txt"
    document.write_text(CONSTITUTION.read_text() * 2)
    session = Session(replace(settings, truncate=True, no_cache=True))
    opened = _open(session, document)
    assert opened.cache.tokens_prefilled == 16384 - 256 - settings.max_tokens
    assert _ask(session).truncated
    short = tmp_path / "short.txt"
    short.write_text("A few words.")
    fits = Session(replace(settings, truncate=True))
    _open(fits, short)
    assert not _ask(fits).truncated


def test_a_full_window_is_a_context_error_that_changes_nothing(
    settings: Settings, document: Path
) -> None:
    session = Session(settings)
    _open(session, document)
    with pytest.raises(ContextError, match="16,384"):
        _ask(session, "why? " * 8000)
    assert _ask(session).usage.history_tokens == 0


@pytest.mark.parametrize("question", ("", "  \n "))
def test_an_empty_question_is_a_usage_error(
    settings: Settings, document: Path, question: str
) -> None:
    session = Session(settings)
    _open(session, document)
    with pytest.raises(UsageError):
        _ask(session, question)


def test_stdin_is_a_document(settings: Settings) -> None:
    session = Session(settings)
    stdin = io.BytesIO(b"The cat sat on the mat. " * 20)
    opened = last_event(session.open(["-"], stdin=stdin))
    assert isinstance(opened, Opened) and opened.cache.tokens_prefilled > 50


def test_an_entry_that_another_process_holds_is_waited_for_visibly_or_not_at_all(
    settings: Settings, document: Path
) -> None:
    key = _open(Session(settings), document).cache.key
    (lock_path,) = (path for path in settings.cache_dir.rglob("*.lock") if path.stem == key)
    other = FileLock(lock_path, thread_local=False)
    other.acquire()
    with pytest.raises(StoreError, match="another"):
        _open(Session(replace(settings, no_wait=True)), document)
    messages = []
    for event in Session(settings).open([str(document)]):
        if isinstance(event, Notice):
            messages.append(event.message)
            other.release()
    assert len(messages) == 1 and "waiting for another" in messages[0]


def test_sessions_killed_at_random_moments_lose_at_most_one_block(
    model_dir: Path, tmp_path: Path
) -> None:
    document = tmp_path / "long.txt"
    document.write_text(CONSTITUTION.read_text()[:26000])
    script = Path(__file__).parent.parent / "scripts/kill_session.py"
    command = [sys.executable, str(script), "--model", str(model_dir), "--rounds", "10"]
    done = subprocess.run([*command, str(document)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "10 rounds" in done.stdout and "problems: 0" in done.stdout
    assert "too late           10" not in done.stdout


@pytest.mark.gpu
def test_a_session_on_the_gpu_reads_what_the_cpu_stored(settings: Settings, document: Path) -> None:
    on_cpu, on_gpu = Session(replace(settings, device="cpu")), Session(settings)
    _open(on_cpu, document)
    assert _open(on_gpu, document).cache.hit
    assert on_gpu._cache.k.device.type == "cuda"
    rows = slice(0, len(on_gpu._prompt.token_ids))
    assert torch.equal(on_gpu._cache.k[:, :, rows].cpu(), on_cpu._cache.k[:, :, rows])
    answer = _ask(on_gpu)
    assert answer.usage.answer_tokens > 0 and answer.citations
    fresh = Session(replace(settings, no_cache=True))
    _open(fresh, document)
    torch.testing.assert_close(
        fresh._cache.k[:, :, rows].cpu(), on_cpu._cache.k[:, :, rows], rtol=1e-3, atol=1e-3
    )


def test_documents_of_one_name_are_told_apart_by_their_folders(
    settings: Settings, tmp_path: Path
) -> None:
    paths = [tmp_path / folder / "notes.txt" for folder in ("a/x", "b/x")]
    for number, path in enumerate(paths):
        path.parent.mkdir(parents=True)
        path.write_text(f"Note {number} is about cats. " * 20)
    opened = _open(Session(settings), *paths)
    assert [info.name for info in opened.documents] == ["a/x/notes.txt", "b/x/notes.txt"]
    alone = _open(Session(settings), paths[1])
    assert alone.documents[0].name == "notes.txt"


def test_a_long_answer_that_cannot_fit_is_named_as_the_cause(
    settings: Settings, document: Path
) -> None:
    with pytest.raises(ContextError, match="--max-tokens"):
        _open(Session(replace(settings, max_tokens=16384)), document)


def test_damaged_weights_are_an_error_and_store_nothing(
    settings: Settings, model_dir: Path, document: Path, tmp_path: Path
) -> None:
    broken = shutil.copytree(model_dir, tmp_path / "broken")
    data = bytearray((broken / "model.safetensors").read_bytes())
    data[-4000:] = b"\xff" * 4000  # NaN in any float dtype
    (broken / "model.safetensors").write_bytes(data)
    with pytest.raises(ModelError, match="damaged"):
        _open(Session(replace(settings, model=str(broken))), document)
    assert not list(settings.cache_dir.rglob("block-*"))


def test_an_answer_of_no_numbers_is_an_error(settings: Settings, document: Path) -> None:
    session = Session(settings)
    _open(session, document)
    network = session._decoder.network
    network.norm = network.norm * torch.nan
    with pytest.raises(ModelError, match="damaged"):
        _ask(session)
    assert session.turns == [] and not session.undo()


def test_what_lies_inside_the_window_counts_as_selected(settings: Settings, document: Path) -> None:
    session = Session(replace(settings, window_size=4096))
    _open(session, document)
    selection = _ask(session).selection
    assert selection.fraction_kept == 1.0
    assert all(passage.head_share == passage.layer_share == 1.0 for passage in selection.passages)


@pytest.mark.parametrize("part", ("k", "v"))
def test_damaged_last_layers_are_found_before_their_rows_are_stored(
    settings: Settings, document: Path, part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    load = Decoder.load.__func__  # type: ignore[attr-defined]

    def load_damaged(model_dir: Path, device: str, dtype: str, **options: bool) -> Decoder:
        decoder = load(Decoder, model_dir, device, dtype, **options)
        last = decoder.network.layers[-1]
        num_rows = 2 * decoder.config.head_dim
        rows = slice(-2 * num_rows, -num_rows) if part == "k" else slice(-num_rows, None)
        qkv = last.qkv.clone()
        qkv[rows] = torch.nan
        decoder.network.layers[-1] = replace(last, qkv=qkv)
        return decoder

    monkeypatch.setattr(Decoder, "load", load_damaged)
    with pytest.raises(ModelError, match="damaged"):
        _open(Session(settings), document)
    assert not list(settings.cache_dir.rglob("block-*"))


def test_truncation_is_announced_and_never_cuts_to_nothing(
    settings: Settings, tmp_path: Path
) -> None:
    document = tmp_path / "long.txt"
    document.write_text(CONSTITUTION.read_text() * 2)
    session = Session(replace(settings, truncate=True, no_cache=True, max_tokens=16000))
    events = list(session.open([str(document)]))
    messages = [event.message for event in events if isinstance(event, Notice)]
    assert len(messages) == 1 and "only the first" in messages[0]
    read = session._prompt.documents[0]
    answer = _ask(session)
    text = " ".join(document_text(read.document)[: int(read.char_ends[-1])].split())
    assert all(passage.text in text for passage in answer.selection.passages)
    with pytest.raises(ContextError, match="--max-tokens"):
        _open(Session(replace(settings, truncate=True, max_tokens=16384)), document)


@pytest.mark.parametrize("budget", ("100%", "1000000"))
def test_a_budget_of_everything_keeps_the_answer_and_the_history_too(
    settings: Settings, document: Path, budget: str
) -> None:
    session = Session(replace(settings, budget=budget, max_tokens=60, window_size=4))
    _open(session, document)
    assert _ask(session).selection.fraction_kept == 1.0
    assert _ask(session).selection.fraction_kept == 1.0


def test_a_restored_answer_is_history_and_no_question(settings: Settings, document: Path) -> None:
    live_session, resumed = Session(settings), Session(settings)
    _open(live_session, document)
    _ask(live_session, "One?")
    _open(resumed, document)
    list(resumed.restore(live_session.turns))
    live_usage = _ask(live_session, "Two?").usage
    usage = _ask(resumed, "Two?").usage
    assert usage.question_tokens == live_usage.question_tokens
    # The random model's answer holds broken characters, each three bytes when read again.
    assert 0 <= usage.history_tokens - live_usage.history_tokens <= 3 * settings.max_tokens


@pytest.mark.parametrize("sampling", ({"temperature": 1e-40}, {"temperature": 1, "top_p": 1e-50}))
def test_extreme_sampling_takes_the_likeliest_token(
    settings: Settings, document: Path, sampling: dict[str, float]
) -> None:
    greedy, extreme = Session(settings), Session(replace(settings, **sampling))  # type: ignore[arg-type]
    _open(greedy, document)
    _open(extreme, document)
    assert _ask(extreme).text == _ask(greedy).text


def test_no_sinks_and_no_window_are_allowed(settings: Settings, document: Path) -> None:
    session = Session(replace(settings, sink_size=0, window_size=0, budget="5"))
    _open(session, document)
    assert _ask(session).usage.answer_tokens > 0


def test_ctrl_c_after_the_last_token_leaves_the_session_in_step(
    settings: Settings, document: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = Session(settings)
    _open(session, document)
    first = _ask(session, "One?")

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("longread.grounds.Evidence", interrupted)
        with pytest.raises(KeyboardInterrupt):
            _ask(session, "Two?")
    assert len(session.turns) == 1 and session.undo() and not session.undo()
    again = _ask(session, "One?")
    assert (again.text, again.usage) == (first.text, first.usage)


def test_every_step_of_an_answer_can_be_kept(settings: Settings, document: Path) -> None:
    session = Session(settings, keep_steps=True)
    _open(session, document)
    answer = _ask(session)
    assert session.trace is not None
    assert len(session.trace.steps) == session.trace.num_steps >= answer.usage.answer_tokens - 1
    assert all(indices is not None for step in session.trace.steps for indices in step)
