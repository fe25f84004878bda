"""The pages of a typeset document, as engines give them, to the text that is read.

Owns the order of the steps; each step is another file's. Keeps what stands on a page on that page,
so that citations name the right one.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from longread import contents, continued, normalize, running
from longread.pdf import PdfPage

# With the marks of notes and closing quotes that may follow the stop.
_SENTENCE_END = re.compile(r"[.!?:;][\"'”’»)\]]*(?:\[\d{1,3}\]|\^\d{1,3})*")
_CONTINUED_LINES = 15  # at a page's end that may belong to one unfinished sentence


def clean_pages(pages: Sequence[PdfPage]) -> list[str]:
    """The pages' texts in their normal form, with the notes of each in it."""
    return place_notes(*bodies_and_notes(pages))


def bodies_and_notes(pages: Sequence[PdfPage]) -> tuple[list[str], list[str]]:
    """The pages' texts without running lines and without their foot notes, and the notes."""
    page_indices = [page.page_idx for page in pages]
    bodies = [normalize.join_spaced_letters(page.text or "") for page in pages]
    bodies = [normalize.clean_text(body) for body in bodies]
    bodies = running.drop_running_lines(bodies, page_indices)
    bodies = continued.drop_repeats(bodies)
    bodies = contents.drop_page_numbers(bodies, page_indices)
    notes = [normalize.clean_text(page.foot_notes) for page in pages]
    joined = normalize.join_hyphens([*bodies, *notes], typeset=True)
    texts = [text.strip("\n") for text in joined]
    return texts[: len(bodies)], texts[len(bodies) :]


def place_notes(bodies: Sequence[str], notes: Sequence[str]) -> list[str]:
    """Each page's notes at its end, or before a last sentence that the next page goes on with."""
    placed = []
    for place, (body, note) in enumerate(zip(bodies, notes, strict=True)):
        following = bodies[place + 1] if place + 1 < len(bodies) else ""
        lines = body.split("\n")
        end = _end_of_sentence(lines) if note and _goes_on(body, following) else None
        if end is None:
            placed.append("\n\n".join(part for part in (body, note) if part))
        else:
            head, tail = "\n".join(lines[:end]), "\n".join(lines[end:])
            placed.append(f"{head}\n\n{note}\n\n{tail}")
    return placed


def _goes_on(body: str, following: str) -> bool:
    last = body.rsplit("\n", 1)[-1].rstrip()
    if not last or _ends_sentence(last):
        return False
    return following.lstrip("\"'“‘«([")[:1].islower()


def _end_of_sentence(lines: Sequence[str]) -> int | None:
    """The line after the last one that ends a sentence, not too far from the end."""
    for end in range(len(lines) - 1, max(0, len(lines) - 1 - _CONTINUED_LINES), -1):
        if _ends_sentence(lines[end - 1].rstrip()):
            return end
    return None


def _ends_sentence(line: str) -> bool:
    found = list(_SENTENCE_END.finditer(line[-20:]))
    return bool(found) and found[-1].end() == len(line[-20:])
