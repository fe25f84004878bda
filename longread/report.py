"""A report in a file: which kind the file's name asks for, checked before the work, then written.

Owns the choice. What a page looks like is report_html.py's.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from longread import report_html
from longread.errors import UsageError
from longread.history import Turn
from longread.output_file import check_output, output_path, write_output
from longread.plain_text import one_line
from longread.reading import ReadingLike

_HTML = (".html", ".htm")


def report_path(file: str, sources: Sequence[str]) -> Path:
    """Return the path of a report on the documents `sources`.

    UsageError where its ending is none of ours, where it cannot be made, and where another file
    would be lost.
    """
    path = output_path(file, sources)
    if path.suffix.lower() not in _HTML:
        raise UsageError(
            f"a report is an HTML page: name a file that ends in .html, not {_shown(path)}"
        )
    check_output(path, report_html.MARK)
    return path


def write_report(path: Path, turn: Turn, reading: ReadingLike) -> None:
    """Write the report of the last turn. Raises UsageError."""
    data = report_html.report_html(turn.question, turn.answer, reading.documents, reading.heat())
    write_output(path, data)


def _shown(path: Path) -> str:
    return one_line(path.name, 60)
