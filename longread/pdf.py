"""PDF bytes to the raw text of each page: two engines in child processes behind one function.

Owns what a caller sees of a PDF: pages with their engine, passwords asked for, errors in words.
Does not normalise the text. pdf_file.py chooses the engine, reader_pool.py runs the children.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version

from longread.errors import DocumentError, PasswordError
from longread.events import Progress, ProgressFn
from longread.normalize import clean_line
from longread.reader_pool import Reply, Workers

Password = Callable[[str], str | None] | str | None
SelectFn = Callable[[int], Sequence[int]]

# pypdf reads 30 to 60 plain pages a second on a core, pypdfium2 several hundred: in longer files
# pypdf is too slow, and reads only the pages that look wrong in pypdfium2's text.
MANY_PAGES = 200
# Raise it whenever another engine could be chosen for a page, or give another text.
_CHOICE = "choice 2"
_BROTLI = re.compile(rb"/Brotli(?:Decode)?\b")
_REASON_LEN = 160


@dataclass(frozen=True)
class PdfPage:
    """One page as its engine gave it; `text` is None where the page could not be read."""

    page_idx: int
    label: str | None  # as the document prints it; None where that is the plain number
    text: str | None
    engine: str = ""  # pypdf or pypdfium2
    note: str = ""  # why the second engine was taken, or what the page is
    quality: float = 1.0  # share of the characters that look like text
    foot_notes: str = ""  # from the page's foot; not in `text`


@dataclass(frozen=True)
class PdfText:
    """What the engines read from one file."""

    engine: str
    num_pages_total: int
    pages: tuple[PdfPage, ...]  # the selected ones, in order
    repaired: bool  # the file's structure was damaged and had to be rebuilt
    problem: str | None  # why the first unreadable page could not be read


def engine_name() -> str:
    """Names and versions of the engines that `read_pdf` uses, without importing them."""
    return f"pypdf {version('pypdf')} + pypdfium2 {version('pypdfium2')} ({_CHOICE})"


def read_pdf(
    data: bytes, source: str, *, select: SelectFn, password: Password, progress: ProgressFn
) -> PdfText:
    """Extract the pages that `select(num_pages_total)` names (indices from 0, ascending).

    `source` stands in messages, and is what a password callable is asked for. Raises
    DocumentError where the file cannot be opened, PasswordError where it stays locked, and
    whatever `select` raises. A page that fails becomes a PdfPage without text.
    """
    with Workers(data) as workers:
        opened = _open(workers, data, source, password)
        num_pages_total, labels = opened["num_pages"], opened["labels"]
        page_indices = list(select(num_pages_total))
        first = "pypdfium2" if len(page_indices) > MANY_PAGES else "pypdf"
        total = len(page_indices)
        progress(Progress("read", 0, total, "pages"))
        replies: list[Reply] = [{}] * total
        for num_done, (place, reply) in enumerate(workers.read(page_indices, first), start=1):
            replies[place] = reply
            progress(Progress("read", num_done, total, "pages"))
    pages = []
    problem = None
    for page_idx, reply in zip(page_indices, replies, strict=True):
        text = reply.get("text")
        if text is None:
            problem = problem or clean_line(reply.get("problem") or reply.get("reason") or "")
        label = labels[page_idx] if page_idx < len(labels) else None
        engine, note = reply.get("engine", ""), reply.get("note", "")
        quality, foot_notes = reply.get("quality", 1.0), reply.get("foot_notes", "")
        pages.append(PdfPage(page_idx, label, text, engine, note, quality, foot_notes))
    return PdfText(engine_name(), num_pages_total, tuple(pages), opened["repaired"], problem)


def _open(workers: Workers, data: bytes, source: str, password: Password) -> Reply:
    opened = workers.open(None)
    if opened["state"] == "locked":
        given = password(source) if callable(password) else password
        if not given:
            raise PasswordError(
                f"{source} is encrypted: give its password with --password or LONGREAD_PASSWORD"
            )
        opened = workers.open(given)
        if opened["state"] == "locked":
            raise PasswordError(
                f"the password for {source} is wrong: "
                "give another with --password or LONGREAD_PASSWORD"
            )
    if opened["state"] == "open":
        return opened
    if _BROTLI.search(data):
        raise DocumentError(
            f"{source} is compressed with Brotli, which is not supported; "
            "save it with another program in the common form (PDF 1.7)"
        )
    why = clean_line(opened["reason"])[:_REASON_LEN]
    raise DocumentError(
        f"{source} cannot be read as a PDF: {why}; try another copy, or repair it with `qpdf`"
    )
