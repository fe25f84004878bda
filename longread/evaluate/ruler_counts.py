"""RULER's tasks of counting: cwe, the commonest words of a list, and fwe, those of a coded text."""

from __future__ import annotations

import math
import random
import string
from dataclasses import dataclass

from longread.evaluate.ruler_length import draws_for, longest
from longread.evaluate.ruler_words import WordLists, distinct, letters
from longread.evaluate.task import Materials, Question, Sample

_NUM_COMMON = 10
# RULER makes its short lists below 4,096 tokens, counted with the chat template and the answer,
# which are not in the length of a sample: of a prompt of 4,096 about 3,900 are left for it.
_SHORT_BELOW = 3_600
_DOTS = "..."  # stands for the most frequent code, which is noise


@dataclass(frozen=True)
class _Repeats:
    common: int
    others: int


@dataclass(eq=False)
class CommonWords:
    """The task cwe; a solved example of few words comes first."""

    materials: Materials
    name: str = "cwe"

    def __post_init__(self) -> None:
        self._lists = WordLists.load()

    def sample(self, number: int, num_tokens: int, seed: int) -> Sample:
        """Sample `number`; its size is counted in different words."""
        is_short = num_tokens < _SHORT_BELOW
        repeats, shown_repeats = _Repeats(30, 3), _Repeats(10, 3)
        if is_short:
            repeats, shown_repeats = _Repeats(6, 1), _Repeats(3, 1)

        def build(num_words: int) -> Sample:
            draws = draws_for(self.name, number, num_tokens, seed)
            shown, solved = self._problem(20 if is_short else 40, shown_repeats, draws)
            document, asked = self._problem(num_words, repeats, draws)
            answer = _numbered(list(solved.references))
            example = f"{shown}\nQuestion: {solved.text}{solved.answer_prefix} {answer}\n"
            return Sample(self.name, number, example + document, (asked,))

        return longest(build, self.materials.count_tokens, num_tokens, least=2 * _NUM_COMMON)

    def _problem(
        self, num_words: int, repeats: _Repeats, draws: random.Random
    ) -> tuple[str, Question]:
        pool = self._lists.at_least(num_words)
        # All are shuffled and the first ones taken, so that a longer list begins with a shorter.
        draws.shuffle(pool)
        common, others = pool[:_NUM_COMMON], pool[_NUM_COMMON:num_words]
        words = common * repeats.common + others * repeats.others
        draws.shuffle(words)
        document = (
            "Below is a numbered list of words. In these words, some appear more often than "
            f"others. Memorize the ones that appear most often.\n{_numbered(words)}"
        )
        question = Question(
            "What are the 10 most common words in the above list?",
            tuple(common),
            max_tokens=120,
            answer_prefix=" Answer: The top 10 words that appear most often in the list are:",
        )
        return document, question


def _numbered(words: list[str]) -> str:
    return " ".join(f"{number}. {word}" for number, word in enumerate(words, 1))


@dataclass(eq=False)
class FrequentWords:
    """The task fwe: codes of six letters whose counts fall with the square of their rank."""

    materials: Materials
    name: str = "fwe"

    def sample(self, number: int, num_tokens: int, seed: int) -> Sample:
        """Sample `number`; its size is counted in words, those lost to rounding too."""

        def build(num_words: int) -> Sample:
            draws = draws_for(self.name, number, num_tokens, seed)
            drawn = distinct(letters(string.ascii_lowercase, 6), draws)
            codes = [_DOTS] + [next(drawn) for _ in range(max(4, num_tokens // 50 - 1))]
            words = []
            for rank, code in enumerate(codes, 1):
                words += [code] * int(num_words / rank**2 / (math.pi**2 / 6))
            draws.shuffle(words)
            return Sample(self.name, number, _coded_text(words), (_ask_codes(codes[1:4]),))

        # From 100 words on the fourth code is more frequent than the fifth.
        return longest(build, self.materials.count_tokens, num_tokens, least=100, step=10)


def _coded_text(words: list[str]) -> str:
    return (
        "Read the following coded text and track the frequency of each coded word. Find the three "
        f"most frequently appeared coded words. {' '.join(words)}"
    )


def _ask_codes(codes: list[str]) -> Question:
    return Question(
        "Do not provide any explanation. Please ignore the dots '....'. What are the three most "
        "frequently appeared words in the above coded text?",
        tuple(codes),
        max_tokens=50,
        answer_prefix=(
            " Answer: According to the coded text above, the three most frequently appeared words "
            "are:"
        ),
    )
