"""Sections of files that have no pages: a heading, the text under it, and its label in citations.

Owns what the readers of all such formats hand over; source code is cut here, for it needs no more
than its lines.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from longread.normalize import clean_line
from longread.plain_text import HEADING_MARK

_LABEL_LEN = 100
_CODE_LINES = 80  # of a piece, at most
_DEFINITION = re.compile(
    r"(?:(?:export|pub(?:\([a-z]+\))?|public|private|async|static|abstract|default|final)\s+)*"
    r"(?:def|class|fn|func|function|interface|struct|enum|trait|impl|type|module|namespace)\s+(\w+)"
)


@dataclass(frozen=True)
class Section:
    """What stands under one heading; raw text with line breaks."""

    heading: str | None
    text: str


def label_of(heading: str | None) -> str | None:
    """The heading as citations show it in the place of a page; see plain_text.place_text."""
    line = clean_line(heading or "")
    if not line:
        return None
    line = line if len(line) <= _LABEL_LEN else line[: _LABEL_LEN - 1].rstrip() + "…"
    return f"{HEADING_MARK} {line}"


def merged(sections: Sequence[Section]) -> list[Section]:
    """Sections with text; a heading without any goes before the next one's text."""
    out: list[Section] = []
    for section in sections:
        if not section.text.strip():
            continue
        if out and out[-1].heading == section.heading:
            out[-1] = Section(section.heading, f"{out[-1].text}\n\n{section.text}")
        else:
            out.append(section)
    return out


def code_sections(text: str) -> Iterator[Section]:
    """Pieces of at most _CODE_LINES lines, cut before a definition where there is one."""
    lines = text.replace("\r\n", "\n").replace("\f", "").split("\n")
    start, name = 0, ""
    while start < len(lines):
        end = min(start + _CODE_LINES, len(lines))
        if end < len(lines):
            for cut in range(end, start + _CODE_LINES // 2, -1):
                if _DEFINITION.match(lines[cut]):
                    end = cut
                    break
        for line in lines[start:end]:
            if match := _DEFINITION.match(line):
                name = name or match[1]
        heading = f"lines {start + 1}-{end}" + (f", {name}" if name else "")
        yield Section(heading, "\n".join(lines[start:end]))
        start, name = end, ""
