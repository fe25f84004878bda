"""The look of --show-selected: passages with their most attended words, the strip, the heads.

Owns lines and what stands out in them; render.py writes them. No torch, nothing printed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from longread.events import DocumentInfo, Passage, Selection
from longread.plain_text import clean, count_text, one_line, place_text
from longread.strip import draw, page_ticks, tick_line

WORD = "bold"
_STRONG, _WEAK = 0.6, 0.2  # of the greatest share of a table
_CELL = 5


@dataclass(frozen=True)
class Line:
    """One line; marks are [start, end) with a rich style each, for terminals."""

    text: str
    marks: tuple[tuple[int, int, str], ...] = ()


def selection_lines(
    selection: Selection, documents: Sequence[DocumentInfo], width: int, *, cut: bool
) -> list[Line]:
    """Return the report of --show-selected; `cut` fits the passages into `width` columns."""
    lines = [Line(_head(selection))]
    if selection.passages:
        rows = [_passage_cells(passage, len(documents) > 1) for passage in selection.passages]
        cells = [("page", "heads", "layers", "mass"), *rows]
        widths = [max(len(row[column]) for row in cells) for column in range(4)]
        room = max(10, width - sum(widths) - 8)
        places = ["  ".join(_padded(row, widths)) for row in cells]
        lines.append(Line(f"{places[0]}  text"))
        for place, passage in zip(places[1:], selection.passages, strict=True):
            lines.append(_passage_line(f"{place}  ", passage, room if cut else None))
    if selection.strip:
        strip = draw(selection.strip, width)
        lines.append(Line(strip))
        lines.append(Line(tick_line(page_ticks(documents, len(strip)), len(strip))))
        if len(documents) > 1:
            named = [f"#{number} {info.name}" for number, info in enumerate(documents, 1)]
            lines.append(Line("; ".join(named)))
    return lines


def head_lines(selection: Selection, width: int) -> list[Line]:
    """Return a row for each layer and a column for each KV head: its attention on the sources.

    Shares are of the head's attention on all documents. Columns that do not fit into `width` come
    below.
    """
    heads = selection.heads
    if not heads:
        return []
    lines = [Line("On the sources, of each KV head's attention on the text (%):")]
    peak = max(max(layer) for layer in heads)
    num_columns = max(1, (width - 2 * _CELL) // _CELL)
    for first in range(0, len(heads[0]), num_columns):
        columns = range(first, min(first + num_columns, len(heads[0])))
        titles = [f"{column:>{_CELL}}" for column in columns]
        lines.append(Line("".join(["layer", *titles, "  all"])))
        for number, layer in enumerate(heads):
            text, marks = f"{number:>{_CELL}}", []
            for share in [*(layer[column] for column in columns), sum(layer) / len(layer)]:
                cell = f"{100 * share:>{_CELL}.0f}"
                if style := _style(share, peak):
                    marks.append((len(text), len(text) + _CELL, style))
                text += cell
            lines.append(Line(text, tuple(marks)))
    return lines


def _style(share: float, peak: float) -> str:
    if share >= _STRONG * peak > 0:
        return "bold green"
    return "" if share < _WEAK * peak else "green"


def _head(selection: Selection) -> str:
    words = [f"policy {selection.policy}"]
    if selection.vote:
        words.append(f"vote {selection.vote}")
    if selection.index:
        words.append(f"index {selection.index}")
    if selection.budget is not None:
        words.append(f"budget {count_text(selection.budget, 'token')} per KV head")
    return f"Selected: {', '.join(words)}; {selection.fraction_kept:.1%} of the cached rows read"


def _passage_cells(passage: Passage, with_document: bool) -> tuple[str, str, str, str]:
    where = place_text(passage.page, passage.page_label)
    if with_document:
        where = f"{passage.document}, {where}"
    heads, layers = f"{passage.head_share:.0%}", f"{passage.layer_share:.0%}"
    return one_line(where), heads, layers, f"{passage.mass:.1%}"


def _padded(row: Sequence[str], widths: Sequence[int]) -> list[str]:
    figures = [row[column].rjust(widths[column]) for column in (1, 2, 3)]
    return [row[0].ljust(widths[0]), *figures]


def _passage_line(place: str, passage: Passage, room: int | None) -> Line:
    shown = one_line(passage.text, room)
    marks = []
    for start, end in passage.marks:
        # Control characters are left out of what is shown.
        first, last = (len(clean(passage.text[:at])) for at in (start, end))
        last = min(last, len(shown))
        if first < last:
            marks.append((len(place) + first, len(place) + last, WORD))
    return Line(place + shown, tuple(marks))
