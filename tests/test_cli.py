"""The command line: what goes to which stream, exit codes, and no traceback for any input."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from conftest import REPO
from fake_session import FakeServices

from longread import errors, history
from longread.cli import main
from longread.events import Event, Notice

Capture = pytest.CaptureFixture[str]


@dataclass
class Result:
    code: int
    out: str
    err: str


class Cli:
    """Runs command lines in this process, with fake sessions."""

    def __init__(self, capture: Capture) -> None:
        self._capture = capture
        self.fake = FakeServices()

    def __call__(self, *words: str) -> Result:
        code = main(list(words), self.fake.services())
        out, err = self._capture.readouterr()
        assert "Traceback" not in err
        return Result(code, out, err)


@pytest.fixture
def cli(capsys: Capture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cli:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LONGREAD_SESSIONS_DIR", str(tmp_path / "sessions"))
    monkeypatch.setenv("LONGREAD_CACHE_DIR", str(tmp_path / "cache"))
    (tmp_path / "book.txt").write_text("The captain is Voss.")
    (tmp_path / "b.txt").write_text("Another.")
    return Cli(capsys)


def give_stdin(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(text.encode())))


def last_error(result: Result) -> str:
    """The error's line: there is one, at the end."""
    lines = [line for line in result.err.splitlines() if line.startswith("longread: error: ")]
    assert len(lines) == 1
    assert result.err.splitlines()[-1] == lines[0]
    return lines[0]


def test_ask_prints_the_answer_and_nothing_else(cli: Cli) -> None:
    result = cli("ask", "book.txt", "When?")
    assert (result.code, result.out) == (0, "May 7, 1992.\n")
    assert "Sources:  [1] book.txt, p. 12 (label xii): “a quote" in result.err
    assert "book.txt: 12 pages, 100 tokens (0 from the cache, 100 read now" in result.err
    assert cli.fake.last.opened_with["sources"] == ("book.txt",)
    assert cli.fake.last.closed


def test_ask_quietly(cli: Cli) -> None:
    cli.fake = FakeServices(at_open=lambda: Notice("mind this"))
    result = cli("ask", "-q", "book.txt", "When?")
    assert result.out == "May 7, 1992.\n"
    assert result.err == "longread: warning: mind this\n"


def test_the_last_word_is_the_question(cli: Cli) -> None:
    cli("ask", "book.txt", "b.txt", "Compare the two")
    assert cli.fake.last.opened_with["sources"] == ("book.txt", "b.txt")
    assert cli.fake.last.turns[0].question == "Compare the two"


def test_a_question_that_begins_with_a_dash(cli: Cli) -> None:
    cli("ask", "--budget", "5%", "book.txt", "--", "-1 is what?")
    assert cli.fake.last.turns[0].question == "-1 is what?"


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["book.txt", "b.txt"], "the question is missing: b.txt is a document"),
        (["book.txt"], "the question is missing: book.txt is a document"),
        (["book.txt", "-"], "the question is missing"),
        (["book.txt", " "], "the question is empty"),
        (["book.txt", ""], "the question is empty"),
        (["When?"], "give a document and a question"),
        ([], "give a document and a question"),
        (["-", "-", "When?"], "only once"),
        (["book.txt", "When?", "--budget", "x"], "budget"),
        (["book.txt", "When?", "--polcy", "dense"], "--polcy"),
        (["book.txt", "When?", "--policy", "best"], "tokenselect"),
        (["book.txt", "When?", "--min-votes", "x"], "--min-votes"),
        (["book.txt", "When?", "--session", "a/b"], "name"),
        (["book.txt", "--questions", "none.txt"], "none.txt cannot be read"),
        (["book.txt", "--questions", "empty.txt"], "no question"),
        (["book.txt", "--questions", "binary"], "UTF-8"),
        (["-", "--questions", "-"], "at once"),
        (["book.txt", "When?", "--pages", "x"], "--pages"),
        (["book.txt", "w" * 5000 + "\x00"], ""),
    ],
)
def test_usage_errors(cli: Cli, tmp_path: Path, words: list[str], part: str) -> None:
    (tmp_path / "empty.txt").write_text("\n \n")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    result = cli("ask", *words)
    if not part:
        assert result.code == 0
        return
    assert (result.code, result.out) == (2, "")
    assert part in last_error(result)


