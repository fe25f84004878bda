"""A session without a model: it yields what a real one does and remembers what it was asked."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import BinaryIO

import numpy as np

from longread.commands.run import Services
from longread.config import Settings
from longread.errors import UsageError
from longread.events import (
    Answer,
    Answered,
    CacheUse,
    Citation,
    DocumentInfo,
    Event,
    Notice,
    Opened,
    Passage,
    Progress,
    Selection,
    Text,
    Timings,
    Usage,
)
from longread.history import Turn, answer_settings
from longread.reading import Heat, ReadDocument, ReadPage

CACHE = CacheUse(hit=False, tokens_reused=0, tokens_prefilled=100, store_bytes=2_000_000, key="abc")
CITATION = Citation("book.txt", 12, "xii", "a quote [p. 3] with brackets", 0.5)
PASSAGE = Passage("book.txt", 12, "xii", "the passage [bold]text[/bold]", 0.125, 0.5, 1.0)
SELECTION = Selection(
    policy="tokenselect",
    vote="group",
    index="int8",
    budget=20,
    fraction_kept=0.25,
    passages=(PASSAGE,),
    strip=(0.0, 0.1, 0.7, 0.2),
)


def make_answer(text: str, finish_reason: str = "stop") -> Answer:
    """An answer with everything filled in."""
    return Answer(
        text=text,
        finish_reason=finish_reason,
        model="fake-model",
        citations=(CITATION,),
        usage=Usage(100, 0, 10, 5),
        cache=CACHE,
        selection=SELECTION,
        timings=Timings(1.0, 0.5, 0.25, 0.125, 1.5),
        truncated=False,
    )


def make_document(name: str) -> ReadDocument:
    """Twelve pages of two passages each; the last one's label is xii."""
    second = "In May, 1992, a quote [p. 3] with brackets was.\n"
    pages = []
    for number in range(1, 13):
        first = f"Page {number} says that the captain's name is Voss. "
        passages = ((0, len(first)), (len(first), len(first + second)))
        label = "xii" if number == 12 else None
        pages.append(ReadPage(number, label, first + second, passages))
    return ReadDocument(name, "text", tuple(pages))


def make_heat(num_passages: int, num_layers: int = 3, num_kv_heads: int = 2) -> Heat:
    """The heat of an answer of four tokens; its last passage is the hottest."""
    ramp = np.arange(1, num_passages + 1, dtype=np.float32)
    whole = np.tile(ramp / ramp.sum(), (num_layers, num_kv_heads, 1))
    chosen = (whole > whole.mean()).astype(np.float32)
    tokens = ("May", " 7,", " 19", "92.")
    token_attention = np.stack([np.roll(whole[0, 0], shift) for shift in range(len(tokens))])
    return Heat(
        attention=whole / (num_layers * num_kv_heads),
        chosen=chosen,
        tokens=tokens,
        token_attention=token_attention,
        token_chosen=(token_attention > token_attention.mean()).astype(np.float32),
    )


@dataclass
class FakeReading:
    """What a fake session read; it has a heat where it was told to follow."""

    documents: tuple[ReadDocument, ...]
    follows_tokens: bool = False
    answered: bool = False

    def heat(self) -> Heat:
        if not (self.follows_tokens and self.answered):
            raise UsageError("not followed")
        num_passages = sum(len(page.passages) for doc in self.documents for page in doc.pages)
        return make_heat(num_passages)


@dataclass
class FakeSession:
    """Answers every question with `reply`, in pieces; `at_open` and `at_ask` may raise or add."""

    settings: Settings
    reply: str = "May 7, 1992."
    at_open: Callable[[], Event | None] = lambda: None
    at_ask: Callable[[str], Event | None] = lambda question: None
    turns: list[Turn] = field(default_factory=list)
    documents: tuple[DocumentInfo, ...] = ()
    reading: FakeReading = field(default_factory=lambda: FakeReading(()))
    opened_with: dict[str, object] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)  # several at once
    restored: int = 0
    closed: bool = False

    def open(
        self,
        sources: Sequence[str],
        *,
        pages: str | None = None,
        password: Callable[[str], str | None] | None = None,
        stdin: BinaryIO | None = None,
    ) -> Iterator[Event]:
        self.opened_with = {
            "sources": tuple(sources),
            "pages": pages,
            "password": password("book.txt") if password else None,
            "stdin": stdin.read() if stdin else None,
        }
        yield Progress("prefill", 50, 100, "tokens")
        if event := self.at_open():
            yield event
        yield Progress("prefill", 100, 100, "tokens")
        names = [Path(source).name for source in sources]
        self.documents = tuple(DocumentInfo(name, 12, 100) for name in names)
        self.reading = FakeReading(tuple(make_document(name) for name in names))
        yield Opened(self.documents, CACHE)

    def ask(self, question: str) -> Iterator[Event]:
        said = []
        finish_reason = "stop"
        try:
            if event := self.at_ask(question):
                yield event
            for word in self.reply.split(" "):
                piece = f" {word}" if said else word
                said.append(piece)
                yield Text(piece)
        except KeyboardInterrupt:
            finish_reason = "interrupted"
        answer = make_answer("".join(said), finish_reason)
        selection = replace(answer.selection, policy=self.settings.policy)
        answer = replace(answer, selection=selection)
        self.turns.append(Turn(question, answer, answer_settings(self.settings)))
        self.reading.answered = self.reading.follows_tokens
        yield answer

    def ask_each(self, questions: Iterable[tuple[int, str]], most: int = 2) -> Iterator[Answered]:
        """Pairs of answers, the later one first, and no room for a question of one letter."""
        for pair in _pairs(list(questions)):
            for number, question in reversed(pair):
                self.at_ask(question)
                self.asked.append(question)
                if len(question) == 1:
                    yield Answered(number, why_not="too long for the window")
                else:
                    yield Answered(number, make_answer(self.reply))

    def undo(self) -> bool:
        if not self.turns:
            return False
        self.turns.pop()
        self.reading.answered = False
        return True

    def configure(self, settings: Settings) -> None:
        if settings.budget == "13%":
            raise UsageError("no luck")
        self.settings = settings

    def restore(self, turns: Sequence[Turn]) -> Iterator[Event]:
        self.turns.extend(turns)
        self.restored += len(turns)
        yield Progress("restore", len(turns), len(turns), "turns")

    def close(self) -> None:
        self.closed = True


def _pairs(questions: list[tuple[int, str]]) -> list[list[tuple[int, str]]]:
    return [questions[start : start + 2] for start in range(0, len(questions), 2)]


class FakeServices:
    """Services whose sessions are fakes, kept in `sessions`; documents are hashed plainly."""

    def __init__(
        self,
        reply: str = "May 7, 1992.",
        at_open: Callable[[], Event | None] = lambda: None,
        at_ask: Callable[[str], Event | None] = lambda question: None,
    ) -> None:
        self.sessions: list[FakeSession] = []
        self._options = {"reply": reply, "at_open": at_open, "at_ask": at_ask}

    @property
    def last(self) -> FakeSession:
        return self.sessions[-1]

    def services(self) -> Services:
        return Services(self._make, self._fingerprint)

    def _make(self, settings: Settings) -> FakeSession:
        self.sessions.append(FakeSession(settings, **self._options))  # type: ignore[arg-type]
        return self.sessions[-1]

    def _fingerprint(self, source: str, stdin: BinaryIO | None) -> str:
        data = stdin.read() if stdin is not None else Path(source).read_bytes()
        return hashlib.sha256(data).hexdigest()


def note(message: str) -> Notice:
    """A warning."""
    return Notice(message)
