"""What raised numbers, notes and late heads mean for a page's text: replaced, taken out, moved.

Owns how they are written: `[2]` for a note's number, `^2` for any other raised one. Works on the
characters in the order they are drawn; pdf_marks.py finds what is to be done.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from longread.pdf_marks import Marks, Raised

PlaceOf = Callable[[int], int | None]  # of a piece's first character; None where it is unknown
Span = tuple[int, int]


@dataclass(frozen=True)
class Edits:
    """Places in a text, each from its first character to after its last."""

    replaced: tuple[tuple[int, int, str], ...] = ()
    notes: tuple[Span, ...] = ()
    late_head: tuple[int, int, int] | None = None  # from, to, and where it belongs

    @property
    def tells(self) -> bool:
        """Whether the text says more with them: a raised letter only loses its line break."""
        numbers = any(new[0] in "[^" and any(map(str.isdecimal, new)) for *_, new in self.replaced)
        return numbers or bool(self.notes) or self.late_head is not None


NO_EDITS = Edits()


def edits(marks: Marks, text: str, place_of: PlaceOf) -> Edits:
    """What `marks` mean for `text`, the page's characters.

    A raised number whose note stands on the page becomes `[2]`, like the note's own; any other is
    an exponent, or refers to somewhere else, and becomes `^2`. The line breaks that engines put
    around raised text go.
    """
    with_note = {start.label for start in marks.note_starts}
    starts = {start.first for start in marks.note_starts}
    replaced = []
    for mark in [*marks.raised, *marks.note_starts]:
        start = place_of(mark.first)
        if start is None or text[start : start + len(mark.label)] != mark.label:
            continue
        end = start + len(mark.label)
        if mark.first not in starts:
            start = len(text[:start].rstrip("\r\n"))
        new = _written(mark, text[:start], with_note)
        if mark.first in starts and not text[:start].rstrip(" ").endswith("\n"):
            new = f"\n{new}"  # engines take close lines of small type for one
        if mark.gap is not None:
            end = len(text) - len(text[end:].lstrip("\r\n"))
            new += mark.gap if text[end : end + 1].strip() else ""
        replaced.append((start, end, new))
    notes = [_span(pieces, place_of) for pieces in marks.notes]
    return Edits(
        tuple(sorted(set(replaced))),
        tuple(span for span in notes if span is not None),
        _late_span(marks, place_of),
    )


def applied(edits: Edits, text: str) -> tuple[str, str]:
    """The page's text without its notes, and the notes."""
    out, noted, place = [], [], 0
    for start, end in edits.notes:
        out.append(_replaced(edits, text, place, start).rstrip() + "\n")
        noted.append(_replaced(edits, text, start, end).strip())
        place = end
    out.append(_replaced(edits, text, place, len(text)))
    if edits.late_head is None or edits.notes:
        return "".join(out), "\n".join(noted)
    start, end, place = edits.late_head
    parts = [_replaced(edits, text, *span).strip() for span in ((0, place), (start, end))]
    rest = _replaced(edits, text, place, start) + _replaced(edits, text, end, len(text))
    return f"{' '.join(parts)}\n{rest}", ""


def _written(mark: Raised, before: str, with_note: set[str]) -> str:
    if mark.label in with_note:
        return f"[{mark.label}]"
    if mark.label[-1].isdecimal():
        return f"^{mark.label}"
    # Letters are an exponent after a name of one letter or a bracket, and else as in `1st`.
    is_name = before[-1:].isalpha() and not before[-2:-1].isalnum()
    is_exponent = len(mark.label) == 1 and (is_name or before[-1:] in (")", "]"))
    return f"^{mark.label}" if is_exponent else mark.label


def _replaced(edits: Edits, text: str, start: int, end: int) -> str:
    out = []
    for first, last, new in edits.replaced:
        if start <= first and last <= end:
            out += [text[start:first], new]
            start = last
    return "".join([*out, text[start:end]])


def _span(pieces: range, place_of: PlaceOf) -> Span | None:
    start, end = place_of(pieces.start), place_of(pieces.stop)
    return None if start is None or end is None or start >= end else (start, end)


def _late_span(marks: Marks, place_of: PlaceOf) -> tuple[int, int, int] | None:
    if marks.late_head is None:
        return None
    pieces, anchor = marks.late_head
    span, place = _span(pieces, place_of), place_of(anchor + 1)
    return None if span is None or place is None or place >= span[0] else (*span, place)


def without_notes(edits: Edits, chars: Sequence[str]) -> list[str]:
    """Each character as it is written, several or none for a replaced one; none inside notes."""
    written = list(chars)
    for start, end, new in edits.replaced:
        written[start:end] = [""] * (end - start - 1) + [new]
    for start, end in edits.notes:
        written[start:end] = [""] * (end - start)
    return written
