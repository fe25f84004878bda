"""RULER's niah tasks: sentences with a key and a value, hidden in lines, prose or other needles."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from longread.evaluate.ruler_essay import BOOKS, Essay
from longread.evaluate.ruler_length import draws_for, longest
from longread.evaluate.ruler_words import WordLists, distinct, seven_digits, uuid4
from longread.evaluate.task import Materials, Question, Sample

NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
_DEPTHS = [round(100 * step / 39) for step in range(40)]
_ESSAY_STEP = 25  # words
Kind = Literal["words", "numbers", "uuids"]


@dataclass(eq=False)
class Needles:
    """One niah task; every key has `num_values` needles, and `num_queries` keys are asked for."""

    materials: Materials
    name: str
    haystack: Literal["noise", "essay", "needle"]
    keys: Kind = "words"
    values: Kind = "numbers"
    num_keys: int = 1
    num_values: int = 1
    num_queries: int = 1

    def __post_init__(self) -> None:
        self._lists = WordLists.load()
        self._books = [self.materials.path(book) for book in BOOKS if self.haystack == "essay"]

    def sample(self, number: int, num_tokens: int, seed: int) -> Sample:
        """Sample `number`; its size is counted in lines, or in words for prose."""

        def build(size: int) -> Sample:
            return self._build(number, size, draws_for(self.name, number, num_tokens, seed))

        least, step = (100, _ESSAY_STEP) if self.haystack == "essay" else (8, 1)
        return longest(build, self.materials.count_tokens, num_tokens, least=least, step=step)

    def _build(self, number: int, size: int, draws: random.Random) -> Sample:
        keys = distinct(self._drawing(self.keys), draws)
        values = distinct(self._drawing(self.values), draws)
        wanted = {next(keys): self._some(values) for _ in range(self.num_keys)}
        asked = draws.sample(list(wanted), self.num_queries)
        needles = [self._needle(key, value) for key, those in wanted.items() for value in those]
        draws.shuffle(needles)
        if self.haystack == "essay":
            context = self._in_prose(size, needles, draws)
        else:
            lines = [NOISE] * size
            if self.haystack == "needle":
                lines = [self._needle(next(keys), next(values)) for _ in range(size)]
            for place in sorted(draws.sample(range(size), len(needles)), reverse=True):
                lines.insert(place, needles.pop())
            context = "\n".join(lines)
        return Sample(
            self.name,
            number,
            self._document(context),
            (self._question(asked, tuple(value for key in asked for value in wanted[key])),),
        )

    def _some(self, values: Iterator[str]) -> list[str]:
        return [next(values) for _ in range(self.num_values)]

    def _drawing(self, kind: Kind) -> Callable[[random.Random], str]:
        return {"words": self._lists.pair, "numbers": seven_digits, "uuids": uuid4}[kind]

    def _needle(self, key: str, value: str) -> str:
        return f"One of the special magic {self.values} for {key} is: {value}."

    @cached_property
    def _essay(self) -> Essay:
        return Essay.load(self._books)

    def _in_prose(self, num_words: int, needles: list[str], draws: random.Random) -> str:
        texts = self._essay.first(num_words)
        depths = draws.sample(_DEPTHS, len(needles))
        for place in sorted((len(texts) * depth // 100 for depth in depths), reverse=True):
            texts.insert(place, needles.pop())
        return " ".join(texts)

    @property
    def _asks_one(self) -> bool:
        return self.num_values * self.num_queries == 1

    def _document(self, context: str) -> str:
        some, are, kind = (
            ("A", "is", self.values[:-1]) if self._asks_one else ("Some", "are", self.values)
        )
        return (
            f"{some} special magic {kind} {are} hidden within the following text. Make sure to "
            f"memorize it. I will quiz you about the {kind} afterwards.\n{context}"
        )

    def _question(self, keys: list[str], references: tuple[str, ...]) -> Question:
        asked = keys[0] if len(keys) == 1 else f"{', '.join(keys[:-1])}, and {keys[-1]}"
        what, are, kind = (
            ("is", "is", self.values[:-1]) if self._asks_one else ("are all", "are", self.values)
        )
        of_keys = f"the special magic {kind} for {asked} mentioned in the provided text"
        return Question(
            f"What {what} {of_keys}?",
            references,
            max_tokens=128,
            answer_prefix=f" {of_keys[0].upper()}{of_keys[1:]} {are}",
        )
