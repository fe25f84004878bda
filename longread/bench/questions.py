"""Questions on one document answered several at once: tokens a second, and questions a minute.

The same questions are answered with each number of them at once, with all that `ask --questions`
does but the opening of the document. Beside the times stands how many answers are, word for word,
those of the first number: a near tie may fall otherwise where products take more rows at once.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from longread.conversation import SessionLike
from longread.errors import UsageError
from longread.events import Answer

ASKED = (
    "What is this document about?",
    "Who is named first in it, and what for?",
    "What does it say about money?",
    "Which dates does it name?",
    "What must be done, and by whom?",
    "What is forbidden in it?",
    "How does it end?",
    "Which part of it is the longest, and what does it say?",
)


@dataclass(frozen=True)
class Throughput:
    """Of all questions: answered `at_once`, in `seconds`; same: answers that are as the first's."""

    at_once: int
    num_questions: int
    seconds: float
    answer_tokens: int
    same: int

    @property
    def tokens_per_s(self) -> float:
        return self.answer_tokens / self.seconds

    @property
    def questions_per_min(self) -> float:
        return 60 * self.num_questions / self.seconds


def run(
    session: SessionLike,
    counts: Sequence[int],
    texts: Sequence[str],
    num_questions: int,
    *,
    warm_up: bool,
) -> Iterator[Throughput]:
    """Ask `num_questions`, the texts in turn, with each of these counts of them at once.

    session: with its document open; warm_up: answer some before each timing, as a GPU's step is
    captured then. Raises UsageError where the questions do not fit the window.
    """
    first: dict[int, str] = {}
    asked = [(number, texts[(number - 1) % len(texts)]) for number in range(1, num_questions + 1)]
    for count in counts:
        if warm_up:
            _answers(session, asked[:count], count)
        started = time.perf_counter()
        found = _answers(session, asked, count)
        seconds = time.perf_counter() - started
        first = first or {number: answer.text for number, answer in found.items()}
        yield Throughput(
            count,
            num_questions,
            seconds,
            sum(answer.usage.answer_tokens for answer in found.values()),
            sum(first[number] == answer.text for number, answer in found.items()),
        )


def _answers(
    session: SessionLike, asked: Sequence[tuple[int, str]], most: int
) -> dict[int, Answer]:
    found = {}
    for answered in session.ask_each(asked, most):
        if answered.answer is None:
            raise UsageError(f"question {answered.number} is not answered: {answered.why_not}")
        found[answered.number] = answered.answer
    return found
