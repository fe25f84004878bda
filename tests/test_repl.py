"""The chat loop: commands, errors that do not end it, Ctrl-C, lines from pipes and terminals."""

from __future__ import annotations

import dataclasses
import io
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from fake_session import FakeSession
from prompt_toolkit.application import create_app_session
from prompt_toolkit.completion import CompleteEvent
from prompt_toolkit.document import Document
from prompt_toolkit.history import FileHistory
from prompt_toolkit.input import PipeInput, create_pipe_input
from prompt_toolkit.output import DummyOutput

from longread import history
from longread.config import Settings
from longread.conversation import Conversation, Matter
from longread.errors import StoreError, UsageError
from longread.events import Event
from longread.line_input import plain_reader, slash_completer, terminal_reader
from longread.reading import ReadDocument, ReadPage, find_page
from longread.render import Screen
from longread.repl import COMMANDS, Repl

Line = str | type[BaseException]


class Chat:
    """One run of the loop over given lines; a KeyboardInterrupt among them is Ctrl-C."""

    def __init__(self, tmp_path: Path, lines: list[Line], *, interactive: bool = True) -> None:
        self.settings = Settings(sessions_dir=tmp_path / "sessions")
        self.session = FakeSession(self.settings)
        self.out, self.err = io.StringIO(), io.StringIO()
        matter = Matter((str(tmp_path / "book.txt"),), ("a" * 64,), None)
        self.conversation = Conversation(self.session, self.settings, matter)
        self.screen = Screen(self.out, self.err)
        self._lines = iter(lines)
        self.screen.show(self.conversation.open())
        self.repl = Repl(self.conversation, self.screen, self._read, interactive=interactive)

    def _read(self) -> str | None:
        line = next(self._lines, None)
        if isinstance(line, type):
            raise line
        return line

    def run(self) -> int:
        return self.repl.run()


def test_questions_are_answered_until_quit(tmp_path: Path) -> None:
    chat = Chat(tmp_path, ["When?", "", "  ", "Why?", "/quit", "Never?"])
    assert chat.run() == 0
    assert [turn.question for turn in chat.session.turns] == ["When?", "Why?"]
    assert chat.out.getvalue() == "May 7, 1992.\nMay 7, 1992.\n"
    assert chat.err.getvalue().count("Sources:") == 2


def test_help_lists_every_command(tmp_path: Path) -> None:
    chat = Chat(tmp_path, ["/help"])
    chat.run()
    assert all(command in chat.err.getvalue() for command in COMMANDS)


def test_budget_and_policy(tmp_path: Path) -> None:
    chat = Chat(tmp_path, ["/budget", "/budget 5%", "/policy dense", "/policy", "When?"])
    assert chat.run() == 0
    assert "budget: 20%\nbudget: 5%\npolicy: dense\npolicy: dense\n" in chat.err.getvalue()
    assert (chat.session.settings.budget, chat.session.settings.policy) == ("5%", "dense")


@pytest.mark.parametrize(
    ("line", "part"),
    [
        ("/budget 500%", "budget"),
        ("/policy best", "tokenselect"),
        ("/budget 13%", "no luck"),
        ("/nonsense", "/help"),
        ("/save", "/save NAME"),
        ("/save a/b", "name"),
        ("/export", "/export FILE"),
        ("/export /no/such/folder/x.md", "cannot write"),
        ("/export ~no-such-user/x.md", "no home of ~no-such-user is known"),
        ("/export a\0b", "NUL"),
        ("/undo", "nothing to undo"),
        ("/retry", "nothing has been asked"),
        ("/sources", "nothing has been asked"),
        ("/selected", "nothing has been asked"),
        ("/undo it", "takes nothing"),
        ("/page", "/page N"),
        ("/report", "/report FILE"),
        ("/report x.html", "nothing has been asked"),
        ("/page 40", "there is no page 40 of book.txt in what was read: pages 1-12"),
        ("/page xiv", "there is no page xiv"),
        ("/page 3 2", "there is no page 3 2"),
    ],
)
def test_errors_do_not_end_the_loop(tmp_path: Path, line: str, part: str) -> None:
    chat = Chat(tmp_path, [line, "When?"])
    assert chat.run() == 0
    errors = [text for text in chat.err.getvalue().splitlines() if text.startswith("longread: err")]
    assert len(errors) == 1
    assert part in errors[0]
    assert len(chat.session.turns) == 1
    assert chat.session.settings.budget == "20%"


