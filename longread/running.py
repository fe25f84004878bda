"""Running heads, running feet and page numbers: found at the edges of pages and taken out.

Owns what stands on most pages and counts with them. Works on cleaned text of whole pages.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

_EDGE_LINES = 2  # a running head or foot stands in the first or last two lines of its page
_WIDE_EDGE_LINES = 4  # where notes are drawn before or after a known one
_EDGE_LINE_LEN = 400  # with the gap between its parts
_HEAD_LEN = 110  # without
_RUNNING_SHARE = 0.4  # of the pages: heads that alternate between left and right pages have half
_NUMBERED_SHARE = 0.6  # of the pages: so many page numbers prove that the file has them
_BARE_SHARE = 0.2  # of the pages may hold nothing but running lines
_RUNNING_PAGES = 3
_NUMBERED_PAGES = 10
# A gap of three spaces sets a page number apart from the head beside it; "Section 7" is content.
_WIDE_GAP = re.compile(r"\s{3,}|\t")
_NUMBER = r"[-–—\[(. ]*(?:[Pp]age|[Pp]\.)? ?(\d{1,5})(?: ?(?:of|/) ?\d{1,5})?[-–—\]). ]*"
_BARE_NUMBER = re.compile(_NUMBER)
_HEAD_THEN_NUMBER = re.compile(rf"(\S.*?)\t{_NUMBER}")
_HEAD_THEN_PAGE = re.compile(r"(\S.*?) [\[(]?[Pp]age (\d{1,5})(?: of \d{1,5})?[\])]?")
_NUMBER_THEN_HEAD = re.compile(rf"{_NUMBER}\t(\S.*)")
# With one space, the rest has to look like a title, and not like "Section 7" or "7 members".
_TITLE_THEN_NUMBER = re.compile(r"(\S.*) (\d{1,5})")
_NUMBER_THEN_TITLE = re.compile(r"(\d{1,5}) (\S.*)")
# Names of parts that are numbered: `Section 7` is no title beside a page number.
COUNTED = frozenset(
    "act appendix article book chapter example exercise figure lesson letter part problem "
    "question scene section table volume year".split()
)
_ROMAN = re.compile(r"(?=[ivxl])(?:x{0,3}|xl|lx{0,3})(?:ix|iv|v?i{0,3})")
_ROMAN_VALUES = {"i": 1, "v": 5, "x": 10, "l": 50}
_NAME_OF_PART = re.compile(
    r"(?i:(?:chapter|section|part|appendix) )?[\dA-Z]{0,4}(?:[.:]\d{1,3})*[.:]? "
)
_WORD = re.compile(r"\w+")


@dataclass(frozen=True)
class _Line:
    """What could be a running line. number_offset: its page number minus the page's place."""

    head: str
    number_offset: int | None
    is_roman: bool = False
    is_loose: bool = False  # a title only if the number beside it is the page's


def drop_running_lines(pages: Sequence[str], page_indices: Sequence[int]) -> list[str]:
    """Return `pages` without page numbers and without heads and feet repeated on most pages.

    pages: cleaned texts, spaces inside lines untouched; page_indices: their positions in the
    file, from 0. Only lines at a page's edge go: page numbers that count with the pages, lines
    that are the same but for such a number, and, in a file that numbers most of its pages, any
    title beside the right number that stands elsewhere too. The first page that shows a head
    keeps it, so no wording is lost. Pages that hold nothing else, such as the blank left page
    before a chapter, become empty, unless many would: then such lines are what the pages say.
    """
    split = [page.split("\n") for page in pages]
    candidates = [
        _candidates(lines, page_idx) for lines, page_idx in zip(split, page_indices, strict=True)
    ]
    _settle(candidates, split)
    num_pages_by_line: Counter[_Line] = Counter()
    num_pages_by_offset: Counter[int] = Counter()
    for found in candidates:
        num_pages_by_line.update(set(found.values()))
        offsets = {line.number_offset for line in found.values() if not line.is_roman}
        num_pages_by_offset.update(offset for offset in offsets if offset is not None)
    num_with_text = sum(1 for page in pages if page.strip())
    needed = max(_RUNNING_PAGES, round(_RUNNING_SHARE * num_with_text))
    numbered = max(_NUMBERED_PAGES, round(_NUMBERED_SHARE * num_with_text))
    usual = {offset for offset, number in num_pages_by_offset.items() if number >= numbered}
    running = {
        line
        for line, num_pages in num_pages_by_line.items()
        if num_pages >= (_RUNNING_PAGES if line.is_roman else needed) and not line.is_loose
    }
    heads = {line for line in running if line.head}
    body = _body(split, candidates, running, usual)
    seen: set[_Line] = set()
    kept = []
    for lines, page_idx, found in zip(split, page_indices, candidates, strict=True):
        dropped = set()
        wide = _candidates(lines, page_idx, _WIDE_EDGE_LINES) if heads else {}
        for line_idx, line in wide.items():
            literal = _Line(lines[line_idx].strip(), None)
            if line_idx not in found and (line in heads or literal in heads):
                found[line_idx] = literal if literal in heads else line
        for line_idx, line in sorted(found.items()):
            if line in running:
                if line in seen or not line.head or _stands_in(line.head, body):
                    dropped.add(line_idx)
                seen.add(line)
            elif line.number_offset in usual and not line.is_roman:
                if not line.head or _stands_in(line.head, body):
                    dropped.add(line_idx)
        rest = [line for line_idx, line in enumerate(lines) if line_idx not in dropped]
        kept.append("\n".join(rest) if any(map(str.strip, rest)) else "")
    num_empty = sum(1 for page, text in zip(pages, kept, strict=True) if page.strip() and not text)
    if num_empty > _BARE_SHARE * num_with_text:
        return [text or page for page, text in zip(pages, kept, strict=True)]
    return kept


