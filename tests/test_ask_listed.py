"""`ask --questions FILE`: what is a question, the order of the lines, and a file that is gone on
with."""

from __future__ import annotations

import fcntl
import json
import os
from pathlib import Path

import pytest
from fake_session import FakeServices
from test_cli import Capture, Cli, give_stdin, last_error

from longread import errors, history
from longread.events import Event
from longread.questions import ListedQuestion, parse_questions


@pytest.fixture
def cli(capsys: Capture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cli:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LONGREAD_SESSIONS_DIR", str(tmp_path / "sessions"))
    (tmp_path / "book.txt").write_text("The captain is Voss.")
    (tmp_path / "b.txt").write_text("Another.")
    (tmp_path / "q.txt").write_text("Who?\nWhen?\nx\nWhy?\nWhere?\n")
    return Cli(capsys)


ASKED = ["Who?", "When?", "x", "Why?", "Where?"]


def _records(text: str) -> list[dict[str, object]]:
    return [json.loads(line) for line in text.splitlines()]


def _failing(after: int, error: BaseException) -> object:
    """An `at_ask` that raises at the question after so many."""
    asked: list[str] = []

    def at_ask(question: str) -> Event | None:
        asked.append(question)
        if len(asked) > after:
            raise error
        return None

    return at_ask


def test_lines_come_in_the_order_of_the_questions(cli: Cli) -> None:
    result = cli("ask", "book.txt", "b.txt", "--questions", "q.txt")
    assert result.code == 0
    records = _records(result.out)
    assert [record["question"] for record in records] == ASKED
    assert [record["id"] for record in records] == [1, 2, 3, 4, 5]
    assert records[2]["error"] == "too long for the window" and "answer" not in records[2]
    assert records[0]["answer"] == "May 7, 1992." and "error" not in records[0]
    assert {record["version"] for record in records} == {1}
    assert cli.fake.last.asked == ["When?", "Who?", "Why?", "x", "Where?"]
    assert cli.fake.last.opened_with["sources"] == ("book.txt", "b.txt") and cli.fake.last.closed
    assert "longread: 5 of 5 answered: Where?" in result.err


def test_a_line_has_what_the_answers_document_has(cli: Cli) -> None:
    alone = json.loads(cli("ask", "book.txt", "Who?", "--json", "--show-selected").out)
    options = ("--questions", "q.txt", "--show-selected")
    line = _records(cli("ask", "book.txt", *options).out)[0]
    assert line.pop("id") == 1 and len(str(line.pop("run"))) == 16
    assert line == alone


def test_ids_and_questions_of_json_lines(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = '{"id": "first", "question": "Who?"}\n\n{"question": "When?", "more": 1}\n'
    give_stdin(monkeypatch, lines)
    records = _records(cli("ask", "book.txt", "--questions", "-").out)
    assert [(record["id"], record["question"]) for record in records] == [
        ("first", "Who?"),
        (2, "When?"),
    ]


@pytest.mark.parametrize(
    ("data", "part"),
    (
        (b"", "holds no question"),
        (b"\n \r\n\x00\n", "holds no question"),
        (b"\xff\xfe\x00", "not text in UTF-8"),
        (b'{"id": 1}', 'line 1: it has no "question"'),
        (b'{"question": 7}', 'line 1: it has no "question"'),
        (b'{"question": " "}', "line 1: the question is empty"),
        (b'{"question": "a"}\nb', "line 2: it is not JSON"),
        (b'{"question": "a"}\n[]', 'line 2: it has no "question"'),
        (b'{"question": ' + b"[" * 100_000, "line 1: it is not JSON"),
        (b'{"question": "a", "id": true}', "line 1: an id is"),
        (b'{"question": "a", "id": 1.5}', "line 1: an id is"),
        (
            b'{"question": "a", "id": "x"}\n\n{"question": "b", "id": "x"}',
            "line 3: the id x is that of line 1 already",
        ),
        (b'{"question": "a", "id": 2}\n{"question": "b"}', "line 2: the id 2 is that of line 1"),
    ),
)
def test_what_is_no_question(data: bytes, part: str) -> None:
    with pytest.raises(errors.UsageError) as raised:
        parse_questions("q.txt", data)
    assert part in str(raised.value)


def test_marks_line_ends_and_unsafe_characters() -> None:
    data = "\ufeffWho\x1b[2J?\r\n\r\n  When?\rWhy\u2028not?".encode()
    assert parse_questions("q", data) == [
        ListedQuestion(1, 1, "Who[2J?"),
        ListedQuestion(2, 2, "When?"),
        ListedQuestion(3, 3, "Why\u2028not?"),
    ]
    half = parse_questions("q", b'{"question": "a\\ud800", "id": "\\u001b"}')
    assert half == [ListedQuestion(1, "", "a\ufffd")]


def test_ten_thousand_questions(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "many.txt").write_text("".join(f"Question {n}?\n" for n in range(10_000)))
    options = ("--questions", "many.txt", "--out", "a.jsonl", "-q")
    result = cli("ask", "book.txt", *options)
    assert (result.code, result.out, result.err) == (0, "", "")
    with (tmp_path / "a.jsonl").open() as file:
        assert [json.loads(line)["id"] for line in file] == list(range(1, 10_001))
    assert cli("ask", "book.txt", *options).code == 0
    assert len(cli.fake.sessions) == 2 and not cli.fake.last.documents, "nothing was read again"


def test_a_file_is_gone_on_with(cli: Cli, tmp_path: Path) -> None:
    options = ("ask", "book.txt", "--questions", "q.txt", "--out", "a.jsonl")
    path = tmp_path / "a.jsonl"
    assert cli(*options).out == ""
    whole = path.read_bytes()
    lines = whole.splitlines(keepends=True)
    assert len(lines) == 5

    path.write_bytes(lines[0] + lines[1] + lines[2][:-20])  # cut in the third line
    result = cli(*options)
    assert path.read_bytes() == whole
    assert cli.fake.last.asked == ["Why?", "x", "Where?"]
    assert "2 of 5 answers are in a.jsonl already" in result.err

    path.write_bytes(b"".join(lines[:2]) + lines[4])  # as Ctrl-C leaves it
    cli(*options)
    assert path.read_bytes() == whole
    assert cli.fake.last.asked == ["Why?", "x"]

    (tmp_path / "q.txt").write_text("Who?\nWhen?\nx\nWhy?\nWhere?\nAnd then?\n")
    cli(*options)
    assert path.read_bytes().startswith(whole) and len(path.read_bytes().splitlines()) == 6
    assert cli.fake.last.asked == ["And then?"]


def test_what_is_finished_stays_after_ctrl_c(cli: Cli, tmp_path: Path) -> None:
    cli.fake = FakeServices(at_ask=_failing(4, KeyboardInterrupt()))  # type: ignore[arg-type]
    (tmp_path / "q.txt").write_text("Who?\nWhen?\nWhy?\nWhere?\nx\n")
    options = ("ask", "book.txt", "--questions", "q.txt", "--out", "a.jsonl")
    result = cli(*options)
    assert result.code == 130
    assert "interrupted; 4 of 5 questions are answered; the same command goes on" in result.err
    third = KeyboardInterrupt()
    cli.fake = FakeServices(at_ask=_failing(3, third))  # type: ignore[arg-type]
    (tmp_path / "a.jsonl").unlink()
    assert cli(*options).code == 130  # the fourth is there, and the third is not
    ids = [record["id"] for record in _records((tmp_path / "a.jsonl").read_text())]
    assert ids == [1, 2, 4]
    cli.fake = FakeServices(at_ask=_failing(3, third))  # type: ignore[arg-type]
    result = cli("ask", "book.txt", "--questions", "q.txt")
    assert result.code == 130 and [r["id"] for r in _records(result.out)] == [1, 2, 4]
    cli.fake = FakeServices()
    assert cli(*options).code == 0
    assert sorted(cli.fake.last.asked) == ["Why?", "x"]
    ids = [record["id"] for record in _records((tmp_path / "a.jsonl").read_text())]
    assert ids == [1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    "words",
    (
        ["b.txt"],
        ["book.txt", "b.txt"],
        ["book.txt", "--budget", "9%"],
        ["book.txt", "--seed", "4"],
        ["book.txt", "--policy", "dense"],
        ["book.txt", "--pages", "1"],
        ["book.txt", "--session", "s"],
        ["book.txt", "--model", "other"],
    ),
)
def test_a_file_of_other_documents_or_settings_is_refused(
    cli: Cli, tmp_path: Path, words: list[str]
) -> None:
    options = ("--questions", "q.txt", "--out", "a.jsonl")
    cli("ask", "book.txt", *options)
    before = (tmp_path / "a.jsonl").read_bytes()
    result = cli("ask", *words, *options)
    assert (result.code, result.out) == (2, "")
    assert "a.jsonl, line 1, is no answer of these documents, settings" in last_error(result)
    assert (tmp_path / "a.jsonl").read_bytes() == before
    assert cli("ask", "book.txt", *options, "--device", "cpu", "-q").code == 0


def test_a_file_of_other_questions_is_refused(cli: Cli, tmp_path: Path) -> None:
    options = ("ask", "book.txt", "--questions", "q.txt", "--out", "a.jsonl")
    cli(*options)
    for text in ("Who?\nWhat?\nx\nWhy?\nWhere?", "When?\nWho?\nx\nWhy?\nWhere?", "Who?\nWhen?"):
        (tmp_path / "q.txt").write_text(text)
        result = cli(*options)
        assert result.code == 2 and "answers another question than" in last_error(result)


@pytest.mark.parametrize("text", ("notes", "notes\n", "{}\n", '{"version": 1}\n', "\n"))
def test_a_file_of_something_else_stays(cli: Cli, tmp_path: Path, text: str) -> None:
    (tmp_path / "a.jsonl").write_text(text)
    result = cli("ask", "book.txt", "--questions", "q.txt", "--out", "a.jsonl")
    assert result.code == 2 and "line 1, is no answer" in last_error(result)
    assert (tmp_path / "a.jsonl").read_text() == text


@pytest.mark.parametrize(
    ("out", "code", "part"),
    (
        ("q.txt", 2, "name another file"),
        ("book.txt", 2, "name another file"),
        (".", 8, "name another file"),
        ("none/a.jsonl", 8, "name another file"),
        (os.devnull, 2, "is no plain file"),
    ),
)
def test_files_that_cannot_be_written(cli: Cli, out: str, code: int, part: str) -> None:
    result = cli("ask", "book.txt", "--questions", "q.txt", "--out", out)
    assert (result.code, result.out) == (code, "")
    assert part in last_error(result)


def test_one_process_at_a_time_writes_to_a_file(cli: Cli, tmp_path: Path) -> None:
    with (tmp_path / "a.jsonl").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        result = cli("ask", "book.txt", "--questions", "q.txt", "--out", "a.jsonl")
    assert result.code == 8 and "another run writes to a.jsonl" in last_error(result)


def test_usage_of_out_and_documents(cli: Cli) -> None:
    assert "--out is for many answers" in last_error(cli("ask", "book.txt", "Who?", "--out", "a"))
    assert "no document is named" in last_error(cli("ask", "--questions", "q.txt"))


def test_in_a_session_each_question_follows_the_one_before(cli: Cli, tmp_path: Path) -> None:
    options = ("--session", "s", "--questions", "q.txt", "--out", "a.jsonl")
    assert cli("ask", "book.txt", *options).code == 0
    saved = history.load(tmp_path / "sessions", "s")
    assert [turn.question for turn in saved.turns] == ASKED
    records = _records((tmp_path / "a.jsonl").read_text())
    assert [record["question"] for record in records] == ASKED
    cli.fake = FakeServices(at_ask=_failing(0, errors.ContextError("full")))  # type: ignore[arg-type]
    records = _records(cli("ask", "--session", "s", "--questions", "q.txt").out)
    assert [record["error"] for record in records] == ["full"] * 5


def test_a_turn_that_ctrl_c_ended_is_the_last(cli: Cli, tmp_path: Path) -> None:
    cli.fake = FakeServices(at_ask=_failing(1, KeyboardInterrupt()))  # type: ignore[arg-type]
    result = cli("ask", "book.txt", "--session", "s", "--questions", "q.txt")
    records = _records(result.out)
    assert result.code == 130 and [record["interrupted"] for record in records] == [False, True]
    assert len(history.load(tmp_path / "sessions", "s").turns) == 2


def test_an_error_of_the_whole_run_keeps_what_was_answered(cli: Cli, tmp_path: Path) -> None:
    cli.fake = FakeServices(at_ask=_failing(2, errors.ModelError("broken")))  # type: ignore[arg-type]
    result = cli("ask", "book.txt", "--questions", "q.txt", "--out", "a.jsonl")
    assert result.code == 7 and "broken" in last_error(result)
    assert len(_records((tmp_path / "a.jsonl").read_text())) == 2
