"""Text of books in sentences, cut to a number of tokens, with other text strewn into it.

Owns how a document comes to its length by whole sentences. Paragraphs stay apart by an empty line;
all other white space is single spaces.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from longread.errors import UsageError
from longread.evaluate.ruler_essay import sentences
from longread.evaluate.task import Materials, read_text

NOVELS = tuple(
    f"books/txt/{name}.txt" for name in ("moby_dick", "northanger_abbey", "pride_and_prejudice")
)


def normal(text: str) -> str:
    """Paragraphs without line ends, an empty line between them."""
    paragraphs = (" ".join(part.split()) for part in re.split(r"\n\s*\n", text))
    return "\n\n".join(part for part in paragraphs if part)


def units(text: str) -> list[str]:
    """Sentences of a `normal` text, each with the white space before it: joined they are it.

    Tokenizers join a space to the word after it, so the tokens of units add up to their text's.
    """
    found = []
    for number, paragraph in enumerate(text.split("\n\n")):
        for place, sentence in enumerate(sentences(paragraph)):
            before = " " if place else "\n\n" if number else ""
            found.append(before + sentence)
    return found


def cut(
    book: Sequence[str], start: int, num_tokens: int, count_tokens: Callable[[str], int]
) -> list[str]:
    """The most units from `start` on in `num_tokens`; past its end the book begins again."""
    taken: list[str] = []
    room, grows = num_tokens, True
    while grows:
        grows = False
        while room >= (used := count_tokens(unit := book[(start + len(taken)) % len(book)])):
            taken.append(unit)
            room -= used
            grows = True
        # Where the units' counts add up to more than their text has, a few more may fit.
        room = num_tokens - count_tokens("".join(taken))
    while taken and count_tokens("".join(taken)) > num_tokens:
        taken.pop()
    return taken


@dataclass
class BookText:
    """Documents of novels' text; each novel is read once."""

    materials: Materials
    _books: dict[str, list[str]] = field(default_factory=dict, repr=False)

    def document(
        self,
        number: int,
        rng: random.Random,
        inserts: Sequence[tuple[float, str]],
        num_tokens: int,
    ) -> str:
        """At most `num_tokens` of a novel, from anywhere in it, with each insert at its depth.

        number: chooses the novel, in turn. inserts: depth, from 0 to 1 and ascending, and text with
        the white space before it. Raises UsageError where they do not fit.
        """
        name = NOVELS[number % len(NOVELS)]
        if name not in self._books:
            self._books[name] = units(normal(read_text(self.materials.path(name))))
        book, count_tokens = self._books[name], self.materials.count_tokens
        start = rng.randrange(len(book))
        num_needed = sum(count_tokens(text) for _, text in inserts)
        taken = cut(book, start, num_tokens - num_needed, count_tokens)
        while True:
            document = _strewn(taken, inserts)
            if count_tokens(document) <= num_tokens:
                return document
            if not taken:
                raise UsageError(
                    f"{num_tokens} tokens are too few for a document that must hold {num_needed}"
                )
            taken.pop()


def _strewn(taken: Sequence[str], inserts: Sequence[tuple[float, str]]) -> str:
    parts, done = [], 0
    for depth, text in inserts:
        place = round(depth * len(taken))
        parts += [*taken[done:place], text]
        done = place
    return "".join([*parts, *taken[done:]]).lstrip()


def check_number(name: str, number: int, num_samples: int, num_tokens: int) -> None:
    """Raises UsageError where a task of `num_samples` has no sample `number`."""
    if number >= num_samples:
        raise UsageError(f"{name} has {num_samples} samples of {num_tokens} tokens or fewer")
