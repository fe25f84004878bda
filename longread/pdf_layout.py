"""Where characters stand on a page: whether their order is the reading order, and putting it right.

Owns geometry in points, from the lower left corner. Knows no engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

Rect = tuple[float, float, float, float]  # left, bottom, right, top

_LATE_SHARE = 0.05
_MIN_LATE = 3
_WIDE_GAP = 1.2  # heights of a line: a wider gap may be filled by what is drawn later
_MIN_PIECES = 16  # a page of fewer is no page of columns
_GUTTER_SHARE = 0.25  # of the characters, on each side of what parts two columns


@dataclass(frozen=True)
class Char:
    """One character with its box; line breaks that an engine made are characters too."""

    text: str
    left: float
    bottom: float
    right: float
    top: float


@dataclass
class _Piece:
    """Characters of one line without a wide gap, in the order they are drawn."""

    text: str
    left: float
    bottom: float
    right: float
    top: float


def touches(a: Rect, b: Rect) -> bool:
    """Whether two rectangles share a point; one may have no width."""
    return a[0] <= b[2] and b[0] <= a[2] and a[1] <= b[3] and b[1] <= a[3]


def in_order(rects: Sequence[Rect]) -> bool:
    """Whether text drawn in these places goes down the page, or down one column after another.

    What is drawn after something that stands below it in the same column is late; a few late
    pieces, such as a head that is drawn last, are no other order.
    """
    # The lowest text drawn so far, in strips of the page's width.
    if len(rects) < 2 * _MIN_LATE:
        return True
    left = min(rect[0] for rect in rects)
    width = max(max(rect[2] for rect in rects) - left, 1.0)
    num_strips = 40
    lowest = [float("inf")] * num_strips
    top = max(rect[3] for rect in rects)
    bottom = min(rect[1] for rect in rects)
    edge = 0.08 * (top - bottom)
    num_late = num_body = 0
    for x0, y0, x1, y1 in rects:
        # Heads and feet are drawn first or last, as a program likes.
        if y0 > top - edge or y1 < bottom + edge:
            continue
        num_body += 1
        first = int((x0 - left) / width * (num_strips - 1))
        last = int((x1 - left) / width * (num_strips - 1))
        strips = slice(max(first, 0), min(last, num_strips - 1) + 1)
        under, middle = lowest[strips], (y0 + y1) / 2
        limit = y0 - 0.2 * (y1 - y0)
        if sum([low < limit for low in under]) * 2 > len(under):
            num_late += 1
        lowest[strips] = [low if low < middle else middle for low in under]
    return num_late < max(_MIN_LATE, _LATE_SHARE * num_body)


def ordered_text(chars: Sequence[Char]) -> str | None:
    """The page's text from top to bottom, each line from left to right.

    None where it has two columns, which are best left as they are drawn.
    """
    pieces = _pieces(chars)
    if not pieces or _has_gutter(pieces):
        return None
    lines: list[list[_Piece]] = []
    for piece in sorted(pieces, key=lambda piece: -(piece.top + piece.bottom)):
        if lines and _same_line(lines[-1][0], piece):
            lines[-1].append(piece)
        else:
            lines.append([piece])
    return "\n".join(
        " ".join(piece.text for piece in sorted(line, key=lambda piece: piece.left))
        for line in lines
    )


def vertical_text(chars: Sequence[Char]) -> str | None:
    """The page's text in columns from the right to the left, band under band.

    None where most characters do not stand below the one before them.
    """
    columns: list[_Piece] = []
    num_below = 0
    last: Char | None = None
    for char in chars:
        if char.text in "\r\n" or (not char.text.strip() and char.text != "\u3000"):
            continue
        height = max(char.top - char.bottom, char.right - char.left, 1.0)
        column = columns[-1] if columns else None
        below = last is not None and 0 < last.top - char.top < 3 * height
        if column is not None and below and abs(char.left - column.left) < height:
            num_below += 1
            column.text += char.text
            column.bottom = min(column.bottom, char.bottom)
        else:
            columns.append(_Piece(char.text, char.left, char.bottom, char.right, char.top))
        last = char
    if num_below * 2 < sum(len(column.text) for column in columns):
        return None
    bands: list[list[_Piece]] = []
    for column in sorted(columns, key=lambda column: -column.top):
        if bands and column.top > min(other.bottom for other in bands[-1]):
            bands[-1].append(column)
        else:
            bands.append([column])
    return "\n".join(
        column.text.strip()
        for band in bands
        for column in sorted(band, key=lambda column: -column.left)
    )


def _same_line(a: _Piece, b: _Piece) -> bool:
    shared = min(a.top, b.top) - max(a.bottom, b.bottom)
    return shared > 0.5 * min(a.top - a.bottom, b.top - b.bottom)


def _pieces(chars: Sequence[Char]) -> list[_Piece]:
    pieces: list[_Piece] = []
    current: _Piece | None = None
    last: Char | None = None
    for char in chars:
        if char.text in "\r\n":
            current = None
            continue
        if not char.text.strip():
            if current is not None:
                current.text += " "
            continue
        is_part = last is not None and (char.left, char.right) == (last.left, last.right)
        last = char
        if current is not None and not is_part:  # a ligature's letters share its box
            height = max(current.top - current.bottom, 1.0)
            gap = char.left - current.right
            middle = (char.bottom + char.top) / 2
            if gap > _WIDE_GAP * height or gap < -height:
                current = None
            elif not current.bottom <= middle <= current.top:
                current = None
        if current is None:
            current = _Piece(char.text, char.left, char.bottom, char.right, char.top)
            pieces.append(current)
        else:
            current.text += char.text
            current.right = max(current.right, char.right)
            current.bottom = min(current.bottom, char.bottom)
            current.top = max(current.top, char.top)
    for piece in pieces:
        piece.text = " ".join(piece.text.split())
    return pieces


def _has_gutter(pieces: Sequence[_Piece]) -> bool:
    """Whether a line from top to bottom crosses little and has much text on both sides."""
    if len(pieces) < _MIN_PIECES:
        return False
    left = min(piece.left for piece in pieces)
    right = max(piece.right for piece in pieces)
    total = sum(len(piece.text) for piece in pieces)
    for step in range(30, 71):
        x = left + (right - left) * step / 100
        before = sum(len(piece.text) for piece in pieces if piece.right <= x)
        after = sum(len(piece.text) for piece in pieces if piece.left >= x)
        crossing = total - before - after
        if min(before, after) > _GUTTER_SHARE * total and crossing < 0.15 * total:
            return True
    return False
