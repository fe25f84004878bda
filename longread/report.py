"""A report in a file: which kind the file's name asks for, checked before the work, then written.

Owns the choice. What a page looks like is report_html.py's, and the copy of a PDF report_pdf.py's.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from longread import report_html, report_pdf
from longread.conversation import STDIN_SOURCE, Conversation
from longread.document import kind_of, read_source
from longread.errors import UsageError
from longread.output_file import check_output, output_path, write_output
from longread.plain_text import one_line

_HTML = (".html", ".htm")
_PDF = ".pdf"


def report_path(file: str, conversation: Conversation) -> Path:
    """Return the path of a report on the conversation's documents.

    UsageError where its ending is none of ours, where it cannot be made of these documents, and
    where another file would be lost.
    """
    path = output_path(file, conversation.matter.sources)
    ending = path.suffix.lower()
    if ending not in (*_HTML, _PDF):
        raise UsageError(
            f"a report is an HTML page or a PDF: name a file that ends in .html or .pdf, not "
            f"{one_line(path.name, 60)}"
        )
    check_output(path, report_pdf.MARK if ending == _PDF else report_html.MARK)
    if ending == _PDF:
        report_pdf.check_document(*_pdf(conversation))
    return path


def write_report(path: Path, conversation: Conversation) -> str:
    """Write the report of the last turn; return the line that says so. Raises UsageError."""
    session = conversation.session
    turn = session.turns[-1]
    written = f"report written to {one_line(str(path))}"
    if path.suffix.lower() != _PDF:
        documents, heat = session.reading.documents, session.reading.heat()
        write_output(path, report_html.report_html(turn.question, turn.answer, documents, heat))
        return written
    copy, missing = report_pdf.report_pdf(*_pdf(conversation), turn.answer)
    write_output(path, copy)
    if not turn.answer.citations:
        return f"{written}; the answer has no source to highlight"
    if missing:
        numbers = ", ".join(f"[{number}]" for number in missing)
        return f"{written}; not found on their pages: {numbers}"
    return written


def _pdf(conversation: Conversation) -> tuple[bytes, str]:
    """The bytes and the name of the one PDF that the conversation is about."""
    matter = conversation.matter
    if len(matter.sources) != 1:
        raise UsageError(
            "a PDF report is a copy of one document; for several name a file that ends in .html"
        )
    source, sha256 = matter.sources[0], matter.sha256s[0]
    if not sha256:
        raise UsageError(f"{one_line(source)} is a pipe, which no report can read again")
    name = one_line(source)
    data = matter.stdin_data if source == STDIN_SOURCE else read_source(source).data
    if data is None or kind_of(name, data) != "pdf":
        raise UsageError(f"{name} is no PDF; name a report that ends in .html")
    if hashlib.sha256(data).hexdigest() != sha256:
        raise UsageError(f"{name} has changed since it was read; ask again")
    return data, name
