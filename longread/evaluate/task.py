"""What a task is: documents with questions, and how an answer to one is scored."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from longread.errors import UsageError


@dataclass(frozen=True)
class Question:
    """One question of a sample, as the model is asked it.

    scoring: a name of SCORINGS; answer_prefix: what the answer is made to begin with; kind: what
    the figures of a task are counted apart by, where it has several kinds of question.
    """

    text: str
    references: tuple[str, ...]
    scoring: str = "all"
    max_tokens: int = 32
    answer_prefix: str = ""
    kind: str = ""

    def score(self, answer: str) -> float:
        """From 0, wrong, to 1, right."""
        return SCORINGS[self.scoring](answer, self.references)


@dataclass(frozen=True)
class Sample:
    """A document and its questions: each asked of the document alone, or in one conversation."""

    task: str
    number: int
    document: str
    questions: tuple[Question, ...]
    in_conversation: bool = False


class Task(Protocol):
    """A source of samples; the same arguments give the same sample in any process."""

    name: str

    def sample(self, number: int, num_tokens: int, seed: int) -> Sample:
        """Sample `number` with a prompt of at most `num_tokens` tokens, as near as its steps allow.

        Raises UsageError where the task has no such sample or length.
        """


@dataclass(frozen=True)
class Materials:
    """What tasks are made from. count_tokens: of the model under test, without special tokens."""

    count_tokens: Callable[[str], int]
    folder: Path | None = None

    def path(self, name: str) -> Path:
        """A file of the evaluation data, such as books/txt/moby_dick.txt. Raises UsageError."""
        if self.folder is None:
            raise UsageError(f"this task needs {name}: name its folder with --data")
        path = self.folder / name
        if not path.is_file():
            raise UsageError(f"this task needs {name}, and {self.folder} has no such file")
        return path


def _normal(text: str) -> str:
    """SQuAD's normal form: lower case, no punctuation, no articles, single spaces."""
    text = "".join(char for char in text.lower() if char not in string.punctuation)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", text).split())


def _all(answer: str, references: tuple[str, ...]) -> float:
    """RULER's string_match_all: the share of references that stand in the answer."""
    return sum(text.lower() in answer.lower() for text in references) / len(references)


def _any(answer: str, references: tuple[str, ...]) -> float:
    """RULER's string_match_part: whether one of the references stands in the answer."""
    return float(any(text.lower() in answer.lower() for text in references))


def _f1(answer: str, references: tuple[str, ...]) -> float:
    """SQuAD's F1 of words, the best over the references."""

    def one(reference: str) -> float:
        said, wanted = Counter(_normal(answer).split()), Counter(_normal(reference).split())
        shared = (said & wanted).total()
        if not shared:
            return float(said == wanted)
        return 2 * shared / (said.total() + wanted.total())

    return max(map(one, references))


def _choice(answer: str, references: tuple[str, ...]) -> float:
    """Whether the first letters A to D that stand alone in the answer are those wanted ("A", "BD").

    Letters run together ("BD") count as they stand.
    """
    found = re.search(r"\b[A-D](?:(?:\s*(?:,|and|&)?\s*)[A-D])*\b", answer)
    letters = "".join(sorted(set(re.findall("[A-D]", found.group())))) if found else ""
    return float(letters in {"".join(sorted(reference)) for reference in references})


SCORINGS: dict[str, Callable[[str, tuple[str, ...]], float]] = {
    "all": _all,
    "any": _any,
    "f1": _f1,
    "choice": _choice,
}