def test_without_a_terminal_the_first_error_is_the_exit_code(tmp_path: Path) -> None:
    chat = Chat(tmp_path, ["/nonsense", "When?"], interactive=False)
    assert chat.run() == 2
    assert len(chat.session.turns) == 1


def test_sources_and_selected_of_the_last_answer(tmp_path: Path) -> None:
    chat = Chat(tmp_path, ["When?", "/sources", "/selected"])
    chat.run()
    assert chat.err.getvalue().count("Sources:  [1] book.txt, p. 12") == 2
    assert "Selected: policy tokenselect" in chat.err.getvalue()
    assert "█" in chat.err.getvalue()


def test_sources_in_full(tmp_path: Path) -> None:
    chat = Chat(tmp_path, ["When?", "/sources"])
    chat.run()
    last = chat.err.getvalue().splitlines()[-1]
    assert last == (
        "Sources:  [1] book.txt, p. 12 (label xii) (50.0% of the attention): "
        "“a quote [p. 3] with brackets”"
    )


@pytest.mark.parametrize("wanted", ["12", "xii", "12 1", "xii 1"])
def test_page_by_number_and_label(tmp_path: Path, wanted: str) -> None:
    chat = Chat(tmp_path, [f"/page {wanted}"])
    assert chat.run() == 0
    shown = chat.err.getvalue()
    assert "book.txt, p. 12 (label xii):\nPage 12 says that the captain's name is Voss." in shown
    assert chat.out.getvalue() == ""


def test_page_of_the_second_document() -> None:
    first = ReadDocument("a", "text", (ReadPage(1, None, "one"), ReadPage(2, "7", "two")))
    second = ReadDocument("b", "text", (ReadPage(7, "§ The end", "three"), ReadPage(9, None, "")))
    documents = (first, second)
    assert find_page(documents, "7") == (first, first.pages[1])
    assert find_page(documents, "7 2") == (second, second.pages[0])
    assert find_page(documents, "§ The end 2") == (second, second.pages[0])
    with pytest.raises(UsageError, match="no page 1 of b in what was read: pages 7, 9"):
        find_page(documents, "1 2")


def test_retry_replaces_the_last_turn(tmp_path: Path) -> None:
    chat = Chat(tmp_path, ["When?", "/policy dense", "/retry"])
    chat.run()
    assert [turn.question for turn in chat.session.turns] == ["When?"]
    assert chat.session.turns[0].answer.selection.policy == "dense"


def test_retry_with_sampling_takes_another_seed(tmp_path: Path) -> None:
    chat = Chat(tmp_path, ["When?", "/retry", "/retry"])
    chat.conversation.settings = Settings(temperature=1.0, sessions_dir=tmp_path)
    chat.run()
    assert chat.session.settings.seed == 2


def test_undo(tmp_path: Path) -> None:
    chat = Chat(tmp_path, ["When?", "Why?", "/undo"])
    chat.run()
    assert [turn.question for turn in chat.session.turns] == ["When?"]
    assert "1 turn left" in chat.err.getvalue()


def test_save_keeps_later_turns_too(tmp_path: Path) -> None:
    chat = Chat(tmp_path, ["When?", "/save voss", "Why?"])
    chat.run()
    saved = history.load(chat.settings.sessions_dir, "voss")
    assert [turn.question for turn in saved.turns] == ["When?", "Why?"]
    assert saved.sources == (str(tmp_path / "book.txt"),)


def test_export(tmp_path: Path) -> None:
    lines: list[Line] = ["When?", f"/export {tmp_path}/a b.md", f"/export {tmp_path}/a.json"]
    Chat(tmp_path, lines).run()
    assert "## When?" in (tmp_path / "a b.md").read_text()
    assert json.loads((tmp_path / "a.json").read_text())["turns"][0]["question"] == "When?"


def test_report_of_the_last_answer(tmp_path: Path) -> None:
    chat = Chat(tmp_path, ["When?", f"/report {tmp_path}/a b.html", "/undo", "/report x.html"])
    chat.run()
    assert "<h1" in (tmp_path / "a b.html").read_text()
    assert "written to" in chat.err.getvalue()
    assert "nothing has been asked yet" in chat.err.getvalue()


def test_export_does_not_overwrite_the_document(tmp_path: Path) -> None:
    book = tmp_path / "book.txt"
    book.write_text("The captain is Voss.")
    chat = Chat(tmp_path, ["When?", f"/export {book}"])
    chat.run()
    assert "is a document of the conversation" in chat.err.getvalue()
    assert book.read_text() == "The captain is Voss."


