"""Eight similar needles in one document, and a question for the one at a certain depth.

The design's measurement of what a selection finds (needles after Kamradt 2023; many alike after
RULER, arXiv:2404.06654): sentences of one form, names alike, so that no needle is found by being
the odd sentence in a novel.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

from longread.evaluate.book_text import BookText
from longread.evaluate.task import Materials, Question, Sample, Task

NUM_NEEDLES = 8
DEPTHS = tuple(range(5, 100, 10))  # percent: the middle of each tenth
ADJECTIVES = (
    *("amber", "crimson", "golden", "green", "grey", "indigo"),
    *("ivory", "purple", "scarlet", "silver", "violet", "white"),
)
NAMES = (
    *("Marlow", "Marlin", "Marley", "Marlett", "Marden", "Marston"),
    *("Harlow", "Harlan", "Harley", "Harlett", "Harden", "Harston"),
    *("Barlow", "Barlett", "Carlow", "Carden"),
)


@dataclass
class Needles:
    """Samples go through DEPTHS in turn; a question's kind names its depth ("depth 35%")."""

    materials: Materials
    name: str = "needles"
    _text: BookText = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._text = BookText(self.materials)

    def sample(self, number: int, num_tokens: int, seed: int) -> Sample:
        rng = random.Random(f"{self.name}/{seed}/{number}")
        asked = DEPTHS[number % len(DEPTHS)]
        others = rng.sample([depth for depth in DEPTHS if depth != asked], NUM_NEEDLES - 1)
        depths = sorted([asked, *others])
        adjectives = rng.sample(ADJECTIVES, NUM_NEEDLES)
        names = rng.sample(NAMES, NUM_NEEDLES)
        codes = rng.sample(range(100_000, 1_000_000), NUM_NEEDLES)
        needles = [
            (depth / 100, f" The {adjective} code of {name} is {code}.")
            for depth, adjective, name, code in zip(depths, adjectives, names, codes, strict=True)
        ]
        own = depths.index(asked)
        question = Question(
            f"What is the {adjectives[own]} code of {names[own]}?",
            (str(codes[own]),),
            scoring="words",
            kind=f"depth {asked}%",
        )
        room = num_tokens - self.materials.count_tokens(question.text)
        document = self._text.document(number, rng, needles, room)
        return Sample(self.name, number, document, (question,))


TASKS: dict[str, Callable[[Materials], Task]] = {"needles": Needles}
