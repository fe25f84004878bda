"""A conversation: a session on its documents, and the name it is saved under.

Owns how a saved session is matched to its documents, taken up again and written after each turn.
Yields the session's events and prints nothing.
"""

from __future__ import annotations

import io
import os
import stat
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import BinaryIO, Protocol

from longread import history
from longread.config import Settings
from longread.errors import ContextError, InterruptedByUser, StoreError, UsageError
from longread.events import Answer, Answered, DocumentInfo, Event, Notice, PasswordFn
from longread.history import SavedSession, Turn
from longread.reading import ReadingLike

STDIN_SOURCE = "-"
FingerprintFn = Callable[[str, BinaryIO | None], str]


class SessionLike(Protocol):
    """What the command line needs of `longread.session.Session`."""

    @property
    def turns(self) -> Sequence[Turn]:
        """The finished turns, oldest first."""

    @property
    def documents(self) -> Sequence[DocumentInfo]:
        """The documents that are open."""

    @property
    def reading(self) -> ReadingLike:
        """What the model read and where its last answer looked; once the documents are open."""

    def open(
        self,
        sources: Sequence[str],
        *,
        pages: str | None = None,
        password: PasswordFn | None = None,
        stdin: BinaryIO | None = None,
    ) -> Iterator[Event]:
        """Read the documents; ends with Opened."""

    def ask(self, question: str) -> Iterator[Event]:
        """Answer a question; ends with Answer, also after Ctrl-C."""

    def ask_each(self, questions: Iterable[tuple[int, str]], most: int = ...) -> Iterator[Answered]:
        """Answer questions with their numbers from the documents alone, in no order."""

    def undo(self) -> bool:
        """Forget the last turn; False where there is none."""

    def configure(self, settings: Settings) -> None:
        """Take other settings for the next question."""

    def restore(self, turns: Sequence[Turn]) -> Iterator[Event]:
        """Read saved turns again."""

    def close(self) -> None:
        """Let go of the cache and the model."""


@dataclass(frozen=True)
class Matter:
    """What a conversation is about: documents as they were named, and their bytes' SHA-256."""

    sources: tuple[str, ...]
    sha256s: tuple[str, ...]  # "" for a pipe, which can be read only once
    pages: str | None
    stdin_data: bytes | None = None  # what came on standard input
    turns: tuple[Turn, ...] = ()
    created: str | None = None

    def check_can_be_saved(self) -> None:
        """Raise UsageError where a saved session could not be matched to its documents."""
        for source, sha256 in zip(self.sources, self.sha256s, strict=True):
            if not sha256:
                raise UsageError(f"{source} is a pipe, which no saved session can read again")


def gather(
    sources: Sequence[str],
    pages: str | None,
    stdin: BinaryIO | None,
    fingerprint: FingerprintFn,
    saved: SavedSession | None,
) -> Matter:
    """Settle the documents of a conversation, from the command line and a saved session.

    Without sources the saved ones are taken. UsageError where the two do not agree, DocumentError
    where a file cannot be read: before a model is fetched for it.
    """
    if not sources:
        if saved is None:
            raise UsageError("no document is named; give a file, or - for standard input")
        sources = saved.sources
    if sources.count(STDIN_SOURCE) > 1:
        raise UsageError("standard input (-) can be read only once")
    data = stdin.read() if stdin is not None and STDIN_SOURCE in sources else None
    sha256s = tuple(_sha256(source, data, fingerprint) for source in sources)
    if saved is None:
        return Matter(tuple(sources), sha256s, pages, data)
    if len(sha256s) != len(saved.sha256s):
        raise UsageError(_mismatch(saved, f"the number of documents is {len(saved.sha256s)}"))
    for source, sha256, saved_sha256 in zip(sources, sha256s, saved.sha256s, strict=True):
        if sha256 != saved_sha256:
            raise UsageError(_mismatch(saved, f"{source} is another file or has changed since"))
    if pages is not None and pages != saved.pages:
        raise UsageError(_mismatch(saved, f"its pages are {saved.pages or 'all'}"))
    return Matter(tuple(sources), sha256s, saved.pages, data, saved.turns, saved.created)


def _sha256(source: str, stdin_data: bytes | None, fingerprint: FingerprintFn) -> str:
    if source == STDIN_SOURCE:
        return fingerprint(source, io.BytesIO(stdin_data) if stdin_data is not None else None)
    try:
        if stat.S_ISFIFO(os.stat(source).st_mode):
            return ""
    except (OSError, ValueError):
        pass  # the fingerprint says what is wrong with it
    return fingerprint(source, None)


def _absolute(source: str) -> str:
    return source if source == STDIN_SOURCE else os.path.abspath(source)