def test_only_given_options_override_settings(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LONGREAD_POLICY", "dense")
    (tmp_path / "longread.toml").write_text("no_wait = true\nseed = 7\n")
    cli("ask", "book.txt", "When?", "--seed", "8", "--no-cache")
    settings = cli.fake.last.settings
    assert settings.policy == "dense"
    assert (settings.no_wait, settings.no_cache, settings.seed) == (True, True, 8)


def test_every_flag_reaches_the_settings(cli: Cli, tmp_path: Path) -> None:
    flags = {
        "model": "m",
        "policy": "dense",
        "budget": "7",
        "vote": "threshold",
        "min-votes": "2",
        "index": "exact",
        "index-dim": "8",
        "sink-size": "1",
        "window-size": "2",
        "max-tokens": "3",
        "temperature": "0.5",
        "top-p": "0.25",
        "seed": "4",
        "device": "cpu",
        "dtype": "float32",
        "kv-dtype": "int8",
        "cache-dir": str(tmp_path / "c"),
    }
    words = [word for name, value in flags.items() for word in (f"--{name}", value)]
    result = cli("ask", *words, "--no-wait", "--truncate", "book.txt", "When?")
    assert result.code == 0
    settings = cli.fake.last.settings
    for name, value in flags.items():
        assert str(getattr(settings, name.replace("-", "_"))) == value
    assert settings.no_wait
    assert settings.truncate


def test_pages_password_and_stdin(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    give_stdin(monkeypatch, "piped text")
    cli("ask", "--pages", "3,10-40", "--password", "secret", "-", "When?")
    opened = cli.fake.last.opened_with
    assert opened == {
        "sources": ("-",),
        "pages": "3,10-40",
        "password": "secret",
        "stdin": b"piped text",
    }


def test_password_from_the_variable(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LONGREAD_PASSWORD", "hidden")
    cli("ask", "book.txt", "When?")
    assert cli.fake.last.opened_with["password"] == "hidden"


def test_no_password_without_a_terminal(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    give_stdin(monkeypatch, "never asked for")
    cli("ask", "book.txt", "When?")
    assert cli.fake.last.opened_with["password"] is None


def test_json(cli: Cli) -> None:
    result = cli("ask", "--json", "book.txt", "When?")
    record = json.loads(result.out)
    assert "Sources" not in result.err
    assert record["version"] == 1
    assert record["question"] == "When?"
    assert record["answer"] == "May 7, 1992."
    assert record["citations"] == [
        {
            "document": "book.txt",
            "page": 12,
            "page_label": "xii",
            "quote": "a quote [p. 3] with brackets",
            "score": 0.5,
        }
    ]
    assert record["usage"]["document_tokens"] == 100
    cache = {"hit": False, "tokens_reused": 0, "tokens_prefilled": 100, "bytes": 2_000_000}
    assert cache.items() <= record["cache"].items()
    assert set(record["selection"]) == {"policy", "vote", "index", "budget", "fraction_kept"}
    assert all(name.endswith("_s") for name in record["timings"])
    assert record["model"] == "fake-model"
    assert record["finish_reason"] == "stop"
    assert record["truncated"] is False
    assert record["supported"] is True
    assert record["interrupted"] is False


def test_json_with_selected(cli: Cli) -> None:
    result = cli("ask", "--json", "--show-selected", "--quiet", "book.txt", "When?")
    selection = json.loads(result.out)["selection"]
    assert selection["passages"][0]["text"] == "the passage [bold]text[/bold]"
    assert selection["strip"] == [0.0, 0.1, 0.7, 0.2]
    assert selection["heads"] == [] and selection["passages"][0]["marks"] == []
    assert "█" in result.err


def test_json_errors_leave_stdout_empty(cli: Cli) -> None:
    cli.fake = FakeServices(at_open=raising(errors.NoTextError("book.txt holds no text")))
    result = cli("ask", "--json", "book.txt", "When?")
    assert (result.code, result.out) == (5, "")
    assert last_error(result) == "longread: error: book.txt holds no text"


def raising(error: BaseException) -> object:
    def act(question: str = "") -> Event | None:
        raise error

    return act


EXIT_CODES = {
    errors.LongreadError: 1,
    errors.UsageError: 2,
    errors.DocumentError: 3,
    errors.PasswordError: 4,
    errors.NoTextError: 5,
    errors.ContextError: 6,
    errors.ModelError: 7,
    errors.StoreError: 8,
    errors.InterruptedByUser: 130,
}


@pytest.mark.parametrize("kind", list(EXIT_CODES))
def test_exit_codes(cli: Cli, kind: type[errors.LongreadError]) -> None:
    cli.fake = FakeServices(at_open=raising(kind("what, where\nand what to do")))
    result = cli("ask", "book.txt", "When?")
    assert (result.code, result.out) == (EXIT_CODES[kind], "")
    assert last_error(result) == "longread: error: what, where and what to do"


def test_every_error_has_a_tested_exit_code() -> None:
    kinds = {
        kind
        for kind in vars(errors).values()
        if isinstance(kind, type) and issubclass(kind, errors.LongreadError)
    }
    assert kinds == set(EXIT_CODES)


def test_readme_lists_the_exit_codes() -> None:
    readme = (REPO / "README.md").read_text(encoding="utf-8")
    for code in {0, *EXIT_CODES.values()}:
        assert f"| {code} |" in readme


def test_unexpected_errors_are_one_line(cli: Cli) -> None:
    cli.fake = FakeServices(at_ask=raising(ZeroDivisionError("division by zero")))
    result = cli("ask", "book.txt", "When?")
    assert result.code == 1
    assert last_error(result) == (
        "longread: error: ZeroDivisionError: division by zero; "
        "run it again with -v to see where, and please report it"
    )


class OutOfMemoryError(RuntimeError):
    """Named as torch names it, which the tests of the command line do not import."""


@pytest.mark.parametrize(
    "error",
    (
        OutOfMemoryError("CUDA out of memory. Tried to allocate 64.00 GiB."),
        MemoryError(),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"),
    ),
    ids=lambda error: type(error).__name__,
)
def test_a_full_memory_is_a_device_error_with_a_remedy(cli: Cli, error: Exception) -> None:
    cli.fake = FakeServices(at_open=raising(error))
    result = cli("ask", "book.txt", "When?")
    assert (result.code, result.out) == (7, "")
    assert "--pages" in last_error(result) and "--device cpu" in last_error(result)


def test_verbose_shows_the_traceback(cli: Cli, capsys: Capture) -> None:
    cli.fake = FakeServices(at_ask=raising(ZeroDivisionError("division by zero")))
    assert main(["ask", "-v", "book.txt", "When?"], cli.fake.services()) == 1
    err = capsys.readouterr().err
    assert "Traceback" in err
    assert err.splitlines()[-1] == "longread: error: ZeroDivisionError: division by zero"
    cli.fake = FakeServices()
    assert "question 0.25 s" in cli("-v", "ask", "book.txt", "When?").err
    assert "question 0.25 s" not in cli("ask", "book.txt", "When?").err


def test_ctrl_c_while_answering_keeps_the_partial_answer(cli: Cli) -> None:
    cli.fake = FakeServices(at_ask=raising(KeyboardInterrupt()))
    result = cli("ask", "book.txt", "When?")
    assert result.code == 130
    assert "not complete" in result.err
    record = json.loads(cli("ask", "--json", "book.txt", "When?").out)
    assert record["interrupted"] is True
    assert record["finish_reason"] == "interrupted"


def test_ctrl_c_while_reading_says_what_is_kept(cli: Cli) -> None:
    cli.fake = FakeServices(at_open=raising(KeyboardInterrupt()))
    result = cli("ask", "book.txt", "When?")
    assert (result.code, result.out) == (130, "")
    assert "kept for the next run" in last_error(result)
    assert "kept" not in cli("ask", "--no-cache", "book.txt", "When?").err


def test_missing_document_before_any_model(cli: Cli) -> None:
    cli.fake.services = lambda: None  # type: ignore[method-assign,assignment,return-value]
    result = cli("ask", "gone.pdf", "When?")
    assert result.code == 3
    assert "gone.pdf" in last_error(result)


def test_session_is_saved_and_resumed(cli: Cli, tmp_path: Path) -> None:
    cli("ask", "book.txt", "When?", "--session", "voss", "--model", "some-model")
    cli("ask", "book.txt", "Why?", "--session", "voss")
    assert cli.fake.last.restored == 1
    assert cli.fake.last.settings.model == "some-model"
    result = cli("ask", "And then?", "--session", "voss")
    assert cli.fake.last.opened_with["sources"] == (str(tmp_path / "book.txt"),)
    assert "2 earlier turns" in result.err
    saved = history.load(tmp_path / "sessions", "voss")
    assert [turn.question for turn in saved.turns] == ["When?", "Why?", "And then?"]


def test_session_with_other_documents(cli: Cli, tmp_path: Path) -> None:
    cli("ask", "book.txt", "When?", "--session", "voss")
    for words in (["b.txt"], ["book.txt", "b.txt"], ["book.txt", "--pages", "1"]):
        result = cli("ask", "--session", "voss", *words, "Why?")
        assert result.code == 2
        assert "session 'voss' is about book.txt" in last_error(result)
    (tmp_path / "book.txt").write_text("changed")
    result = cli("ask", "--session", "voss", "Why?")
    assert "has changed" in last_error(result)


def test_session_of_a_piped_document(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    for question in ("When?", "Why?"):
        give_stdin(monkeypatch, "piped")
        assert cli("ask", "-", question, "--session", "pipe").code == 0
    assert cli.fake.last.restored == 1
    assert cli.fake.last.opened_with["stdin"] == b"piped"


def test_named_pipes_are_read_once(cli: Cli, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    assert cli("ask", "pipe", "When?").code == 0
    result = cli("ask", "pipe", "When?", "--session", "voss")
    assert result.code == 2
    assert "is a pipe" in last_error(result)


def test_damaged_session(cli: Cli, tmp_path: Path) -> None:
    cli("ask", "book.txt", "When?", "--session", "voss")
    (tmp_path / "sessions" / "voss.json").write_text("{")
    assert cli("ask", "Why?", "--session", "voss").code == 8


def test_a_session_that_cannot_be_saved_is_refused_before_the_reading(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LONGREAD_SESSIONS_DIR", "/proc/nowhere")
    result = cli("ask", "book.txt", "When?", "--session", "voss")
    assert (result.code, result.out) == (8, "")
    assert "cannot save sessions in /proc/nowhere" in last_error(result)
    assert cli.fake.sessions == []


def test_report_of_an_answer(cli: Cli, tmp_path: Path) -> None:
    result = cli("ask", "book.txt", "When?", "--report", "r.html")
    assert (result.code, result.out) == (0, "May 7, 1992.\n")
    assert "report written to r.html" in result.err
    page = (tmp_path / "r.html").read_text()
    assert "<h1" in page and "May" in page
    assert cli("ask", "book.txt", "Why?", "--report", "r.html", "--json").code == 0
    assert "Why?" in (tmp_path / "r.html").read_text()


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["--report", "book.txt"], "book.txt is a document of the conversation"),
        (["--report", "r.docx"], "a report is"),
        (["--report", "b.html"], "not as longread writes it"),
        (["--report", "no/r.html"], "there is no folder no"),
        (["--report", "r.html", "--questions", "b.txt"], "--report shows one answer"),
    ],
)
def test_reports_that_cannot_be_are_refused_before_the_reading(
    cli: Cli, tmp_path: Path, words: list[str], part: str
) -> None:
    (tmp_path / "b.html").write_text("<p>precious</p>")
    asked = ["book.txt"] if "--questions" in words else ["book.txt", "When?"]
    result = cli("ask", *asked, *words)
    assert (result.code, result.out) == (2, "")
    assert part in last_error(result)
    assert not any(session.opened_with for session in cli.fake.sessions)
    assert (tmp_path / "b.html").read_text() == "<p>precious</p>"


def test_sessions_commands(cli: Cli, tmp_path: Path) -> None:
    assert cli("sessions", "ls").out == ""
    cli("ask", "book.txt", "When?", "--session", "voss")
    listed = cli("sessions", "ls").out.splitlines()
    assert len(listed) == 2
    assert "voss" in listed[1]
    assert json.loads(cli("sessions", "ls", "--json").out)["sessions"][0]["num_turns"] == 1
    assert "## When?" in cli("sessions", "show", "voss").out
    assert json.loads(cli("sessions", "show", "voss", "--json").out)["name"] == "voss"
    assert cli("sessions", "export", "voss", "voss.md").code == 0
    assert "## When?" in (tmp_path / "voss.md").read_text()
    assert cli("sessions", "export", "voss", "no/such/folder").code == 2
    assert "## When?" in cli("sessions", "export", "voss").out
    printed = cli("sessions", "export", "voss", "--format", "json").out
    assert json.loads(printed)["turns"][0]["settings"]["max_tokens"] == 512
    assert cli("sessions", "export", "voss", "x.md", "--format", "json").code == 0
    assert json.loads((tmp_path / "x.md").read_text()) == json.loads(printed)
    assert "choose one of md, json" in last_error(
        cli("sessions", "export", "voss", "--format", "x")
    )
    assert cli("sessions", "rm", "voss").code == 0
    assert cli("sessions", "rm", "voss").code == 2
    assert cli("sessions", "show", "gone").code == 2


def test_chat_reads_lines(cli: Cli, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    give_stdin(monkeypatch, "When?\n/save voss\nWhy?\n")
    result = cli("chat", "book.txt")
    assert (result.code, result.out) == (0, "May 7, 1992.\nMay 7, 1992.\n")
    assert len(history.load(tmp_path / "sessions", "voss").turns) == 2
    give_stdin(monkeypatch, "And then?\n")
    assert cli("chat", "--session", "voss").code == 0
    assert len(history.load(tmp_path / "sessions", "voss").turns) == 3


def test_chat_usage(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    assert cli("chat").code == 2
    assert cli("chat", "-").code == 2
    assert cli("chat", "--session", "new").code == 2
    give_stdin(monkeypatch, "/nonsense\n")
    assert cli("chat", "book.txt").code == 2


def test_ingest(cli: Cli) -> None:
    result = cli("ingest", "book.txt")
    assert result.out == (
        "book.txt: 12 pages, 100 tokens (0 from the cache, 100 read now; 2.0 MB stored)\n"
    )
    record = json.loads(cli("ingest", "book.txt", "--json").out)
    assert record["version"] == 1
    assert record["documents"] == [{"name": "book.txt", "num_pages": 12, "num_tokens": 100}]
    assert record["cache"]["tokens_prefilled"] == 100


def test_config_show(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LONGREAD_BUDGET", "5%")
    lines = [line.split() for line in cli("config", "show").out.splitlines()]
    assert ["budget", "5%", "LONGREAD_BUDGET"] in lines
    assert ["policy", "tokenselect", "default"] in lines
    record = json.loads(cli("config", "show", "--json").out)
    assert record["settings"]["budget"] == {"value": "5%", "origin": "LONGREAD_BUDGET"}
    assert record["settings"]["no_wait"]["value"] is False


def test_cache_commands_on_an_empty_cache(cli: Cli, tmp_path: Path) -> None:
    assert cli("cache", "path").out == f"{tmp_path / 'cache'}\n"
    assert cli("cache", "ls").code == 0
    assert json.loads(cli("cache", "ls", "--json").out)["entries"] == []
    assert json.loads(cli("cache", "info", "--json").out)["num_entries"] == 0
    assert cli("cache", "info").code == 0
    assert cli("cache", "verify").code == 0
    assert cli("cache", "rm", "abc").code == 2
    assert cli("cache", "prune", "--older-than", "30d", "--size", "0").code == 0
    assert cli("cache", "prune", "--older-than", "soon").code == 2
    assert cli("cache", "prune", "--size", "big").code == 2


def test_models_commands_on_an_empty_directory(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LONGREAD_MODELS_DIR", str(tmp_path / "models"))
    assert cli("models", "path").out == f"{tmp_path / 'models'}\n"
    names = {model["name"] for model in json.loads(cli("models", "ls", "--json").out)["models"]}
    assert names == {"qwen2.5-coder-1.5b", "qwen2.5-coder-0.5b", "smollm2-135m"}
    assert "qwen2.5-coder-1.5b (default)" in cli("models", "ls").out
    assert cli("models", "path", "smollm2-135m").code == 7
    assert cli("models", "rm", "smollm2-135m").code == 7


def test_inspect(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LONGREAD_MODELS_DIR", str(tmp_path / "models"))
    (tmp_path / "pages.txt").write_text("One page.\fAnother \x1b[31mpage.")
    assert cli("inspect", "--text", "pages.txt").out == "One page.\fAnother [31mpage.\n"
    assert cli("inspect", "--page", "2", "pages.txt").out == "Another [31mpage.\n"
    assert cli("inspect", "--page", "x", "pages.txt").code == 2
    assert cli("inspect", "--page", "1", "--pages", "1", "pages.txt").code == 2
    assert cli("inspect", "--page", "7", "pages.txt").code == 2
    assert cli("inspect", "gone.txt").code == 3
    result = cli("inspect", "pages.txt")
    assert "models pull" in result.out
    record = json.loads(cli("inspect", "--json", "pages.txt").out)["documents"][0]
    assert [page["page"] for page in record["pages"]] == [1, 2]
    assert record["num_tokens"] is None


def test_doctor(cli: Cli, tmp_path: Path) -> None:
    result = cli("doctor")
    words = [line.split()[0] for line in result.out.splitlines()]
    assert set(words) <= {"ok", "warn", "fail"}
    assert result.code == int("fail" in words)
    names = [check["name"] for check in json.loads(cli("doctor", "--json").out)["checks"]]
    wanted = "torch device threads bfloat16 memory cache_dir disk models triton terminal"
    assert set(wanted.split()) <= set(names)


def test_doctor_fails_with_a_remedy(cli: Cli) -> None:
    result = cli("doctor", "--cache-dir", "/proc/nowhere")
    assert result.code == 1
    failed = [line for line in result.out.splitlines() if line.startswith("fail")]
    assert any("LONGREAD_CACHE_DIR" in line for line in failed)


def test_eval_takes_tasks_where_it_is_not_for_selection(cli: Cli) -> None:
    result = cli("eval", "book.txt")
    assert result.code == 2
    assert "there is no task 'book.txt'" in last_error(result)


def test_version_and_no_command(cli: Cli) -> None:
    assert cli("--version").out == "longread 0.1.0\n"
    assert "Commands:" in cli().out
    assert cli("nonsense").code == 2
    assert cli("cache").code == 2
    assert "longread ask --help" in last_error(cli("ask", "--nonsense"))


def run_program(*words: str, **options: object) -> subprocess.CompletedProcess[bytes]:
    command = [sys.executable, "-m", "longread", *words]
    return subprocess.run(command, capture_output=True, cwd=REPO, **options)  # type: ignore[call-overload,no-any-return]


def test_help_imports_nothing_heavy() -> None:
    script = (
        "import sys; from longread.cli import main; code = main(['ask', '--help']); "
        "heavy = {'torch', 'numpy', 'transformers', 'rich', 'pypdf', 'prompt_toolkit', 'gguf'}; "
        "sys.exit(code or ' '.join(heavy & set(sys.modules)) or None)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, cwd=REPO)
    assert done.returncode == 0, done.stderr
    assert b"--show-selected" in done.stdout


def test_output_is_utf8_in_any_locale(tmp_path: Path) -> None:
    (tmp_path / "ü.txt").write_text("Grüße „dort“.", encoding="utf-8")
    environment = {**os.environ, "LC_ALL": "C", "LANG": "C", "PYTHONIOENCODING": "ascii"}
    done = run_program("inspect", "--text", str(tmp_path / "ü.txt"), env=environment)
    assert done.stdout.decode("utf-8") == "Grüße „dort“.\n"
    assert done.returncode == 0


def test_a_reader_that_goes_away(tmp_path: Path) -> None:
    (tmp_path / "long.txt").write_text("many words " * 100_000)
    command = [sys.executable, "-m", "longread", "inspect", "--text", str(tmp_path / "long.txt")]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=REPO
    ) as child:
        assert child.stdout is not None
        assert child.stderr is not None
        child.stdout.read(10)
        child.stdout.close()
        assert child.stderr.read() == b""
    assert child.returncode == 1


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_full_disk_behind_standard_output() -> None:
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            [sys.executable, "-m", "longread", "--version"],
            stdout=full,
            stderr=subprocess.PIPE,
            cwd=REPO,
        )
    assert done.returncode == 1
    assert done.stderr.decode().count("\n") == 1
    assert done.stderr.startswith(b"longread: error: standard output cannot be written: No space")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_full_disk_behind_standard_error_does_not_cost_the_output() -> None:
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            [sys.executable, "-m", "longread", "config", "show"],
            stdout=subprocess.PIPE,
            stderr=full,
            cwd=REPO,
        )
    assert done.returncode == 0
    assert done.stdout.startswith(b"setting")


def test_ctrl_c_again_while_leaving() -> None:
    script = (
        # A shell starts what it puts in the background with SIGINT ignored.
        "import os, signal, sys; from longread import cli; "
        "signal.signal(signal.SIGINT, signal.default_int_handler); "
        "cli._run = lambda *rest: os.kill(os.getpid(), signal.SIGINT); "
        "sys.argv = ['longread']; code = cli.main(); "
        "os.kill(os.getpid(), signal.SIGINT); sys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, cwd=REPO)
    assert (done.returncode, done.stderr) == (130, b"")


def test_questions_in_chat_may_hold_any_byte(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"Wh\xffen?\n"), "utf-8"))
    assert cli("chat", "book.txt").code == 0
    assert [turn.question for turn in cli.fake.last.turns] == ["Wh\ufffden?"]


def test_closed_streams() -> None:
    done = subprocess.run(
        f"{sys.executable} -m longread ask - 'When?' <&- >&- 2>&-", shell=True, cwd=REPO
    )
    assert done.returncode == 2


def test_completion_script() -> None:
    environment = {**os.environ, "_LONGREAD_COMPLETE": "complete_bash"}
    environment |= {"COMP_WORDS": "longread se", "COMP_CWORD": "1"}
    done = run_program(env=environment)
    assert b"sessions" in done.stdout
