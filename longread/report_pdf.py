"""A copy of the PDF that an answer comes from, with its sources highlighted.

Owns what is asked of the copy and the errors in words; pdf_highlights.py makes it, in a child
process, for the file may be hostile.
"""

from __future__ import annotations

import base64

from longread.errors import DocumentError, UsageError
from longread.events import Answer
from longread.normalize import clean_line
from longread.pdf_highlights import MARK_KEY
from longread.reader_pool import Workers

MARK = MARK_KEY.encode()  # tells our copies from other files
_OTHERWISE = "name a file that ends in .html instead"
_REASON_LEN = 160


def check_document(data: bytes, source: str) -> None:
    """Raise UsageError where no copy of the PDF can be made: it is encrypted, or unreadable."""
    _run(data, source, {"do": "highlight", "quotes": None})


def report_pdf(data: bytes, source: str, answer: Answer) -> tuple[bytes, list[int]]:
    """Return the copy, and the numbers of the sources that were not found on their pages."""
    quotes = [
        (
            citation.page - 1,
            citation.quote,
            f"Source {number}: {citation.score:.1%} of the attention",
        )
        for number, citation in enumerate(answer.citations, 1)
    ]
    reply = _run(data, source, {"do": "highlight", "quotes": quotes})
    copy = base64.b64decode(reply["copy"])
    missing = [number for number, found in enumerate(reply["found"], 1) if not found]
    return copy, missing


def _run(data: bytes, source: str, job: dict) -> dict:
    with Workers(data) as workers:
        reply = workers.run(job)
    if reply["state"] == "locked":
        raise UsageError(
            f"{source} is encrypted, and a copy of it with highlights would not be; {_OTHERWISE}"
        )
    if reply["state"] != "written":
        why = clean_line(reply["reason"])[:_REASON_LEN]
        raise DocumentError(f"{source} cannot be copied with highlights: {why}; {_OTHERWISE}")
    return reply