def _mismatch(saved: SavedSession, why: str) -> str:
    names = ", ".join(Path(source).name for source in saved.sources)
    return (
        f"session {saved.name!r} is about {names} as it was: {why}; "
        "use another --session name for other documents"
    )


def _texts(turns: Sequence[Turn]) -> list[tuple[str, str]]:
    return [(turn.question, turn.answer.text) for turn in turns]


class Conversation:
    """Questions and answers on one matter; each turn is saved at once where there is a name."""

    def __init__(
        self,
        session: SessionLike,
        settings: Settings,
        matter: Matter,
        *,
        name: str | None = None,
        password: PasswordFn | None = None,
    ) -> None:
        self.session = session
        self.settings = settings
        self.name = name
        # What is on disk under the names of this conversation, as far as it knows.
        self._on_disk: dict[str, list[tuple[str, str]]] = {}
        if name is not None and matter.created is not None:
            self._on_disk[name] = _texts(matter.turns)
        self.matter = matter
        self._password = password
        self._created = matter.created or datetime.now(UTC).isoformat(timespec="seconds")

    def open(self) -> Iterator[Event]:
        """Read the documents and the saved turns; InterruptedByUser on Ctrl-C."""
        matter = self.matter
        stdin = io.BytesIO(matter.stdin_data) if matter.stdin_data is not None else None
        try:
            yield from self.session.open(
                matter.sources, pages=matter.pages, password=self._password, stdin=stdin
            )
            if matter.turns:
                yield from self.session.restore(matter.turns)
                number = len(matter.turns)
                turns = "1 earlier turn" if number == 1 else f"{number} earlier turns"
                yield Notice(f"session {self.name}: {turns}", level="info")
        except KeyboardInterrupt:
            # The store keeps whole blocks; of a short document there is none yet.
            kept = "; what was read in whole blocks of 4,096 tokens is kept for the next run"
            message = f"interrupted{'' if self.settings.no_cache else kept}"
            raise InterruptedByUser(message) from None

    def ask(self, question: str) -> Iterator[Event]:
        """Answer one question; call `keep` when the answer is there."""
        yield from self.session.ask(question)

    def ask_each(self, questions: Sequence[tuple[int, str]]) -> Iterator[Answered]:
        """Answer questions with their numbers: in no order and several at once, or as turns.

        Turns they are where the conversation has a name; each is saved at once, and one that
        Ctrl-C ended is the last.
        """
        if self.name is None:
            yield from self.session.ask_each(questions)
            return
        for number, question in questions:
            try:
                answer = [event for event in self.ask(question) if isinstance(event, Answer)][-1]
            except ContextError as error:
                yield Answered(number, why_not=str(error))
                continue
            self.keep()
            yield Answered(number, answer)
            if answer.finish_reason == "interrupted":
                raise KeyboardInterrupt

    def keep(self) -> None:
        """Save the turns, where the conversation has a name."""
        if self.name is not None:
            self.save(self.name)

    def reconfigure(self, settings: Settings) -> None:
        """Take other settings for the next question; UsageError leaves the old ones."""
        self.session.configure(settings)
        self.settings = settings

    def save(self, name: str) -> Path:
        """Write the turns under `name`, which the conversation keeps from then on.

        Writes over nothing that it does not know: UsageError where another conversation has that
        name, StoreError where another process has gone on with this one.
        """
        self.matter.check_can_be_saved()
        if history.exists(self.settings.sessions_dir, name):
            if name not in self._on_disk:
                raise UsageError(
                    f"there is a session {name!r} already; take another name, or remove that one "
                    f"with `longread sessions rm {name}`"
                )
            there = history.load(self.settings.sessions_dir, name)
            if _texts(there.turns) != self._on_disk[name]:
                raise StoreError(
                    f"another longread process has gone on with session {name!r}, so this turn "
                    "was not saved; ask again, or save the chat under another name with /save"
                )
        path = history.save(self.settings.sessions_dir, self._saved(name))
        self.name = name
        self._on_disk[name] = _texts(self.session.turns)
        return path

    def export(self) -> SavedSession:
        """Return the conversation as it would be saved."""
        return self._saved(self.name or "conversation")

    def _saved(self, name: str) -> SavedSession:
        model = self.settings.model
        return SavedSession(
            name=name,
            created=self._created,
            # A file or folder is still meant when the session is taken up from elsewhere.
            model=os.path.abspath(model) if os.path.exists(model) else model,
            sources=tuple(_absolute(source) for source in self.matter.sources),
            sha256s=self.matter.sha256s,
            pages=self.matter.pages,
            turns=tuple(self.session.turns),
        )
