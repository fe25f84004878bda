"""Raised numbers and notes at the foot of a page, and table heads that are drawn after their table.

Owns what size and place say of a page's pieces: a `2` with a small raised `32` is not 232, a raised
number at the start of a small line begins a note. Geometry in points, from the lower left corner;
knows no engine. What it means for the text is page_edits.py's.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from longread.pdf_layout import Rect

TextOf = Callable[[int], str]

_NUMBER = re.compile(r"[-\u2212]?\d{1,3}")
_LETTERS = re.compile(r"[^\W\d_]{1,3}")
_WORD = re.compile(r"[^\W\d_]{2}")
_MINUS = ("-", "\u2212")
_SMALL = 0.8  # of its neighbour's height: what is higher is no raised mark
_QUOTE = 0.38  # of that height: what is lower is a quotation mark or a dash
_RAISED = 0.4  # of its neighbour's height: how far a mark's foot stands above the line's
_MAX_OVER = 0.8  # what stands higher belongs to the line above
_HARDLY_RAISED = 0.3  # of that height: and so far where it is tiny and a note proves it
_TINY = 0.6  # of that height
_LONG = 3.0  # of its own height: three digits or letters are no longer
_OVER = 0.2  # of that height: how far a mark's top stands over letters without ascenders
_SUNK = 0.15  # of that height: how far a mark's top may stay below the neighbour's
_GAP = 0.5  # of that height: how far a mark may stand from what it belongs to
_SPACE = 0.2  # of that height: a wider gap after a mark parts words
_LOW = 1.3  # of a mark's height: what is lower does not show its line's height
_STOP = 0.5  # of a mark's height: what is lower is a stop, and shows where the line's letters stand
_LINE = 1.5  # of a mark's height: the letters' there
_NOTE_GAP = 2.0  # of a line's height, between a note's number and its text
_NOTE_PITCH = 2.6  # heights between two lines of one note, or of two notes; feet stand lower
_NOTES_BELOW = 0.6  # of the page's text: notes begin lower than so much from the bottom
_MAX_STEP = 3  # between the numbers of two notes: one between them may not be known
_CELL_GAP = 1.0  # heights between two cells of a row
_LATE = 8.0  # heights: cells of several lines reach no deeper than so before the next one
_MIN_CELLS = 3
_MAX_TRIED = 50  # places of a page: each takes a look at all that is drawn before
_MAX_HEAD = 12  # pieces of a table's head that are drawn late
_HEAD_HEIGHTS = 4.0  # how far down such a head may go


@dataclass(frozen=True)
class Raised:
    """Small raised text: one piece, or a minus sign and the next one."""

    first: int  # the piece
    label: str
    # What parts it from the next piece, where that goes on on the line below it: "" or " ".
    gap: str | None
    is_high: bool = True  # false where only a note with this number can prove it


@dataclass(frozen=True)
class Marks:
    """What was found; pieces by their indices, in the order they are drawn."""

    raised: tuple[Raised, ...] = ()
    note_starts: tuple[Raised, ...] = ()  # numbers that begin a note
    notes: tuple[range, ...] = ()  # pieces of notes; one range for each column
    late_head: tuple[range, int] | None = None  # pieces that belong after another one, and that one


def find_marks(rects: Sequence[Rect], text_of: TextOf) -> Marks:
    """What `rects` show; `text_of` gives the text of a piece, and is asked for a few only."""
    found = [mark for i in range(1, len(rects)) if (mark := _raised(rects, i, text_of))]
    starts = [
        Raised(i, label, " ")
        for i in _note_starts(rects)
        if _NUMBER.fullmatch(label := text_of(i).strip()) and label.isdecimal()
    ]
    # The notes of a page count up, and one of them at least has its mark in the text above.
    counts = all(0 < int(b.label) - int(a.label) <= _MAX_STEP for a, b in pairwise(starts))
    with_mark = {mark.label for mark in starts} & {mark.label for mark in found}
    if not counts or not with_mark:
        starts, with_mark = [], set()
    raised = [mark for mark in found if mark.is_high or mark.label in with_mark]
    notes: list[range] = []
    for start in starts:
        if not notes or start.first not in notes[-1]:
            notes.append(range(start.first, _notes_end(rects, start.first)))
    return Marks(tuple(raised), tuple(starts), tuple(notes), _late_head(rects, text_of))


def _height(rect: Rect) -> float:
    return max(rect[3] - rect[1], 0.1)


def _raised(rects: Sequence[Rect], i: int, text_of: TextOf) -> Raised | None:
    """The raised text of piece `i`, which follows another on its line, smaller and higher."""
    mark, distance = rects[i], rects[i][0] - rects[i - 1][2]
    if not -_height(mark) <= distance <= 2 * _height(mark):
        return None  # most pieces begin a line: they need no second look
    base = _base(rects, i)
    height = _height(base)
    foot, top = (mark[1] - base[1]) / height, (mark[3] - base[3]) / height
    is_over = foot >= _RAISED and top >= _OVER and _height(mark) <= height
    if not (
        (_QUOTE * height < _height(mark) <= _SMALL * height or is_over)
        and mark[2] - mark[0] <= _LONG * _height(mark)
        and foot >= _HARDLY_RAISED
        and -_SUNK <= top <= _MAX_OVER
        and -0.1 * height <= distance <= _GAP * height
    ):
        return None
    is_high = foot >= _RAISED or top >= _OVER
    if not is_high and _height(mark) > _TINY * height:
        return None
    may_be_letters = foot >= _RAISED and top > 0
    label, first = text_of(i).strip(), i
    is_number = _NUMBER.fullmatch(label)
    # `ave` after the `g` of another piece is small too, and stands above the tail of the `g`.
    if not is_number and not (may_be_letters and _LETTERS.fullmatch(label)):
        return None
    middle = (rects[i - 1][1] + rects[i - 1][3]) / 2
    if is_number and mark[1] < middle < mark[3] and (sign := text_of(i - 1).strip()) in _MINUS:
        label, first = sign + label, i - 1
    gap = None
    if i + 1 < len(rects) and _shares_line(base, rects[i + 1]):
        width = rects[i + 1][0] - mark[2]
        if width >= -0.1 * height:
            gap = " " if width > _SPACE * height else ""
    return Raised(first, label, gap, is_high)


def _base(rects: Sequence[Rect], i: int) -> Rect:
    """What stands before `i`: also a second piece where one is low, as `.` and `n` are."""
    before, mark = rects[i - 1], _height(rects[i])
    if i > 1 and _height(before) < _LOW * mark:
        other = rects[i - 2]
        is_near = -1 <= before[0] - other[2] <= _GAP * _height(other)
        if is_near and other[1] - 1 <= before[3] and before[1] <= other[3] + 1:
            return other[0], min(other[1], before[1]), before[2], max(other[3], before[3])
    if _height(before) < _STOP * mark:
        return before[0], before[1], before[2], before[1] + _LINE * mark
    return before


def _note_starts(rects: Sequence[Rect]) -> list[int]:
    """Pieces at the left of a line with a higher and lower-standing piece at their right."""
    if not rects:
        return []
    bottom, top = min(rect[1] for rect in rects), max(rect[3] for rect in rects)
    limit = bottom + _NOTES_BELOW * (top - bottom)
    starts = []
    for i in range(len(rects) - 1):
        mark, text = rects[i], rects[i + 1]
        if mark[3] > limit or mark[2] - mark[0] > _LONG * _height(mark):
            continue
        if i + 2 < len(rects) and _shares_line(text, rects[i + 2]):  # `man` is low by itself
            text = (text[0], min(text[1], rects[i + 2][1]), text[2], max(text[3], rects[i + 2][3]))
        height = _height(text)
        if _height(mark) > _SMALL * height:
            continue
        if not text[3] > mark[1] >= text[1] + 0.5 * _RAISED * height:
            continue
        if mark[3] < text[3] - _SUNK * height or not 0 <= text[0] - mark[2] <= _NOTE_GAP * height:
            continue
        if i and rects[i - 1][1] < mark[3] and rects[i - 1][3] > mark[1] - height:
            continue  # something stands before it on its line
        starts.append(i)
    return starts


def _notes_end(rects: Sequence[Rect], start: int) -> int:
    """The piece after the last one that stands under `start` without a gap."""
    lowest = rects[start][1]
    height = _height(rects[start + 1])
    for i in range(start, len(rects)):
        rect = rects[i]
        if rect[1] > rects[start][3] + height or lowest - rect[3] > _NOTE_PITCH * height:
            return i
        height = max(height, _height(rect))
        lowest = min(lowest, rect[1])
    return len(rects)


def _late_head(rects: Sequence[Rect], text_of: TextOf) -> tuple[range, int] | None:
    """Cells of a table's first row that are drawn after the rows below it, and what they follow.

    At least three cells beside one another, right of a piece drawn before: a second column of text
    has one piece, or pieces without gaps.
    """
    if len(rects) <= _MIN_CELLS:
        return None
    height = sorted(map(_height, rects))[len(rects) // 2]
    wide = _CELL_GAP * height
    lowest, num_tried = rects[0][1], 0
    for i, rect in enumerate(rects[: 1 - _MIN_CELLS]):
        is_late, lowest = lowest < rect[1] - _LATE * height, min(lowest, rect[1])
        if not is_late or rects[i + 1][0] - rect[2] <= wide:
            continue
        num_tried += 1
        if num_tried > _MAX_TRIED:
            return None
        anchor = _left_of(rects, i)
        if anchor is None or min(r[1] for r in rects[anchor:i]) > rect[1] - _LATE * height:
            continue
        top = rects[anchor][3]
        end = i
        while end < len(rects) and top + height > rects[end][3] > top - _HEAD_HEIGHTS * height:
            end += 1
        goes_on = end < len(rects) and rects[end][0] > rect[0] - wide
        if goes_on and top > rects[end][3] > top - 2 * _HEAD_HEIGHTS * height:
            continue  # it is a second column
        cells = [k for k in range(i, end) if _shares_line(rects[k], rect)]
        gaps = [rects[b][0] - rects[a][2] for a, b in pairwise([anchor, *cells])]
        is_row = len(cells) >= _MIN_CELLS and min(gaps) > wide and end - i <= _MAX_HEAD
        if is_row and all(_WORD.search(text_of(k)) for k in cells):
            return range(i, end), anchor
    return None


def _left_of(rects: Sequence[Rect], i: int) -> int | None:
    """The last piece drawn before `i` that stands left of it on its line, if it is the nearest."""
    same = [k for k in range(i) if _shares_line(rects[k], rects[i])]
    if not same or any(rects[k][2] > rects[i][0] for k in same):
        return None
    return max(same, key=lambda k: rects[k][2])


def _shares_line(a: Rect, b: Rect) -> bool:
    shared = min(a[3], b[3]) - max(a[1], b[1])
    return shared > 0.5 * min(_height(a), _height(b))
