"""The chat loop: lines in, slash commands and questions, answers out.

Owns the commands and what a line means; `line_input` owns where lines come from, `Conversation`
what is asked and saved.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

from longread.config import POLICY_NAMES, Settings, parse_budget
from longread.conversation import Conversation
from longread.errors import LongreadError, UsageError
from longread.events import Answer
from longread.plain_text import NO_SUPPORT, one_line
from longread.reading import find_page
from longread.render import Screen, source_lines
from longread.report import report_path, write_report
from longread.transcript import write_export

ReadLine = Callable[[], str | None]
"""Returns the next input, without its line end; None at the end; KeyboardInterrupt on Ctrl-C."""


@dataclass(frozen=True)
class Command:
    """A slash command: how it is written, what it does."""

    usage: str
    help: str


COMMANDS = {
    "/help": Command("/help", "show this list"),
    "/budget": Command("/budget [VALUE]", "show or set the budget: 512, 0.2 or 20%"),
    "/policy": Command("/policy [NAME]", f"show or set the policy: {', '.join(POLICY_NAMES)}"),
    "/selected": Command("/selected", "the passages and the map of the last answer's attention"),
    "/sources": Command("/sources", "the sources of the last answer, quotes in full"),
    "/page": Command(
        "/page N", "the text of a page as the model read it; N 2: of the 2nd document"
    ),
    "/retry": Command("/retry", "answer the last question again, with the settings of now"),
    "/undo": Command("/undo", "forget the last question and its answer"),
    "/save": Command("/save NAME", "save the conversation; later turns are saved with it"),
    "/export": Command("/export FILE", "write the conversation as Markdown, or as JSON (.json)"),
    "/report": Command("/report FILE", "write what the last answer looked at: .html, or .pdf"),
    "/quit": Command("/quit", "leave (also Ctrl-D)"),
}


class Repl:
    """Reads until /quit or the end of input; errors of one line do not end it."""

    def __init__(
        self,
        conversation: Conversation,
        screen: Screen,
        read_line: ReadLine,
        *,
        interactive: bool,
        show_selected: bool = False,
        verbose: bool = False,
    ) -> None:
        self._conversation = conversation
        self._screen = screen
        self._read_line = read_line
        self._interactive = interactive
        self._show_selected = show_selected
        self._verbose = verbose
        self._exit_code = 0
        # /report comes after the answer that it is about.
        conversation.session.reading.follows_tokens = True

    def run(self) -> int:
        """Serve lines; return the exit code: where no one is there to read errors, the first's."""
        if self._interactive:
            self._screen.note("Ask about the document; /help lists the commands, Ctrl-D leaves.")
        while True:
            try:
                line = self._read_line()
                if line is None:
                    return self._exit_code
                if not self._serve(line.strip()):
                    return self._exit_code
            except KeyboardInterrupt:
                # At the prompt it clears the line; in a script there is no one to clear it for.
                if not self._interactive:
                    return 130
            except LongreadError as error:
                self._screen.error(str(error))
                if not self._interactive and self._exit_code == 0:
                    self._exit_code = error.exit_code

    def _serve(self, line: str) -> bool:
        """Do what a line says; return False where it says to leave."""
        if not line:
            return True
        if not line.startswith("/"):
            self._ask(line)
            return True
        word, _, argument = line.partition(" ")
        argument = argument.strip()
        if word == "/quit":
            return False
        if word not in COMMANDS:
            raise UsageError(f"there is no command {word}; /help lists them")
        if word in ("/page", "/save", "/export", "/report") and not argument:
            raise UsageError(f"{word} needs a word more: {COMMANDS[word].usage}")
        if argument and COMMANDS[word].usage == word:
            raise UsageError(f"{word} takes nothing after it")
        self._command(word, argument)
        return True

    def _command(self, word: str, argument: str) -> None:
        match word:
            case "/help":
                self._help()
            case "/budget":
                self._budget(argument)
            case "/policy":
                self._policy(argument)
            case "/selected":
                self._selected(self._last())
            case "/sources":
                for line in source_lines(self._last().citations, full=True):
                    self._screen.tell(line)
                if not self._last().supported:
                    self._screen.tell(f"Mind: {NO_SUPPORT}.")
            case "/page":
                self._page(argument)
            case "/retry":
                self._retry()
            case "/undo":
                self._undo()
            case "/save":
                path = self._conversation.save(argument)
                self._screen.tell(f"saved as {argument} ({path})")
            case "/export":
                self._export(argument)
            case "/report":
                self._report(argument)
            case _:
                raise AssertionError(f"{word} is listed and not served")

    def _ask(self, question: str) -> None:
        answer = self._screen.show(self._conversation.ask(question))
        assert isinstance(answer, Answer), "a session's ask ends with an Answer"
        self._screen.ending(answer)
        self._screen.sources(answer)
        if self._show_selected:
            self._selected(answer)
        self._conversation.keep()

    def _selected(self, answer: Answer) -> None:
        documents = self._conversation.session.documents
        self._screen.selected(answer.selection, documents, heads=self._verbose)

    def _last(self) -> Answer:
        turns = self._conversation.session.turns
        if not turns:
            raise UsageError("nothing has been asked yet")
        return turns[-1].answer

    def _help(self) -> None:
        width = max(len(command.usage) for command in COMMANDS.values())
        for command in COMMANDS.values():
            self._screen.tell(f"{command.usage:<{width}}  {command.help}")
        if self._interactive:
            self._screen.tell("A line that ends with \\ goes on; Esc Enter starts a new line.")

    def _settings(self) -> Settings:
        return self._conversation.settings

    def _budget(self, text: str) -> None:
        if text:
            parse_budget(text)
            self._conversation.reconfigure(dataclasses.replace(self._settings(), budget=text))
        self._screen.tell(f"budget: {self._settings().budget}")

    def _policy(self, name: str) -> None:
        if name:
            if name not in POLICY_NAMES:
                known = ", ".join(POLICY_NAMES)
                raise UsageError(f"there is no policy {name!r}; choose one of {known}")
            self._conversation.reconfigure(dataclasses.replace(self._settings(), policy=name))
        self._screen.tell(f"policy: {self._settings().policy}")

    def _retry(self) -> None:
        self._last()
        question = self._conversation.session.turns[-1].question
        settings = self._settings()
        if settings.temperature > 0.0:
            # The same seed would only say the same thing again.
            self._conversation.reconfigure(dataclasses.replace(settings, seed=settings.seed + 1))
        self._conversation.session.undo()
        self._ask(question)

    def _undo(self) -> None:
        if not self._conversation.session.undo():
            raise UsageError("there is nothing to undo")
        self._conversation.keep()
        number = len(self._conversation.session.turns)
        self._screen.tell(f"forgotten; {number} turn{'' if number == 1 else 's'} left")

    def _page(self, wanted: str) -> None:
        document, page = find_page(self._conversation.session.reading.documents, wanted)
        self._screen.tell(f"{document.name}, {page.place}:")
        self._screen.tell(page.text if page.text.strip() else "(no text)")

    def _export(self, file: str) -> None:
        path = write_export(self._conversation.export(), file)
        self._screen.tell(f"written to {one_line(str(path))}")

    def _report(self, file: str) -> None:
        self._last()
        path = report_path(file, self._conversation)
        self._screen.tell(write_report(path, self._conversation))