def _settle(candidates: Sequence[dict[int, _Line]], split: Sequence[list[str]]) -> None:
    """Take a line that stands so on several pages as it stands: `RFC 1 TCP August 2022`."""
    num_pages_by_text: Counter[str] = Counter()
    for found, lines in zip(candidates, split, strict=True):
        num_pages_by_text.update({lines[line_idx].strip() for line_idx in found})
    for found, lines in zip(candidates, split, strict=True):
        for line_idx, line in found.items():
            text = lines[line_idx].strip()
            if line.head and line.number_offset is not None:
                if num_pages_by_text[text] >= _RUNNING_PAGES:
                    found[line_idx] = _Line(text, None)


def _body(
    split: Sequence[list[str]],
    candidates: Sequence[dict[int, _Line]],
    running: set[_Line],
    offsets: set[int],
) -> str:
    """The words of all lines but those that may be dropped."""
    lines = []
    for page, found in zip(split, candidates, strict=True):
        for line_idx, text in enumerate(page):
            line = found.get(line_idx)
            if line is None or not (line in running or line.number_offset in offsets):
                lines.append(text)
    return " ".join(_WORD.findall(" ".join(lines).casefold()))


def _stands_in(head: str, body: str) -> bool:
    name = _NAME_OF_PART.match(head)
    title = head[name.end() :] if name else head
    title = " ".join(_WORD.findall(title.casefold()))
    return len(title) > 3 and title in body


def _candidates(lines: list[str], page_idx: int, num_edge: int = _EDGE_LINES) -> dict[int, _Line]:
    """Line index -> what it is, for what could be a running line."""
    filled = [line_idx for line_idx, line in enumerate(lines) if line.strip()]
    edges = filled[:num_edge]
    edges += filled[num_edge:][-num_edge:]
    found: dict[int, _Line] = {}
    for line_idx in edges:
        text = lines[line_idx].strip()
        if len(text) > _EDGE_LINE_LEN:
            continue
        line = _parse(_WIDE_GAP.sub("\t", text), page_idx)
        if line is not None and len(line.head) <= _HEAD_LEN:
            found[line_idx] = line
    return found


def _parse(text: str, page_idx: int) -> _Line | None:
    if match := _BARE_NUMBER.fullmatch(text):
        return _Line("", int(match[1]) - page_idx)
    if _ROMAN.fullmatch(text):
        return _Line("", _roman(text) - page_idx, is_roman=True)
    if match := _HEAD_THEN_NUMBER.fullmatch(text) or _HEAD_THEN_PAGE.fullmatch(text):
        return _Line(match[1], int(match[2]) - page_idx)
    if match := _NUMBER_THEN_HEAD.fullmatch(text):
        return _Line(match[2], int(match[1]) - page_idx)
    if (match := _TITLE_THEN_NUMBER.fullmatch(text)) and _is_title(match[1]):
        return _Line(match[1], int(match[2]) - page_idx)
    if (match := _NUMBER_THEN_TITLE.fullmatch(text)) and _is_title(match[2]):
        return _Line(match[2], int(match[1]) - page_idx)
    for pattern, title_idx, number_idx in ((_TITLE_THEN_NUMBER, 1, 2), (_NUMBER_THEN_TITLE, 2, 1)):
        match = pattern.fullmatch(text)
        if match and " " in match[title_idx] and match[title_idx][-1] not in ".,;:!?":
            return _Line(match[title_idx], int(match[number_idx]) - page_idx, is_loose=True)
    head, _, last = text.rpartition(" ")
    if head and _ROMAN.fullmatch(last) and _is_title(head.strip()):
        return _Line(head.strip(), _roman(last) - page_idx, is_roman=True)
    # What ends like a sentence may be the text's own.
    if text[-1] in ".,;:!?" or not any(map(str.isalpha, text)):
        return None
    return _Line(text, None)


def _is_title(text: str) -> bool:
    return (
        (text[0].isupper() or text[0].isdigit())
        and text[-1] not in ".,;:!?"
        and (text.split()[-1][0].isupper() or text.split()[-1][0].isdigit())
        and text.split()[-1].casefold() not in COUNTED
        and text.split()[0].casefold() not in COUNTED - {"chapter", "appendix", "part"}
        and any(map(str.isalpha, text))
    )


def _roman(text: str) -> int:
    values = [_ROMAN_VALUES[char] for char in text]
    return sum(
        -value if value < following else value
        for value, following in zip(values, [*values[1:], 0], strict=True)
    )
