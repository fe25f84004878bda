"""RULER's qa tasks: a question of SQuAD or HotpotQA, its paragraphs among many others.

Below the number of paragraphs there are, these are RULER's. Above it RULER repeats them all, the
ones with the answer too; here all others are repeated, so that the answer's stand there once.
Paragraphs over a tenth of the length are not drawn: before one of them the prompt would end short.

Each seed takes the questions in an order of its own, the same for all lengths: every article is
asked about once before any comes twice, and so is every paragraph. So a few samples of one seed are
nearly independent, which is what an interval over samples takes for given.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

from longread.errors import UsageError
from longread.evaluate.ruler_length import draws_for, longest
from longread.evaluate.task import Materials, Question, Sample, read_text

_ANSWER_BRIEFLY = (
    "Answer the question based on the given documents. Only give me the answer and do not output "
    "any other words."
)
_CHARS_PER_TOKEN = 4  # about, of English prose


@dataclass(frozen=True)
class _Asked:
    article: int
    query: str
    answers: tuple[str, ...]
    gold: tuple[str, ...]  # paragraphs that always stand in the prompt
    related: tuple[str, ...] = ()  # paragraphs that come before any others


def _squad(data: Any) -> list[_Asked]:
    """Questions with an answer, each with the other paragraphs of its article as related."""
    found = []
    for number, article in enumerate(data["data"]):
        contexts = dict.fromkeys(paragraph["context"] for paragraph in article["paragraphs"])
        for paragraph in article["paragraphs"]:
            own = paragraph["context"]
            related = tuple(context for context in contexts if context != own)
            for asked in paragraph["qas"]:
                answers = tuple(dict.fromkeys(answer["text"] for answer in asked["answers"]))
                if answers and not asked.get("is_impossible", False):
                    found.append(_Asked(number, asked["question"], answers, (own,), related))
    return found


def _hotpotqa(data: Any) -> list[_Asked]:
    """Questions with the paragraphs that they come with, most of them there to distract."""
    found = []
    for number, asked in enumerate(data):
        texts = (f"{title}\n{''.join(parts)}" for title, parts in asked["context"])
        gold = tuple(dict.fromkeys(texts))
        found.append(_Asked(number, asked["question"], (asked["answer"],), gold))
    return found


def _spread(questions: Sequence[_Asked], draws: random.Random) -> list[_Asked]:
    """All questions at random, those first that no earlier one shares paragraph or article with."""
    of_paragraph: Counter[tuple[str, ...]] = Counter()
    of_article: dict[int, dict[tuple[str, ...], int]] = {}
    placed = []
    for place, asked in enumerate(draws.sample(questions, len(questions))):
        paragraphs = of_article.setdefault(asked.article, {})
        rank = paragraphs.setdefault(asked.gold, len(paragraphs))
        placed.append((of_paragraph[asked.gold], rank, place, asked))
        of_paragraph[asked.gold] += 1
    return [asked for *_, asked in sorted(placed, key=lambda entry: entry[:3])]


@dataclass(eq=False)
class DocumentQA:
    """One qa task over the questions of a file, each of them one sample of a seed."""

    materials: Materials
    name: str
    file: str
    read: Callable[[Any], list[_Asked]]

    def __post_init__(self) -> None:
        path = self.materials.path(self.file)
        try:
            self._questions = self.read(json.loads(read_text(path)))
            if not self._questions:
                raise ValueError("no questions")
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise UsageError(f"{path} does not hold the questions of {self.name}") from error
        texts = chain.from_iterable((*asked.gold, *asked.related) for asked in self._questions)
        self._texts = sorted(set(texts))

    def sample(self, number: int, num_tokens: int, seed: int) -> Sample:
        """Sample `number`; its size is counted in paragraphs.

        Raises UsageError past the last question: asked again it would not be a new sample.
        """
        if number >= len(self._questions):
            raise UsageError(
                f"{self.file} has {len(self._questions)} questions, and {self.name} takes one for "
                f"each sample: ask for at most {len(self._questions)} samples"
            )
        asked = _spread(self._questions, random.Random(f"{self.name}/{seed}"))[number]
        draws = draws_for(self.name, number, num_tokens, seed)
        related = draws.sample(asked.related, len(asked.related))
        placed = {*asked.gold, *related}
        most = num_tokens // 10 * _CHARS_PER_TOKEN
        far = [text for text in self._texts if text not in placed]
        far = [text for text in far if len(text) <= most] or far
        draws.shuffle(far)
        others = related + far
        if not others:
            raise UsageError(
                f"{self.file} has no paragraphs to hide those of sample {number} among"
            )

        def build(num_texts: int) -> Sample:
            missing = num_texts - len(asked.gold)
            repeated = others * -(-missing // len(others))
            texts = [*asked.gold, *repeated[:missing]]
            draws_for(f"{self.name} order", number, num_tokens, seed).shuffle(texts)
            return Sample(self.name, number, _document(texts), (_question(asked),))

        least = len(asked.gold)
        return longest(build, self.materials.count_tokens, num_tokens, least=least)


def _document(texts: list[str]) -> str:
    numbered = (f"Document {number}:\n{text}" for number, text in enumerate(texts, 1))
    return (
        f"{_ANSWER_BRIEFLY}\n\nThe following are given documents.\n\n"
        + "\n\n".join(numbered)
        + f"\n\n{_ANSWER_BRIEFLY}"
    )


def _question(asked: _Asked) -> Question:
    return Question(
        asked.query,
        asked.answers,
        scoring="any",
        max_tokens=32,
        answer_prefix=" Answer:",
    )


squad = partial(DocumentQA, name="qa_1", file="ruler/squad.json", read=_squad)
hotpotqa = partial(DocumentQA, name="qa_2", file="ruler/hotpotqa.json", read=_hotpotqa)
