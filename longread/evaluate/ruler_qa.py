"""RULER's qa tasks: a question of SQuAD or HotpotQA, its paragraphs among many others.

Below the number of paragraphs there are, these are RULER's. Above it RULER repeats them all, the
ones with the answer too; here all others are repeated, so that the answer's stand there once.
Paragraphs over a tenth of the length are not drawn: before one of them the prompt would end short.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

from longread.errors import UsageError
from longread.evaluate.ruler_length import draws_for, longest
from longread.evaluate.task import Materials, Question, Sample

_ANSWER_BRIEFLY = (
    "Answer the question based on the given documents. Only give me the answer and do not output "
    "any other words."
)
_CHARS_PER_TOKEN = 4  # about, of English prose


@dataclass(frozen=True)
class _Asked:
    query: str
    answers: tuple[str, ...]
    gold: tuple[str, ...]  # paragraphs that always stand in the prompt
    related: tuple[str, ...] = ()  # paragraphs that come before any others


def _squad(data: Any) -> list[_Asked]:
    """Questions with an answer, each with the other paragraphs of its article as related."""
    found = []
    for article in data["data"]:
        contexts = dict.fromkeys(paragraph["context"] for paragraph in article["paragraphs"])
        for paragraph in article["paragraphs"]:
            own = paragraph["context"]
            related = tuple(context for context in contexts if context != own)
            for asked in paragraph["qas"]:
                answers = tuple(dict.fromkeys(answer["text"] for answer in asked["answers"]))
                if answers and not asked.get("is_impossible", False):
                    found.append(_Asked(asked["question"], answers, (own,), related))
    return found


def _hotpotqa(data: Any) -> list[_Asked]:
    """Questions with the paragraphs that they come with, most of them there to distract."""
    found = []
    for asked in data:
        texts = (f"{title}\n{''.join(parts)}" for title, parts in asked["context"])
        found.append(_Asked(asked["question"], (asked["answer"],), tuple(dict.fromkeys(texts))))
    return found


@dataclass(eq=False)
class DocumentQA:
    """One qa task over the questions of a file; sample i asks question i, for every seed."""

    materials: Materials
    name: str
    file: str
    read: Callable[[Any], list[_Asked]]

    def __post_init__(self) -> None:
        path = self.materials.path(self.file)
        try:
            self._questions = self.read(json.loads(path.read_text(encoding="utf-8")))
        except (ValueError, KeyError, TypeError) as error:
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
        asked = self._questions[number]
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
        + "\n\n"
    )


def _question(asked: _Asked) -> Question:
    return Question(
        f"{_ANSWER_BRIEFLY}\n\nQuestion: {asked.query}",
        asked.answers,
        scoring="any",
        max_tokens=32,
        answer_prefix=" Answer:",
    )


squad = partial(DocumentQA, name="qa_1", file="ruler/squad.json", read=_squad)
hotpotqa = partial(DocumentQA, name="qa_2", file="ruler/hotpotqa.json", read=_hotpotqa)
