"""Means of cells, and paired differences to dense with bootstrap intervals.

Cells are compared sample by sample on the same documents and questions, so that what varies from
sample to sample falls out. Over several tasks the mean is that of the tasks' means, and samples are
drawn anew within each task (a stratified percentile bootstrap, Efron 1979).

Draws from equal differences are equal too, and say nothing of the samples that were not seen. So
where all differences of a task are equal the interval is widened by what could have stayed unseen:
differences of -1 or +1 in as many samples as would be missed in 5 of 100 evaluations. Seen n times
alike, that is a share of 1 - 0.05^(1/n) (the rule of three: about 3 / n, Hanley and Lippman-Hand
1983), for several such tasks the worst that all of them could miss together.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from longread.evaluate.cells import Cell

_NUM_DRAWS = 2_000
_SEED = 0
_LEVEL = 0.95
_EQUAL = 1e-9


@dataclass(frozen=True)
class Interval:
    """A mean and the 95 % interval around it; num: samples that it rests on."""

    mean: float
    low: float
    high: float
    num: int


def scores(cell: Cell, kind: str | None = None) -> dict[int, float]:
    """The score of each sample by its number, 0 to 1; of one kind of question where it is given."""
    found = {}
    for number, result in cell.results.items():
        own = [
            score
            for score, its_kind in zip(result.scores, result.kinds, strict=True)
            if kind is None or its_kind == kind
        ]
        if own:
            found[number] = sum(own) / len(own)
    return found


def mean(cells: Iterable[Cell], kind: str | None = None) -> float | None:
    """The mean of the cells' means, so that a task counts once however many samples it has.

    None where no cell has a sample; of one kind of question where it is given.
    """
    means = [sum(own.values()) / len(own) for cell in cells if (own := scores(cell, kind))]
    return sum(means) / len(means) if means else None


def kinds(cells: Iterable[Cell]) -> list[str]:
    """The kinds of question in the cells, numbers in them in numerical order."""
    found = {kind for cell in cells for result in cell.results.values() for kind in result.kinds}
    return sorted(found - {""}, key=_natural)


def _natural(text: str) -> list[tuple[int, float, str]]:
    parts = re.split(r"(\d+(?:\.\d+)?)", text)
    return [(0, float(p), "") if i % 2 else (1, 0.0, p) for i, p in enumerate(parts)]


def difference(pairs: Sequence[tuple[Cell, Cell]], kind: str | None = None) -> Interval | None:
    """How much the first cells of the pairs, one pair a task, score over the second ones.

    None where no sample is in both cells of a pair.
    """
    per_task = []
    for cell, reference in pairs:
        own, theirs = scores(cell, kind), scores(reference, kind)
        shared = sorted(set(own) & set(theirs))
        if shared:
            per_task.append(np.array([own[number] - theirs[number] for number in shared]))
    return bootstrap(per_task) if per_task else None


def bootstrap(groups: Sequence[np.ndarray]) -> Interval:
    """Mean of the groups' means; the samples of each group are drawn anew, apart from the others.

    groups: differences from -1 to 1. The same groups give the same interval.
    """
    random = np.random.default_rng(_SEED)
    means = np.zeros(_NUM_DRAWS)
    for group in groups:
        drawn = random.integers(len(group), size=(_NUM_DRAWS, len(group)))
        means += group[drawn].mean(axis=1) / len(groups)
    tail = (1 - _LEVEL) / 2
    low, high = np.quantile(means, (tail, 1 - tail))
    mean = float(np.mean([group.mean() for group in groups]))
    equal = [group for group in groups if np.ptp(group) < _EQUAL]
    below, above = (
        _unseen([len(group) for group in equal], [1 + sign * float(group[0]) for group in equal])
        / len(groups)
        for sign in (1, -1)
    )
    return Interval(mean, float(low) - below, float(high) + above, sum(map(len, groups)))


def _unseen(nums: Sequence[int], weights: Sequence[float]) -> float:
    """The largest sum of weights[i] * share[i] that is missed with a chance of 1 - _LEVEL.

    share: of samples that differ, none of which is among the nums[i] seen. Maximal under
    sum(nums * log(1 - share)) = log(1 - _LEVEL), where 1 - share is nums / weights times a factor,
    but at most 1 (Lagrange).
    """
    if not nums:
        return 0.0
    # Not 0, which would be divided by: what can grow no further counts next to nothing.
    sizes, worth = np.array(nums, float), np.maximum(np.array(weights), 1e-12)
    low, high = -100.0, float(np.log(worth / sizes).max())  # of the factor's logarithm
    for _ in range(100):
        middle = (low + high) / 2
        logs = np.minimum(middle + np.log(sizes / worth), 0.0)
        low, high = (low, middle) if sizes @ logs > np.log(1 - _LEVEL) else (middle, high)
    return max(0.0, float(np.array(weights) @ -np.expm1(logs)))
