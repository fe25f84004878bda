"""Where the chat loop's lines come from: an editor on a terminal, plain reading anywhere else.

A line that ends with a backslash goes on in the next one, in both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from prompt_toolkit import PromptSession
    from prompt_toolkit.completion import Completer
    from prompt_toolkit.document import Document
    from prompt_toolkit.input import Input
    from prompt_toolkit.key_binding import KeyBindings
    from prompt_toolkit.output import Output

PROMPT = "> "


def plain_reader(stream: TextIO) -> Callable[[], str | None]:
    """Return a reader of `stream`'s lines; it returns None at the end."""

    def read() -> str | None:
        parts: list[str] = []
        while line := stream.readline():
            text = line.rstrip("\r\n")
            if text.endswith("\\"):
                parts.append(text[:-1])
                continue
            return "\n".join([*parts, text])
        return "\n".join(parts) if parts else None

    return read


def terminal_reader(
    history_path: Path,
    commands: Sequence[str],
    *,
    input: Input | None = None,
    output: Output | None = None,
) -> Callable[[], str | None]:
    """Return a reader with editing, history and completion of `commands`; None on Ctrl-D.

    `input` and `output` are the terminal unless given. Where the history file cannot be written,
    the history is kept for this run only.
    """
    session = _prompt_session(history_path, commands, input, output)

    def read() -> str | None:
        try:
            return session.prompt(PROMPT)
        except EOFError:
            return None

    return read


def _prompt_session(
    history_path: Path, commands: Sequence[str], input: Input | None, output: Output | None
) -> PromptSession[str]:
    from prompt_toolkit import PromptSession
    from prompt_toolkit.history import FileHistory, History, InMemoryHistory

    past: History = InMemoryHistory()
    try:
        history_path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        history_path.touch(mode=0o600)
        past = FileHistory(str(history_path))
    except OSError:
        pass
    return PromptSession(
        history=past,
        completer=slash_completer(commands),
        key_bindings=_key_bindings(),
        multiline=True,
        prompt_continuation="  ",
        input=input,
        output=output,
    )


def slash_completer(commands: Sequence[str]) -> Completer:
    """Return a completer of the first word, where it begins with a slash."""
    from prompt_toolkit.completion import CompleteEvent, Completer, Completion

    class SlashCompleter(Completer):
        def get_completions(
            self, document: Document, complete_event: CompleteEvent
        ) -> Iterable[Completion]:
            text = document.text_before_cursor
            if text.startswith("/") and " " not in text:
                for command in commands:
                    if command.startswith(text):
                        yield Completion(command, start_position=-len(text))

    return SlashCompleter()


def _key_bindings() -> KeyBindings:
    from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent

    bindings = KeyBindings()

    @bindings.add("enter")
    def _enter(event: KeyPressEvent) -> None:
        buffer = event.current_buffer
        if buffer.document.text_before_cursor.endswith("\\"):
            buffer.delete_before_cursor()
            buffer.insert_text("\n")
        else:
            buffer.validate_and_handle()

    @bindings.add("escape", "enter")
    def _escape_enter(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    return bindings
