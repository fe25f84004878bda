"""What a task is: documents with questions, and how an answer to one is scored."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from difflib import SequenceMatcher
from pathlib import Path
from typing import Protocol

from longread.errors import UsageError

ANSWER_ROOM = 128  # RULER counts the tokens to be generated into a length; these are its most


@dataclass(frozen=True)
class Question:
    """One question of a sample, as the model is asked it.

    scoring: a name of SCORINGS; answer_prefix: what the answer is made to begin with; kind: what
    the figures of a task are counted apart by, where it has several kinds of question; evidence:
    the passage of the document that answers, where a task knows it; copied: a text of the document
    that the answer must begin with, after a space, where it is told who reads it (coverage.py);
    measure: further figures of an answer, from 0 to 1, by name.
    """

    text: str
    references: tuple[str, ...]
    scoring: str = "all"
    max_tokens: int = 32
    answer_prefix: str = ""
    kind: str = ""
    evidence: str = ""
    copied: str = ""
    measure: Callable[[str], dict[str, float]] | None = field(
        default=None, compare=False, repr=False
    )

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
    """What tasks are made from. encode, count_tokens: of the model, without special tokens."""

    count_tokens: Callable[[str], int]
    folder: Path | None = None
    encode: Callable[[str], Sequence[int]] | None = None

    def path(self, name: str) -> Path:
        """A file of the evaluation data, such as books/txt/moby_dick.txt. Raises UsageError."""
        if self.folder is None:
            raise UsageError(f"this task needs {name}: name its folder with --data")
        path = self.folder / name
        if not path.is_file():
            raise UsageError(f"this task needs {name}, and {self.folder} has no such file")
        return path


def read_text(path: Path) -> str:
    """A file of the evaluation data. Raises UsageError where it is no text or cannot be read."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} cannot be read as text: {error}") from error
    if not text.strip():
        raise UsageError(f"{path} is empty: fetch the file again")
    return text


def _normal(text: str) -> str:
    """SQuAD's normal form: lower case, no punctuation, no articles, single spaces."""
    text = "".join(char for char in text.lower() if char not in string.punctuation)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", text).split())


def _all(answer: str, references: tuple[str, ...]) -> float:
    """RULER's string_match_all: the share of references that stand in the answer."""
    return sum(text.lower() in answer.lower() for text in references) / max(len(references), 1)


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

    return max(map(one, references), default=0.0)


# Letters A to D, run together or listed. "A" before a word in small letters is an article.
_ARTICLE = r"A(?=[ \t]+(?!(?:is|and|or|because|as|since|only|alone)\b)[a-z])"
_LETTER = rf"(?:(?!{_ARTICLE})[A-D](?![a-zE-Z\d_'\u2019-]))"
_LETTERS = rf"(?<![\w'\u2019-])({_LETTER}(?:\s*[,;/]?\s*(?:and|&)?\s*{_LETTER})*+)(?!\w)"
_STOP = r"(?=[\"\u201d*]*(?:[).,:;!?\n]|\s*\Z))"
_CHOICES = (
    r"\A\W*" + _LETTERS + _STOP,
    r"(?i:\b(?:answer|option|choice|letter)s?(?:\s+(?:is|are|must be|would be)\b|\s*:))\W*"
    + _LETTERS,
    r"\A\W*" + _LETTERS,
    _LETTERS + _STOP,
    _LETTERS,
)


def _choice(answer: str, references: tuple[str, ...]) -> float:
    """Whether the letters that the answer chooses are those wanted ("A", "BD").

    They are those at the beginning before a stop, or else after "the answer is", or else at the
    beginning, or else the first ones before a stop or the end, or else the first ones.
    """
    found = next((match for form in _CHOICES if (match := re.search(form, answer))), None)
    letters = "".join(sorted(set(re.findall(r"[A-D]", found.group(1))))) if found else ""
    return float(letters in {"".join(sorted(reference)) for reference in references})


def _words(text: str) -> str:
    """Lower-case words with a space around each; "1,000" is "1000" and "doesn't" "does not"."""
    text = re.sub(r"(?<=\d),(?=\d{3}\b)", "", text.lower())
    text = re.sub(r"n['\u2019]t\b", " not", text)
    words = " ".join(re.findall(r"[^\W_]+", text))
    return f" {words} "


def _whole_words(answer: str, references: tuple[str, ...]) -> float:
    """Whether one of the references stands in the answer in whole words: no "8" in "18"."""
    return float(any(_words(text) in _words(answer) for text in references))


def _start(answer: str, references: tuple[str, ...]) -> float:
    """Whether the answer begins with the words of one of the references."""
    return float(any(_words(answer).startswith(_words(text)) for text in references))


_TOLD = ("stated", "said", "mentioned", "specified", "provided", "given", "named", "indicated")
_TELL = (
    *("state", "say", "mention", "specify", "provide", "give", "name", "indicate", "tell"),
    *("set", "fix", "contain", "include", "answer"),
)
# "may not set" and its like are what a document says, so verbs count after a form of "do" only.
REFUSALS = (
    *(f"not {told}" for told in (*_TOLD, "fixed", "known", "answered", "be determined")),
    *(f"{form} not set" for form in ("is", "are", "was", "were")),
    *(f"{form} not {tell}" for form in ("do", "does", "did") for tell in _TELL),
    *("cannot answer", "ca not answer", "not enough information", "cannot be determined"),
    *("no answer", "no information", "no mention", "unknown", "unanswerable"),
)


def _refusal(answer: str, references: tuple[str, ...]) -> float:
    """Whether the answer says that the document does not tell: one of REFUSALS stands in it."""
    return _whole_words(answer, REFUSALS)


def right_lines(answer: str, references: tuple[str, ...]) -> list[bool]:
    """Which of the references stand as lines in the answer, in their order, as a diff finds them.

    Numbers at the lines' beginning do not count: after a line left out the others are still right.
    """

    def unnumbered(lines: Iterable[str]) -> list[str]:
        return [re.sub(r"^\d+\.", "", " ".join(line.split())).strip() for line in lines]

    matcher = SequenceMatcher(
        None, unnumbered(answer.splitlines()), unnumbered(references), autojunk=False
    )
    found = {
        block.b + place for block in matcher.get_matching_blocks() for place in range(block.size)
    }
    return [place in found for place in range(len(references))]


def _lines(answer: str, references: tuple[str, ...]) -> float:
    """The share of references that stand as lines in the answer, in their order."""
    return sum(right_lines(answer, references)) / max(len(references), 1)


SCORINGS: dict[str, Callable[[str, tuple[str, ...]], float]] = {
    "all": _all,
    "any": _any,
    "f1": _f1,
    "choice": _choice,
    "words": _whole_words,
    "start": _start,
    "refusal": _refusal,
    "lines": _lines,
}
