"""How a RULER sample comes to its length and to its random draws; what it holds is elsewhere.

The haystack grows to the most units whose prompt fits. RULER goes in steps (25 lines, 500 words,
10 documents), which leave a prompt of 4K tokens up to a sixth short; the steps here are smaller.
"""

from __future__ import annotations

import random
from collections.abc import Callable

from longread.errors import UsageError
from longread.evaluate.task import Sample

_PROBE = 8  # the first guess aims at this part of the length: cheap to count, good for the slope
_ROOM = 0.02  # with less left than this, one more step is not tried where the slope says no


def draws_for(task: str, number: int, num_tokens: int, seed: int) -> random.Random:
    """The random numbers of one sample, the same in any process.

    A text as seed is hashed by `random` itself, not by the process's own salted hash.
    """
    return random.Random(f"{task}/{seed}/{number}/{num_tokens}")


def longest(
    build: Callable[[int], Sample],
    count_tokens: Callable[[str], int],
    num_tokens: int,
    *,
    least: int,
    step: int = 1,
) -> Sample:
    """The sample of the most units that fits into `num_tokens`: document, question, answer prefix.

    build: from a number of units, whose tokens grow about evenly with it; units are `least` and
    whole steps above. Texts are counted as few times as a secant allows, about four. Raises
    UsageError where `least` units do not fit.
    """

    def measured(units: int) -> tuple[Sample, int]:
        sample = build(units)
        question = sample.questions[0]
        rest = count_tokens(question.text + question.answer_prefix)
        return sample, count_tokens(sample.document) + rest

    best, fixed = measured(least)
    if fixed > num_tokens:
        raise UsageError(f"a sample of {best.task} takes {fixed} tokens or more, not {num_tokens}")
    longer = len(build(least + 8 * step).document) - len(best.document)
    assert longer > 0, "more units make no longer document"
    per_step = max(fixed * longer / len(best.document) / 8, 1e-3)
    fits, too_many = 0, -1  # in steps; -1 while none is known
    guess = (num_tokens - fixed) / per_step / _PROBE
    while too_many != fits + 1:
        steps = max(int(guess), fits + 1)
        if too_many > 0:
            steps = min(steps, too_many - 1)
        sample, used = measured(least + steps * step)
        if used <= num_tokens:
            best, fits = sample, steps
        else:
            too_many = steps
        per_step = max((used - fixed) / steps, 1e-3)
        guess = steps + (num_tokens - used) / per_step
        room = num_tokens - used
        if int(guess) <= fits and 0 <= room <= num_tokens * _ROOM:
            break
    return best
