"""Where a long answer leaves dense's: the first token that differs, and the line that it is in.

A greedy answer that once says something else is another answer from there on, so the first place
tells how long a policy read as dense does. Both answers are encoded as text, whichever run they
come from.
"""

from __future__ import annotations

import math
import os
import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import takewhile

from longread.evaluate.cells import Cell, Place


def first_difference(
    answer: str, reference: str, encode: Callable[[str], Sequence[int]]
) -> Place | None:
    """The first token of `answer` that is not `reference`'s; None where they are equal.

    Where one is the beginning of the other it is the token after the shorter one.
    """
    own, other = encode(answer), encode(reference)
    pairs = zip(own, other, strict=False)
    num_equal = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
    if num_equal == len(own) == len(other):
        return None
    return Place(num_equal, 1 + os.path.commonprefix((answer, reference)).count("\n"))


def compare(cell: Cell, reference: Cell, encode: Callable[[str], Sequence[int]]) -> list[int]:
    """Put the places into those results of `cell` that have none yet; returns their numbers."""
    numbers = [
        number
        for number, result in cell.results.items()
        if not result.places and number in reference.results
    ]
    for number in numbers:
        own, theirs = cell.results[number], reference.results[number]
        places = tuple(
            first_difference(answer, other, encode)
            for answer, other in zip(own.answers, theirs.answers, strict=True)
        )
        cell.results[number] = replace(own, places=places)
    return numbers


def rows(cells: Sequence[Cell | None]) -> list[tuple[str, ...]]:
    """For each cell how many answers are dense's, and the first tokens and lines that are not.

    An answer that is dense's to its end counts in a median as one that differs after all others.
    """
    return [
        ("answers as dense's", *(_shown(cell, _equal) for cell in cells)),
        ("tokens as dense's, median", *(_shown(cell, _median_token) for cell in cells)),
        ("tokens as dense's, least", *(_shown(cell, _least_token) for cell in cells)),
        ("first other line, median", *(_shown(cell, _median_line) for cell in cells)),
    ]


def records(cell: Cell, reference: Cell | None = None) -> list[dict[str, object]]:
    """Each answer's place for JSON, with the line of text there in both answers.

    tokens: those that are dense's before the first other one; None for an answer that is dense's.
    """
    found = []
    for number, result in sorted(cell.results.items()):
        theirs = reference.results.get(number) if reference else None
        for question, place in enumerate(result.places):
            record: dict[str, object] = {"sample": number, "question": question, "tokens": None}
            if place is not None:
                record |= {"tokens": place.token, "line": place.line}
                record["text"] = _line(result.answers[question], place.line)
                record["dense_text"] = _line(theirs.answers[question], place.line) if theirs else ""
            found.append(record)
    return found


def _line(text: str, number: int) -> str:
    lines = text.split("\n")
    return lines[number - 1] if number <= len(lines) else ""


def _shown(cell: Cell | None, figure: Callable[[list[Place | None]], str]) -> str:
    found = [place for result in cell.results.values() for place in result.places] if cell else []
    return figure(found) if found else "-"


def _equal(places: list[Place | None]) -> str:
    return f"{places.count(None)} of {len(places)}"


def _median_token(places: list[Place | None]) -> str:
    return _number(statistics.median_low(place.token if place else math.inf for place in places))


def _least_token(places: list[Place | None]) -> str:
    return _number(min(place.token if place else math.inf for place in places))


def _median_line(places: list[Place | None]) -> str:
    return _number(statistics.median_low(place.line if place else math.inf for place in places))


def _number(value: float) -> str:
    return "all" if value == math.inf else f"{value:,}"
