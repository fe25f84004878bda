"""HTML to sections of text: what a reader sees, cut at the headings.

Owns which elements break lines and which hold no text. EPUB chapters come through here too.
"""

from __future__ import annotations

import re
from typing import Any

from longread.sections import Section

_SKIPPED = frozenset("script style noscript template head svg math iframe object nav".split())
_BLOCKS = frozenset(
    "address article aside blockquote body caption dd details div dl dt fieldset figcaption figure "
    "footer form h1 h2 h3 h4 h5 h6 header hr html li main ol p pre section summary table tbody "
    "tfoot thead tr ul".split()
)
_HEADINGS = ("h1", "h2", "h3")
_CELLS = ("td", "th")
_SPACES = re.compile(r"\s+")


def html_sections(data: bytes, *, keep_title: bool = True) -> list[Section]:
    """Sections of a page, each with the heading (h1 to h3) over it; the first has the title.

    data: bytes in whatever encoding the page declares.
    """
    from bs4 import BeautifulSoup, Comment, NavigableString, Tag
    from bs4.element import PreformattedString

    soup = BeautifulSoup(data, "lxml")
    title = soup.title.get_text() if soup.title is not None and keep_title else None
    heading = _SPACES.sub(" ", title).strip() if title else None
    sections: list[Section] = []
    lines: list[str] = []
    last_block: Any = None
    last_cell: Any = None
    last_heading: Any = None

    def close() -> None:
        nonlocal lines
        sections.append(Section(heading, "\n".join(line.rstrip() for line in lines)))
        lines = []

    for node in soup.descendants:
        if isinstance(node, Tag):
            if node.name == "br":
                lines.append("")
            continue
        if not isinstance(node, NavigableString) or isinstance(node, Comment | PreformattedString):
            continue
        names = _ancestors(node)
        if any(tag.name in _SKIPPED or tag.has_attr("hidden") for tag in names):
            continue
        block = next((tag for tag in names if tag.name in _BLOCKS), None)
        in_pre = any(tag.name in ("pre", "textarea") for tag in names)
        text = str(node) if in_pre else _SPACES.sub(" ", str(node))
        if not text.strip() and not in_pre:
            if lines and lines[-1] and block is last_block:
                lines[-1] += " "
            continue
        found = next((tag for tag in names if tag.name in _HEADINGS), None)
        if found is not None and found is not last_heading:
            close()
            heading = _SPACES.sub(" ", found.get_text(" ")).strip() or heading
        last_heading = found
        cell = next((tag for tag in names if tag.name in _CELLS), None)
        if block is not last_block or not lines:
            if lines and block is not None and block.name not in ("li", "tr", "dt", "dd"):
                lines.append("")
            lines.append("- " if block is not None and block.name == "li" else "")
        elif cell is not last_cell:
            lines[-1] = lines[-1].rstrip() + " | "
        last_block, last_cell = block, cell
        first, *rest = text.split("\n") if in_pre else [text]
        lines[-1] += first.lstrip() if not lines[-1].strip() and not in_pre else first
        lines += rest
    close()
    return sections


def _ancestors(node: Any) -> list[Any]:
    found = []
    for parent in node.parents:
        if parent.name == "[document]":
            break
        found.append(parent)
    return found
