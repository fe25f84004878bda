"""Long answers that need their own earlier lines: the reasoning case of a cache's budget.

Visitors are told one by one in a novel's text, each with a number in words, or "as many as before"
where one comes again. The answer lists them with figures. Who comes again has the figure in the
answer's own earlier lines, soon out of any window of recent tokens; the document has it once, in
words. So in 2K tokens of answer the older ones must compete with the document's. A model of 0.5B
parameters holds this form, and loses a running total within ten lines.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise

from longread.errors import UsageError
from longread.evaluate.book_text import BookText
from longread.evaluate.task import ANSWER_ROOM, Materials, Question, Sample, Task, right_lines

FIRST_NAMES = (
    *("Adam", "Agnes", "Albert", "Alice", "Amy", "Andrew", "Anna", "Arthur", "Barbara", "Ben"),
    *("Bertha", "Brian", "Carl", "Caroline", "Catherine", "Charles", "Chloe", "Clara", "Claude"),
    *("Conrad", "Daisy", "Daniel", "David", "Diana", "Donald", "Dora", "Edgar", "Edith", "Edward"),
    *("Eleanor", "Ellen", "Emma", "Eric", "Ethel", "Eva", "Felix", "Fiona", "Flora", "Frances"),
    *("Frank", "Fred", "George", "Gerald", "Gloria", "Grace", "Hannah", "Harold", "Harriet"),
    *("Helen", "Henry", "Hilda", "Hugo", "Ida", "Irene", "Isaac", "Ivan", "Jack", "Jacob", "Jane"),
    *("Jasper", "Joan", "John", "Joseph", "Julia", "Karen", "Karl", "Kate", "Keith", "Kevin"),
    *("Laura", "Leo", "Lewis", "Lily", "Linda", "Louis", "Lucy", "Luke", "Mabel", "Marcus"),
    *("Maria", "Mark", "Martha", "Martin", "Matilda", "Max", "Michael", "Mona", "Monica", "Nancy"),
    *("Nathan", "Neil", "Nina", "Noah", "Nora", "Oliver", "Olivia", "Oscar", "Otto", "Owen"),
    *("Pamela", "Paul", "Paula", "Peter", "Philip", "Rachel", "Ralph", "Rebecca", "Richard"),
    *("Robert", "Roger", "Rosa", "Rupert", "Ruth", "Samuel", "Sarah", "Sheila", "Simon", "Sophie"),
    *("Stella", "Susan", "Teresa", "Thomas", "Tina", "Ursula", "Vera", "Victor", "Walter", "Wendy"),
)
LAST_NAMES = (
    *("Archer", "Baker", "Cooper", "Dyer", "Farmer", "Glover", "Hunter", "Mason", "Miller"),
    *("Page", "Porter", "Shepherd", "Smith", "Taylor", "Turner", "Weaver"),
)
TENS = ("twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")
ONES = ("one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
# No "eighty": small models write it as 8.
NUMBERS = {
    f"{ten}-{one}": 10 * tens + ones
    for tens, ten in enumerate(TENS, 2)
    for ones, one in enumerate(ONES, 1)
}

WORDING = (
    "List the visitors line by line, each with the number of sheep. Write every number in figures, "
    "never in words. Where a visitor came with as many sheep as before, write the number that you "
    "wrote for that visitor before."
)
# The answer's beginning shows the form: who is new (None), and who comes again from which line.
SHOWN = (None, None, None, 0, None, 1, None, 2, None, None, 4, None)
SHARE_AGAIN = 0.4
LEAST_LINES = 2 * len(SHOWN)
_NUM_PARTS = 5


@dataclass
class LongAnswers:
    """As many visits as a right answer of `max_tokens` has lines; right lines are its score.

    `drift` tells where along the answer they are. At 2,048 tokens of
    answer the document holds about 3,000 of visits, so a length of 6K is the shortest.
    """

    materials: Materials
    name: str = "long_answers"
    max_tokens: int = 2048
    _text: BookText = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._text = BookText(self.materials)

    def sample(self, number: int, num_tokens: int, seed: int) -> Sample:
        count_tokens = self.materials.count_tokens
        rng = random.Random(f"{self.name}/{seed}/{number}")
        told, lines = self._visits(rng)
        prefix = "".join(f"{line}\n" for line in lines[: len(SHOWN)])
        wanted = tuple(lines[len(SHOWN) :])
        question = Question(
            WORDING,
            wanted,
            "lines",
            self.max_tokens,
            prefix,
            measure=lambda answer: drift(answer, wanted),
        )
        room = num_tokens - count_tokens(WORDING) - count_tokens(prefix)
        room -= max(0, self.max_tokens - ANSWER_ROOM)  # a length counts the answer too
        insert = (rng.uniform(0.1, 0.9), "\n\n" + "\n".join(told))
        document = self._text.document(number, rng, [insert], room)
        return Sample(self.name, number, document, (question,))

    def _visits(self, rng: random.Random) -> tuple[list[str], list[str]]:
        """What is told of each visit, and the lines of a right answer."""
        names = [f"{name} {rng.choice(LAST_NAMES)}" for name in FIRST_NAMES]
        rng.shuffle(names)
        visitors: list[str] = []  # of each line
        numbers: dict[str, int] = {}
        told: list[str] = []
        lines: list[str] = []
        room = self.max_tokens
        while True:
            again = not names or rng.random() < SHARE_AGAIN
            if len(lines) < len(SHOWN):
                shown = SHOWN[len(lines)]
                name = names.pop() if shown is None else visitors[shown]
            else:
                name = rng.choice(_longest_away(visitors)) if again else names.pop()
            sheep = "as many sheep as before"
            if name not in numbers:
                number = rng.choice(list(NUMBERS))
                numbers[name] = NUMBERS[number]
                sheep = f"{number} sheep"
            place = len(lines) + 1
            line = f"{place}. {name}: {numbers[name]}"
            if place > len(SHOWN):
                room -= self.materials.count_tokens(f"{line}\n")
            if room < 0:
                break
            visitors.append(name)
            told.append(f"Visitor {place} was {name} with {sheep}.")
            lines.append(line)
        if len(lines) < LEAST_LINES:
            raise UsageError(f"{self.name} needs answers of more than {self.max_tokens} tokens")
        return told, lines


def drift(answer: str, references: tuple[str, ...]) -> dict[str, float]:
    """The share of right lines in each fifth of the answer."""
    right = right_lines(answer, references)
    bounds = [len(right) * part // _NUM_PARTS for part in range(_NUM_PARTS + 1)]
    return {
        f"part {part} of {_NUM_PARTS}": sum(right[start:end]) / max(end - start, 1)
        for part, (start, end) in enumerate(pairwise(bounds), 1)
    }


def _longest_away(visitors: list[str]) -> list[str]:
    """The half of all visitors whose last visits are the oldest."""
    last_first = list(dict.fromkeys(reversed(visitors)))
    return last_first[len(last_first) // 2 :]


TASKS: dict[str, Callable[[Materials], Task]] = {"long_answers": LongAnswers}