def test_save_does_not_overwrite_another_session(tmp_path: Path) -> None:
    Chat(tmp_path, ["When?", "Where?", "/save voss"]).run()
    chat = Chat(tmp_path, ["Who?", "/save voss", "/save a", "/save b", "/save a"])
    chat.run()
    assert chat.err.getvalue().count("there is a session 'voss' already") == 1
    assert chat.err.getvalue().count("saved as a") == 2
    assert len(history.load(chat.settings.sessions_dir, "voss").turns) == 2


def test_two_processes_on_one_session_lose_no_turn(tmp_path: Path) -> None:
    chat = Chat(tmp_path, ["When?", "/save voss"])
    chat.run()
    saved = history.load(chat.settings.sessions_dir, "voss")
    other = dataclasses.replace(saved, turns=saved.turns * 2)
    history.save(chat.settings.sessions_dir, other)
    chat.conversation.session.undo()
    with pytest.raises(StoreError, match="another longread process has gone on"):
        chat.conversation.keep()
    assert len(history.load(chat.settings.sessions_dir, "voss").turns) == 2
    chat.conversation.save("mine")
    chat.conversation.keep()


def test_ctrl_c_at_the_prompt_clears_the_line(tmp_path: Path) -> None:
    chat = Chat(tmp_path, [KeyboardInterrupt, "When?"])
    assert chat.run() == 0
    assert len(chat.session.turns) == 1


def test_ctrl_c_stops_the_answer_only(tmp_path: Path) -> None:
    def interrupt(question: str) -> Event | None:
        if question == "When?":
            raise KeyboardInterrupt
        return None

    chat = Chat(tmp_path, ["When?", "Why?"])
    chat.session.at_ask = interrupt
    assert chat.run() == 0
    reasons = [turn.answer.finish_reason for turn in chat.session.turns]
    assert reasons == ["interrupted", "stop"]
    assert "not complete" in chat.err.getvalue()


def test_ctrl_c_in_a_script_ends_it(tmp_path: Path) -> None:
    assert Chat(tmp_path, [KeyboardInterrupt, "When?"], interactive=False).run() == 130


def test_plain_lines() -> None:
    read = plain_reader(io.StringIO("one\r\ntwo\\\nthree\n\nlast\\"))
    assert [read(), read(), read(), read(), read()] == ["one", "two\nthree", "", "last", None]


@pytest.fixture
def keyboard() -> Iterator[PipeInput]:
    with create_pipe_input() as pipe, create_app_session(input=pipe, output=DummyOutput()):
        yield pipe


@pytest.fixture
def read(keyboard: PipeInput, tmp_path: Path) -> Callable[[], str | None]:
    path = tmp_path / "sessions" / "history"
    return terminal_reader(path, list(COMMANDS), input=keyboard, output=DummyOutput())


def test_terminal_lines(keyboard: PipeInput, read: Callable[[], str | None]) -> None:
    keyboard.send_text("When?\rone\\\rtwo\rone\x1b\rtwo\r\x04")
    assert [read(), read(), read(), read()] == ["When?", "one\ntwo", "one\ntwo", None]


def test_terminal_ctrl_c(keyboard: PipeInput, read: Callable[[], str | None]) -> None:
    keyboard.send_text("abc\x03")
    with pytest.raises(KeyboardInterrupt):
        read()


def test_terminal_history_is_kept_and_private(
    keyboard: PipeInput, read: Callable[[], str | None], tmp_path: Path
) -> None:
    keyboard.send_text("When?\r")
    assert read() == "When?"
    path = tmp_path / "sessions" / "history"
    assert list(FileHistory(str(path)).load_history_strings()) == ["When?"]
    assert path.stat().st_mode & 0o077 == 0


def test_history_that_cannot_be_written_is_done_without(keyboard: PipeInput) -> None:
    path = Path("/proc/no such place/history")
    read = terminal_reader(path, [], input=keyboard, output=DummyOutput())
    keyboard.send_text("When?\r")
    assert read() == "When?"


@pytest.mark.parametrize(
    ("text", "completions"),
    [
        ("/und", ["/undo"]),
        ("/s", ["/selected", "/sources", "/save"]),
        ("und", []),
        ("/save /u", []),
    ],
)
def test_completion_of_slash_commands(text: str, completions: list[str]) -> None:
    found = slash_completer(list(COMMANDS)).get_completions(Document(text), CompleteEvent())
    assert [completion.text for completion in found] == completions
