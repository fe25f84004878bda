"""The one-line map of the documents: how much attention each stretch got, with page ticks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from longread.events import DocumentInfo

BLOCKS = "▁▂▃▄▅▆▇█"


@dataclass(frozen=True)
class Tick:
    """A label under the strip at `position`, 0 for its left edge and 1 for its right one."""

    position: float
    label: str


def resample(masses: Sequence[float], num_columns: int) -> list[float]:
    """Spread equal slices over `num_columns` equal columns; the sum stays the same."""
    columns = [0.0] * num_columns
    scale = num_columns / len(masses)
    for slice_idx, mass in enumerate(masses):
        start, end = slice_idx * scale, (slice_idx + 1) * scale
        for column_idx in range(int(start), min(num_columns, math.ceil(end))):
            overlap = min(end, column_idx + 1) - max(start, column_idx)
            columns[column_idx] += mass * max(0.0, overlap) / scale
    return columns


def draw(masses: Sequence[float], width: int) -> str:
    """Return `width` block characters, heights in proportion to the greatest column.

    A strip of fewer slices than columns is not stretched: it would show a precision it lacks.
    """
    num_columns = max(1, min(width, len(masses)))
    columns = resample(masses, num_columns) if masses else [0.0]
    highest = max(columns)
    if not highest > 0.0:
        return BLOCKS[0] * num_columns
    return "".join(BLOCKS[min(7, int(8 * max(0.0, column) / highest))] for column in columns)


def page_ticks(documents: Sequence[DocumentInfo], width: int) -> list[Tick]:
    """Return ticks for the documents that share a strip of `width` columns, and for their pages.

    Documents begin where their tokens do, and so do pages where `page_starts` says where.
    Where it does not, quarters of the document are marked instead.
    """
    num_tokens = max(1, sum(document.num_tokens for document in documents))
    ticks: list[Tick] = []
    start = 0
    for document_number, document in enumerate(documents, 1):
        if len(documents) > 1:
            ticks.append(Tick(start / num_tokens, f"#{document_number}"))
        step = _page_step(len(document.page_starts), width * document.num_tokens / num_tokens)
        for page_idx, (page_number, token_idx) in enumerate(document.page_starts):
            if page_idx == 0 or page_number % step == 0:
                ticks.append(Tick((start + token_idx) / num_tokens, str(page_number)))
        if not document.page_starts:
            for percent in (0, 25, 50, 75):
                position = start + document.num_tokens * percent / 100
                ticks.append(Tick(position / num_tokens, f"{percent}%"))
        start += document.num_tokens
    return ticks


def _page_step(num_pages: int, width: float) -> int:
    """Return 1, 2, 5, 10, 20, ...: pages between ticks that stand about eight columns apart."""
    wanted = 8 * num_pages / max(1.0, width)
    power = 1
    while True:
        for factor in (1, 2, 5):
            if factor * power >= wanted:
                return factor * power
        power *= 10


def tick_line(ticks: Sequence[Tick], width: int) -> str:
    """Return the labels on a line of `width`; one that would touch its neighbour is left out."""
    line = ""
    for tick in sorted(ticks, key=lambda tick: tick.position):
        column = min(int(tick.position * width), width - 1)
        if column + len(tick.label) > width or (line and column < len(line) + 1):
            continue
        line = line.ljust(column) + tick.label
    return line
