"""Co-reference: an invented name said once, fillers, and a question that only the name answers.

TokenButler's task (arXiv:2503.07518) with lists of our own: "{introduction} {name}. {fillers}
{question}: {name}". The paper forces the answer and counts wrong tokens of the name; here the model
writes it after "{question}:". `coreference_far` puts a novel's text between name and fillers.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from longread.errors import UsageError
from longread.evaluate.book_text import BookText
from longread.evaluate.coreference_lists import FOOD, MATH, NAMES, PHILOSOPHY, PLACES
from longread.evaluate.task import Materials, Question, Sample, Task

# How many fillers of each kind: about 330 tokens in all, as in the paper.
FILLERS = ((PHILOSOPHY, 5), (FOOD, 5), (MATH, 4))
NAME_TOKENS = range(3, 6)


@dataclass
class Coreference:
    """far: fill up to the length, so that the name stands almost `num_tokens` back."""

    materials: Materials
    name: str = "coreference"
    far: bool = False
    _text: BookText = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._text = BookText(self.materials)

    def sample(self, number: int, num_tokens: int, seed: int) -> Sample:
        """Where no name has 3 to 5 tokens of this model, any of them is taken."""
        count_tokens = self.materials.count_tokens
        rng = random.Random(f"coreference/{seed}/{number}")
        introduction, asked = rng.choice(PLACES)
        names = [name for name in NAMES if count_tokens(f" {name}") in NAME_TOKENS] or NAMES
        name = rng.choice(names)
        fillers = [text for kind, amount in FILLERS for text in rng.sample(kind, amount)]
        encode = self.materials.encode
        question = Question(
            f"{asked}? Answer with the name alone.",
            (name,),
            "any",
            max_tokens=16,
            answer_prefix=f"{asked}:",
            copied=name,
            measure=encode and (lambda said: {"name tokens": token_accuracy(said, name, encode)}),
        )
        room = num_tokens - count_tokens(question.text) - count_tokens(question.answer_prefix)
        first, rest = f"{introduction} {name}.", "".join(f" {text}" for text in fillers)
        if self.far:
            document = self._text.document(number, rng, [(0.0, first), (1.0, rest)], room)
        else:
            document = first + rest
            if count_tokens(document) > room:
                least = count_tokens(document) + num_tokens - room
                raise UsageError(f"a sample of {self.name} takes {least} tokens, not {num_tokens}")
        return Sample(self.name, number, document, (question,))


def token_accuracy(answer: str, name: str, encode: Callable[[str], Sequence[int]]) -> float:
    """The share of the name's tokens that the answer has in their places, from its start.

    The answer is free: after its first wrong token the rest is seldom right, so this is at most the
    paper's figure, which puts the right tokens before each one.
    """
    said, wanted = encode(f" {answer.strip()}"), encode(f" {name}")
    return sum(one == other for one, other in zip(said, wanted, strict=False)) / len(wanted)


TASKS: dict[str, Callable[[Materials], Task]] = {
    "coreference": Coreference,
    "coreference_far": partial(Coreference, name="coreference_far", far=True),
}
