"""Conversations whose next turn needs what the last one skipped: who evicts for good, fails here.

Facts of one sentence each stand in a novel's text. Each turn asks for another one, never the
neighbour of the one before, so a policy that keeps only what a question needed has lost the next
answer. The scores by kind are those by turn.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

from longread.evaluate.book_text import BookText
from longread.evaluate.task import Materials, Question, Sample, Task

NUM_FACTS, NUM_TURNS, STRIDE = 6, 3, 2
MAX_TOKENS = 24

TOWNS = (
    "Alderby",
    "Brackwell",
    "Corfield",
    "Dunmere",
    "Eskham",
    "Farnstow",
    "Gresley",
    "Hathersby",
)
PEOPLE = ("Adam Pell", "Clara Finch", "Edwin Stroud", "Grace Holt", "Lydia Marsh", "Owen Tarrant")
COLOURS = ("blue", "green", "yellow", "purple", "orange", "grey")
TREES = ("oak", "willow", "walnut", "cedar", "mulberry", "chestnut", "hawthorn", "sycamore")
PETS = ("Pepper", "Biscuit", "Thimble", "Marbles", "Nettle", "Pudding", "Saffron", "Button")
DISHES = ("plum cake", "eel pie", "barley soup", "ginger bread", "smoked trout", "pear tart")
CARGOES = ("cinnamon", "marble", "saltpetre", "walnuts", "indigo", "copper", "raisins", "hemp")
THINGS = ("mirror", "clock", "bookcase", "barometer", "tapestry", "spinet", "wardrobe", "globe")


@dataclass(frozen=True)
class Fact:
    """A statement and its question: {of} tells two alike apart, {value} is the answer."""

    statement: str
    question: str
    values: tuple[str, ...]
    of: tuple[str, ...] = ("",)


FACTS = (
    Fact(
        "The password of the {of} door is {value}.",
        "What is the password of the {of} door?",
        tuple(map(str, range(1000, 10_000))),
        COLOURS,
    ),
    Fact(
        "The train to {of} leaves from platform {value}.",
        "From which platform does the train to {of} leave?",
        tuple(map(str, range(11, 100))),
        TOWNS,
    ),
    Fact(
        "The treasure of {of} is buried under the old {value}.",
        "Under which old tree is the treasure of {of} buried?",
        TREES,
        PEOPLE,
    ),
    Fact(
        "The gardener's cat is called {value}.",
        "What is the gardener's cat called?",
        PETS,
    ),
    Fact(
        "The best thing to eat in {of} is the {value}.",
        "What is the best thing to eat in {of}?",
        DISHES,
        TOWNS,
    ),
    Fact(
        "{of} paid {value} crowns for the white mare.",
        "How many crowns did {of} pay for the white mare?",
        tuple(map(str, range(101, 1000))),
        PEOPLE,
    ),
    Fact(
        "The ship in the harbour of {of} carries nothing but {value}.",
        "What does the ship in the harbour of {of} carry?",
        CARGOES,
        TOWNS,
    ),
    Fact(
        "The key to the cellar hangs behind the {value}.",
        "Behind what does the key to the cellar hang?",
        THINGS,
    ),
    Fact(
        "The great bell of {of} was cast in the year {value}.",
        "In which year was the great bell of {of} cast?",
        tuple(map(str, range(1402, 1799))),
        TOWNS,
    ),
    Fact(
        "The room that {of} took at the inn is number {value}.",
        "What is the number of the room that {of} took at the inn?",
        tuple(map(str, range(101, 1000))),
        PEOPLE,
    ),
)


@dataclass
class FollowUps:
    """A conversation a sample; the length holds its questions and all answers but the last."""

    materials: Materials
    name: str = "follow_ups"
    _text: BookText = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._text = BookText(self.materials)

    def sample(self, number: int, num_tokens: int, seed: int) -> Sample:
        rng = random.Random(f"{self.name}/{seed}/{number}")
        inserts, questions = [], []
        for place, fact in enumerate(rng.sample(FACTS, NUM_FACTS)):
            words = {"of": rng.choice(fact.of), "value": rng.choice(fact.values)}
            depth = (place + rng.uniform(0.1, 0.9)) / NUM_FACTS
            inserts.append((depth, " " + fact.statement.format(**words)))
            questions.append((fact.question.format(**words), words["value"]))
        first = rng.randrange(NUM_FACTS)
        asked = [questions[(first + STRIDE * turn) % NUM_FACTS] for turn in range(NUM_TURNS)]
        turns = tuple(
            Question(text, (value,), "words", MAX_TOKENS, kind=f"turn {turn}")
            for turn, (text, value) in enumerate(asked, 1)
        )
        taken = sum(self.materials.count_tokens(turn.text) for turn in turns)
        room = num_tokens - taken - (NUM_TURNS - 1) * MAX_TOKENS
        document = self._text.document(number, rng, inserts, room)
        return Sample(self.name, number, document, turns, in_conversation=True)


TASKS: dict[str, Callable[[Materials], Task]] = {"follow_ups": FollowUps}
