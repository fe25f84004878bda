"""Questions on whole books, or on windows of them around the passages that answer.

Owns the two tasks over books/qa: `books` asks of the books as they are, `books_counterfactual` of
books in which what answers was changed: a model that recalls instead of reading answers wrong
there. Questions that a book does not answer are counted apart ("unanswerable").
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import accumulate
from typing import Any

from longread.errors import UsageError
from longread.evaluate.book_text import check_number, normal, units
from longread.evaluate.task import Materials, Question, Sample, Task, read_text

BOOKS = ("us_constitution", "northanger_abbey", "us_army_survival_manual_fm21-76")
MAX_TOKENS = 48

# The same answer in other words: the question files have these for some answers only.
OTHER_WORDS = {
    **{"four years": "4 years", "five thousand": "5,000", "six hundred": "600", "seven": "7"},
    **{"eight": "8", "ten guineas": "10 guineas", "eleven": "11", "eighteen miles": "18 miles"},
    **{"nineteen": "19", "twenty miles": "20 miles", "thirty three": "33", "thirty-four": "34"},
    **{"fifty guineas": "50 guineas", "sixty dollars": "$60", "two thirds": "2/3"},
    **{"20th day of January": "January 20th", "27th day of January": "January 27"},
}


class _NoEvidence(Exception):
    """A question whose answer does not stand in its book."""


@dataclass(frozen=True)
class _Book:
    """A text in sentences, and its questions with the sentences from and to that answer them."""

    units: list[str]
    num_tokens: list[int]  # of each unit
    answerable: list[tuple[int, int, Question]]  # first and last unit, in the book's order
    unanswerable: list[Question]


@dataclass(frozen=True)
class _Piece:
    """Units that must stand together in one document, and what is asked of it."""

    book: _Book
    first: int
    last: int
    questions: tuple[Question, ...]


@dataclass
class BooksQA:
    """Each question is asked once, of a piece of its book; a piece has one to all of them.

    A book that fits is one piece. Otherwise neighbouring passages share a piece as long as they
    fill at most half of it, and the window is laid around them at random. Unanswerable questions
    go round the pieces.
    """

    materials: Materials
    name: str = "books"
    counterfactual: bool = False

    def __post_init__(self) -> None:
        self._paths = [
            (
                self.materials.path(f"books/qa/{name}.json"),
                self.materials.path(f"books/txt/{name}.txt"),
            )
            for name in BOOKS
        ]

    @cached_property
    def _books(self) -> list[_Book]:
        books = []
        for path, text_path in self._paths:
            text = normal(read_text(text_path))
            try:
                questions = self._questions(json.loads(read_text(path)))
                if questions:
                    books.append(self._load(text, questions))
            except _NoEvidence as error:
                raise UsageError(
                    f"{text_path} lacks what answers {error} of {path}: fetch both files again"
                ) from None
            except (ValueError, LookupError, TypeError, AttributeError) as error:
                raise UsageError(
                    f"{path} does not hold the questions of {self.name}: fetch the file again"
                ) from error
        return books

    def answerable(self) -> list[Question]:
        """The questions that the books answer, in their order."""
        return [question for book in self._books for _, _, question in book.answerable]

    def num_samples(self, num_tokens: int) -> int:
        """How many there are of a length."""
        return sum(len(self._pieces(book, num_tokens)) for book in self._books)

    def sample(self, number: int, num_tokens: int, seed: int) -> Sample:
        pieces = [piece for book in self._books for piece in self._pieces(book, num_tokens)]
        if not pieces:
            raise UsageError(f"no passage of {self.name} fits in {num_tokens} tokens")
        check_number(self.name, number, len(pieces), num_tokens)
        random.Random(f"{self.name}/{seed}").shuffle(pieces)
        piece = pieces[number]
        document = self._window(piece, num_tokens, random.Random(f"{self.name}/{seed}/{number}"))
        return Sample(self.name, number, document, piece.questions)

    def _questions(self, data: Any) -> list[dict[str, Any]]:
        questions = data["questions"]
        if self.counterfactual:
            return [question for question in questions if "counterfactual" in question]
        return list(questions)

    def _load(self, text: str, questions: list[dict[str, Any]]) -> _Book:
        edits = [question["counterfactual"] for question in questions if self.counterfactual]

        def edited(passage: str) -> str:
            for edit in edits:
                passage = passage.replace(edit["find"], edit["replace"])
            return passage

        text = edited(text)
        found = units(text)
        ends = list(accumulate(map(len, found)))
        answerable = []
        for question in questions:
            if not question["answerable"]:
                continue
            evidence = edited(question["evidence"])
            start = text.find(evidence)
            if start < 0:
                raise _NoEvidence(repr(question["question"]))
            first = sum(end <= start for end in ends)
            last = sum(end < start + len(evidence) for end in ends)
            right = question["answers"]
            if self.counterfactual:
                right = [question["counterfactual"]["new_answer"]]
            answerable.append((first, last, _asked(question["question"], right, evidence)))
        return _Book(
            found,
            [self.materials.count_tokens(unit) for unit in found],
            sorted(answerable, key=lambda passage: passage[:2]),
            [
                Question(question["question"], (), "refusal", MAX_TOKENS, kind="unanswerable")
                for question in questions
                if not question["answerable"]
            ],
        )

    def _pieces(self, book: _Book, num_tokens: int) -> list[_Piece]:
        asked = [question for _, _, question in book.answerable] + book.unanswerable
        room = num_tokens - self._longest(asked)
        if sum(book.num_tokens) <= room:
            return [_Piece(book, 0, len(book.units) - 1, tuple(asked))]
        groups: list[tuple[int, int, list[Question]]] = []
        for first, last, question in book.answerable:
            if sum(book.num_tokens[first : last + 1]) > room:
                continue
            if groups and sum(book.num_tokens[groups[-1][0] : last + 1]) <= room // 2:
                begin, end, questions = groups.pop()
                groups.append((begin, max(end, last), [*questions, question]))
            else:
                groups.append((first, last, [question]))
        return [
            _Piece(book, first, last, (*questions, *book.unanswerable[place :: len(groups)]))
            for place, (first, last, questions) in enumerate(groups)
        ]

    def _window(self, piece: _Piece, num_tokens: int, rng: random.Random) -> str:
        """Text around a piece's units, of as many tokens as its longest question leaves."""
        book = piece.book
        room = num_tokens - self._longest(piece.questions)
        first, end = piece.first, piece.last + 1
        slack = room - sum(book.num_tokens[first:end])
        before = rng.random() * slack
        while first > 0 and book.num_tokens[first - 1] <= before:
            first -= 1
            before -= book.num_tokens[first]
        slack = room - sum(book.num_tokens[first:end])
        while end < len(book.units) and book.num_tokens[end] <= slack:
            slack -= book.num_tokens[end]
            end += 1
        while first > 0 and book.num_tokens[first - 1] <= slack:
            first -= 1
            slack -= book.num_tokens[first]
        while True:
            document = "".join(book.units[first:end]).strip()
            if self.materials.count_tokens(document) <= room:
                return document
            if end > piece.last + 1:
                end -= 1
            elif first < piece.first:
                first += 1
            else:
                raise UsageError(f"a passage of {self.name} does not fit in {num_tokens} tokens")

    def _longest(self, questions: list[Question] | tuple[Question, ...]) -> int:
        return max(self.materials.count_tokens(question.text) for question in questions)


def _asked(text: str, answers: list[str], evidence: str) -> Question:
    if not (answers and isinstance(answers, list)):
        raise TypeError("answers are a list")
    others = [
        re.sub(rf"\b{words}\b", other, answer)
        for answer in answers
        for words, other in OTHER_WORDS.items()
    ]
    forms = tuple(dict.fromkeys([*answers, *others]))
    return Question(text, forms, "words", MAX_TOKENS, kind="answerable", evidence=evidence)


TASKS: dict[str, Callable[[Materials], Task]] = {
    "books": BooksQA,
    "books_counterfactual": partial(BooksQA, name="books_counterfactual", counterfactual=True),
}
