"""DOCX to sections: paragraphs and tables in order, cut at paragraphs with a heading's style.

Owns what of a Word document is text. Heads, feet, notes and comments are not read.
"""

from __future__ import annotations

import io
import re

from longread.sections import Section

_HEADING_STYLE = re.compile(r"(?:heading [1-3]|title|überschrift [1-3]|titre [1-3])$", re.I)


def docx_sections(data: bytes) -> list[Section]:
    """Sections of the document's body. Raises what python-docx raises on damaged files."""
    import docx
    from docx.table import Table

    sections: list[Section] = []
    heading: str | None = None
    lines: list[str] = []
    for block in docx.Document(io.BytesIO(data)).iter_inner_content():
        if isinstance(block, Table):
            for row in block.rows:
                cells: list[str] = []
                for cell in row.cells:  # a merged cell comes once for each column
                    text = " ".join(cell.text.split())
                    if not cells or cells[-1] != text:
                        cells.append(text)
                lines.append(" | ".join(cells))
            lines.append("")
            continue
        style = block.style.name if block.style is not None else ""
        if block.text.strip() and _HEADING_STYLE.match(style or ""):
            sections.append(Section(heading, "\n".join(lines)))
            heading, lines = block.text, []
        lines += [block.text, ""]
    sections.append(Section(heading, "\n".join(lines)))
    return sections
