"""Lists of contents: dotted leaders, and the page numbers they lead to.

Owns how such a list is known. A reader of the text has no pages to turn to, and a line of dots
costs as many tokens as a line of words. Works on cleaned texts.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

from longread.running import COUNTED

# Possessive, and never begun inside a run: linear on a page of nothing but dots or spaces.
_DOTS = r"(?<![ \t.\u00b7\u2026])[ \t]*+(?:[.\u00b7\u2026][ \t]?+)"
_LEADER = re.compile(_DOTS + "{8,}+")  # five dots may be an ellipsis and a stop
_ENTRY_END = re.compile(_DOTS + r"{3,}+[ \t]*+(\d{1,4}|[ivxlc]{1,7})$")
_PLAIN_ENTRY = re.compile(r"(\S.*\S) (\d{1,4})")
_SHORT = " ... "
_MIN_ENTRIES = 4  # of a page
_FALLING_SHARE = 0.1
_PROOFS = 3
_PROOF_SHARE = 0.25  # of the entries
_TITLE_LEN = 300  # of a line with its leader
_SPACES = re.compile(r"\s+")


def drop_page_numbers(pages: Sequence[str], page_indices: Sequence[int]) -> list[str]:
    """Return `pages` with short leaders, and lists of contents without leaders and page numbers.

    pages: cleaned texts; page_indices: their positions in the file, from 0. The numbers at the ends
    of lines go only where they rise, and where the titles before some of them stand as lines on the
    pages they name, always as many pages away: amounts in a table with leaders stay.
    """
    if not any(_LEADER.search(page) for page in pages):
        return list(pages)
    split = [page.split("\n") for page in pages]
    found = [_entries(lines) for lines in split]
    lists = [place for place, entries in enumerate(found) if _is_list(entries)]
    offset = _proved_offset([found[place] for place in lists], split, page_indices)
    if offset is not None:
        for place in lists:
            _strip(split[place], found[place], max(page_indices) - offset)
    return ["\n".join(_LEADER.sub(_SHORT, line).rstrip() for line in lines) for lines in split]


def _entries(lines: Sequence[str]) -> dict[int, tuple[str, str]]:
    """Line index -> title and number, of lines with a leader."""
    found = {}
    for line_idx, line in enumerate(lines):
        match = _ENTRY_END.search(line.strip()) if len(line) <= _TITLE_LEN else None
        if match and match.start():
            found[line_idx] = (line.strip()[: match.start()], match[1])
    return found


def _is_list(entries: dict[int, tuple[str, str]]) -> bool:
    numbers = [int(number) for _, number in entries.values() if number.isdecimal()]
    num_falling = sum(b < a for a, b in zip(numbers, numbers[1:], strict=False))
    return len(entries) >= _MIN_ENTRIES and num_falling <= _FALLING_SHARE * len(numbers)


def _proved_offset(
    lists: Sequence[dict[int, tuple[str, str]]],
    split: Sequence[list[str]],
    page_indices: Sequence[int],
) -> int | None:
    """A page's place in the file minus its number, where the lists' titles prove one."""
    pages_by_title: dict[str, list[int]] = {}
    for lines, page_idx in zip(split, page_indices, strict=True):
        for line in lines:
            if 0 < len(line) <= _TITLE_LEN:
                pages_by_title.setdefault(_title(line), []).append(page_idx)
    offsets: Counter[int] = Counter()
    num_entries = 0
    for entries in lists:
        for title, number in entries.values():
            if number.isdecimal():
                num_entries += 1
                places = pages_by_title.get(_title(title), ())
                offsets.update({page_idx - int(number) for page_idx in places})
    offset, num_proofs = max(offsets.items(), key=lambda item: item[1], default=(0, 0))
    return offset if num_proofs >= max(_PROOFS, _PROOF_SHARE * num_entries) else None


def _title(line: str) -> str:
    return _SPACES.sub(" ", line).strip(" .").casefold()


def _strip(lines: list[str], entries: dict[int, tuple[str, str]], last_number: int) -> None:
    """Take leaders and numbers off the list's lines, also off those without a leader between."""
    numbers = {i: int(number) for i, (_, number) in entries.items() if number.isdecimal()}
    for line_idx, (title, _) in entries.items():
        lines[line_idx] = title
    if not numbers:
        return
    low = min(numbers.values())
    for line_idx in range(max(0, min(numbers) - 1), len(lines)):
        if line_idx in numbers:
            low = numbers[line_idx]
        elif line_idx not in entries:
            match = _PLAIN_ENTRY.fullmatch(lines[line_idx][:_TITLE_LEN].strip())
            high = next((n for i, n in numbers.items() if i > line_idx), last_number)
            is_number = match is not None and low <= int(match[2]) <= high
            if match is not None and is_number and match[1].split()[-1].casefold() not in COUNTED:
                lines[line_idx], low = match[1].rstrip(" ."), int(match[2])
            elif line_idx > max(numbers):
                return
