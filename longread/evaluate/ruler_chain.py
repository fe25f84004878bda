"""RULER's vt task: a chain of variables that take one value, in lines of noise."""

from __future__ import annotations

import random
import string
from dataclasses import dataclass

from longread.evaluate.ruler_length import draws_for, longest
from longread.evaluate.ruler_needles import NOISE
from longread.evaluate.ruler_words import distinct, letters
from longread.evaluate.task import Materials, Question, Sample

_NUM_NAMES = 5  # one chain of 4 hops
_EXAMPLE_LINES = 15  # of noise: what RULER's 500 tokens for its example come to


@dataclass(eq=False)
class Chain:
    """The task vt; a solved example with names of three letters comes first."""

    materials: Materials
    name: str = "vt"

    def sample(self, number: int, num_tokens: int, seed: int) -> Sample:
        """Sample `number`; its size is counted in lines of noise."""

        def build(num_lines: int) -> Sample:
            draws = draws_for(self.name, number, num_tokens, seed)
            shown, question = _problem(_EXAMPLE_LINES, 3, draws)
            solved = f"{question.answer_prefix}{' '.join(question.references)}"
            document, asked = _problem(num_lines, 5, draws)
            example = f"{shown}\nQuestion: {question.text}{solved}\n\n"
            return Sample(self.name, number, example + document, (asked,))

        return longest(build, self.materials.count_tokens, num_tokens, least=_NUM_NAMES)


def _problem(num_lines: int, name_length: int, draws: random.Random) -> tuple[str, Question]:
    drawn = distinct(letters(string.ascii_uppercase, name_length), draws)
    names = [next(drawn) for _ in range(_NUM_NAMES)]
    value = draws.randint(10_000, 99_999)
    chain = [f"VAR {names[0]} = {value}"]
    # The space at the end is RULER's.
    chain += [f"VAR {new} = VAR {old} " for old, new in zip(names, names[1:], strict=False)]
    lines = [NOISE] * num_lines
    for place in sorted(draws.sample(range(num_lines), len(chain)), reverse=True):
        lines.insert(place, chain.pop())
    document = (
        "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n"
        + "\n".join(lines)
    )
    question = Question(
        f"Find all variables that are assigned the value {value} in the text above.",
        tuple(names),
        max_tokens=30,
        answer_prefix=(
            " Answer: According to the chain(s) of variable assignment in the text above, "
            f"{_NUM_NAMES} variables are assigned the value {value}, they are: "
        ),
    )
    return document, question
