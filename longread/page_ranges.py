"""Page numbers as users write them, and as messages spell them.

Owns `3,10-40,50-`: from text to ranges, and from page indices to words.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence

from longread import normalize
from longread.errors import UsageError

_PAGE_RANGE = re.compile(r"(\d+)(?:(-)(\d*))?", re.ASCII)
_MAX_NAMED_RANGES = 12  # page ranges that one warning spells out


def parse_pages(text: str) -> tuple[range, ...]:
    """Read `3,10-40,50-` (numbers from 1) as ranges of page_idx: ascending and disjoint.

    A range without an end has sys.maxsize as its stop. Raises UsageError.
    """
    ranges = []
    for part in text.split(","):
        match = _PAGE_RANGE.fullmatch("".join(part.split()))
        # Twelve digits are more than any file has pages, and int() refuses 4,300.
        if not match or max(len(match[1]), len(match[3] or "")) > 12:
            raise UsageError(f"--pages {normalize.clean_line(text)!r}: write it like 3,10-40")
        first = int(match[1])
        last = (int(match[3]) if match[3] else sys.maxsize) if match[2] else first
        if first < 1 or last < first:
            raise UsageError(
                f"--pages {normalize.clean_line(text)!r}: pages count from 1, lower number first"
            )
        ranges.append(range(first - 1, last))
    merged: list[range] = []
    for span in sorted(ranges, key=lambda span: span.start):
        if merged and span.start <= merged[-1].stop:
            merged[-1] = range(merged[-1].start, max(merged[-1].stop, span.stop))
        else:
            merged.append(span)
    return tuple(merged)


def page_list(page_indices: Sequence[int]) -> str:
    """`page 3` or `pages 3, 7-9`; ascending indices in, numbers from 1 out."""
    spans: list[list[int]] = []
    for page_idx in page_indices:
        if spans and page_idx == spans[-1][1] + 1:
            spans[-1][1] = page_idx
        else:
            spans.append([page_idx, page_idx])
    shown = [f"{a + 1}" if a == b else f"{a + 1}-{b + 1}" for a, b in spans[:_MAX_NAMED_RANGES]]
    if len(spans) > _MAX_NAMED_RANGES:
        shown.append(f"and more, {len(page_indices)} in all")
    return f"page{'s' if len(page_indices) > 1 else ''} {', '.join(shown)}"
