"""A copy of a PDF with passages highlighted: quotes to places on pages, places to annotations.

Owns the search for a quote among a page's characters, whatever became of its spaces, hyphens and
ligatures, and the writing of the copy through pypdf. Runs in the child process of reader_pool.py.
"""

from __future__ import annotations

import difflib
import io
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from longread.pdf_layout import Char, Rect
from longread.pdf_pdfium import HYPHEN, LockedError, PdfiumFile
from longread.pdf_pypdf import PypdfFile, captured_log

MARK_KEY = "/LongreadReport"  # in the copy's document information
_COLOUR = "ffd45e"
_DROPPED = frozenset("-\u00ad\u2010\u2011\x02" + HYPHEN)  # stand or fall with the line's end
_MIN_RUN = 12  # characters; shorter runs that agree may do so by chance
_MIN_FOUND = 0.6  # of a quote, for its place to be believed


@dataclass(frozen=True)
class Quote:
    """What to highlight, and the note that a viewer shows with it."""

    page_idx: int
    text: str
    note: str


def check_can_be_copied(data: bytes) -> None:
    """Raise LockedError where the file is encrypted, also with the empty password."""
    with captured_log():
        # The copy would be open to all, and pypdf would not mind.
        if PypdfFile(data).reader.is_encrypted:
            raise LockedError


def highlighted(data: bytes, quotes: Sequence[Quote]) -> tuple[bytes, list[bool]]:
    """Return the copy, and of each quote whether it was found on its page.

    Raises LockedError, and whatever the two engines raise at a damaged file.
    """
    check_can_be_copied(data)
    from pypdf import PdfWriter
    from pypdf.annotations import Highlight
    from pypdf.generic import ArrayObject, FloatObject, NameObject, TextStringObject

    file = PdfiumFile(data, None)
    found = []
    with captured_log():
        writer = PdfWriter(clone_from=PypdfFile(data).reader)
        for quote in quotes:
            rects = find_rects(file.chars(quote.page_idx), quote.text)
            found.append(bool(rects))
            if not rects:
                continue
            corners = [
                FloatObject(round(corner, 3))
                for left, bottom, right, top in rects
                for corner in (left, top, right, top, left, bottom, right, bottom)
            ]
            annotation = Highlight(
                rect=_around(rects),
                quad_points=ArrayObject(corners),
                highlight_color=_COLOUR,
                printing=True,
            )
            annotation[NameObject("/Contents")] = TextStringObject(quote.note)
            annotation[NameObject("/T")] = TextStringObject("longread")
            writer.add_annotation(quote.page_idx, annotation)
        writer.add_metadata({MARK_KEY: "1"})
        copy = io.BytesIO()
        writer.write(copy)
    return copy.getvalue(), found


def find_rects(chars: Sequence[Char], quote: str) -> list[Rect]:
    """Return the boxes of the quote's lines among a page's characters; none where it is not there.

    Where the text was changed on its way (foot notes taken out, words joined), the runs that agree.
    """
    page, places = _folded(char.text for char in chars)
    wanted, _ = _folded(quote)
    if not wanted:
        return []
    start = page.find(wanted)
    if start >= 0:
        runs = [(start, len(wanted))]
    else:
        matcher = difflib.SequenceMatcher(None, page, wanted, autojunk=False)
        blocks = matcher.get_matching_blocks()
        runs = [(block.a, block.size) for block in blocks if block.size >= _MIN_RUN]
        if sum(size for _, size in runs) < _MIN_FOUND * len(wanted):
            return []
    indices = [places[i] for start, size in runs for i in range(start, start + size)]
    return _lines(chars[i] for i in sorted(set(indices)))


def _folded(pieces: Iterable[str]) -> tuple[str, list[int]]:
    """Characters without spaces, hyphens and case, and the piece that each came from."""
    out, places = [], []
    for place, piece in enumerate(pieces):
        for char in unicodedata.normalize("NFKC", piece).casefold():
            if not char.isspace() and char not in _DROPPED:
                out.append(char)
                places.append(place)
    return "".join(out), places


def _lines(chars: Iterable[Char]) -> list[Rect]:
    """Join boxes that follow each other on a line."""
    lines: list[Rect] = []
    for char in chars:
        left, bottom, right, top = char.left, char.bottom, char.right, char.top
        if right <= left or top <= bottom:
            continue
        if lines:
            line = lines[-1]
            height = min(top - bottom, line[3] - line[1])
            overlap = min(top, line[3]) - max(bottom, line[1])
            # As far as a wide space, and not back: the next line may be at the same height.
            if overlap > 0.5 * height and -height < left - line[2] < 2 * height:
                lines[-1] = _around((line, (left, bottom, right, top)))
                continue
        lines.append((left, bottom, right, top))
    return lines


def _around(rects: Sequence[Rect]) -> Rect:
    lefts, bottoms, rights, tops = zip(*rects, strict=True)
    return min(lefts), min(bottoms), max(rights), max(tops)
