"""PDF bytes to the raw text of each page, through pypdf.

Owns opening, decrypting and walking a PDF. Does not normalise or judge the text. `PdfText` is the
seam for other engines: a function with `read_pdf`'s signature is one.
"""

from __future__ import annotations

import io
import logging
import unicodedata
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from longread.errors import DocumentError, LongreadError, PasswordError
from longread.events import Progress, ProgressFn
from longread.normalize import clean_line

if TYPE_CHECKING:
    from pypdf import PageObject, PdfReader

Password = Callable[[str], str | None] | str | None
SelectFn = Callable[[int], Sequence[int]]

_REASON_LEN = 160


@dataclass(frozen=True)
class PdfPage:
    """One page as the engine gave it; `text` is None where the page could not be read."""

    page_idx: int
    label: str | None  # as the document prints it; None where that is the plain number
    text: str | None


@dataclass(frozen=True)
class PdfText:
    """What an engine read from one file."""

    engine: str
    num_pages_total: int
    pages: tuple[PdfPage, ...]  # the selected ones, in order
    repaired: bool  # the file's structure was damaged and had to be rebuilt
    problem: str | None  # why the first unreadable page could not be read


def engine_name() -> str:
    """Name and version of the engine that `read_pdf` uses, without importing it."""
    return f"pypdf {version('pypdf')}"


def read_pdf(
    data: bytes, source: str, *, select: SelectFn, password: Password, progress: ProgressFn
) -> PdfText:
    """Extract the pages that `select(num_pages_total)` names (indices from 0, ascending).

    `source` stands in messages, and is what a password callable is asked for. Raises
    DocumentError where the file cannot be opened, PasswordError where it stays locked, and
    whatever `select` raises. A page that fails becomes a PdfPage without text.
    """
    with _captured_log() as loggers:
        try:
            reader = _open(data)
            if reader.is_encrypted:
                _unlock(reader, source, password)
            num_pages_total = len(reader.pages)
        except LongreadError:
            raise
        except Exception as exc:
            # Damaged files raise anything, such as RecursionError or TypeError.
            raise DocumentError(
                f"{source} cannot be read as a PDF: {_reason(exc)}; "
                "try another copy, or repair it with `qpdf`"
            ) from exc
        if num_pages_total == 0:
            raise DocumentError(f"{source} is a PDF without pages; try another copy")
        repaired = "pypdf._reader" in loggers
        page_indices = select(num_pages_total)
        labels = _labels(reader, num_pages_total)
        pages = []
        problem = None
        progress(Progress("read", 0, len(page_indices), "pages"))
        for num_done, page_idx in enumerate(page_indices, start=1):
            text: str | None = None
            try:
                text = _page_text(reader.pages[page_idx], reader)
            except Exception as exc:
                problem = problem or _reason(exc)
            pages.append(PdfPage(page_idx, labels[page_idx], text))
            progress(Progress("read", num_done, len(page_indices), "pages"))
    return PdfText(engine_name(), num_pages_total, tuple(pages), repaired, problem)


class _LogCollector(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.loggers: set[str] = set()

    def emit(self, record: logging.LogRecord) -> None:
        self.loggers.add(record.name)


@contextmanager
def _captured_log() -> Iterator[set[str]]:
    """Keep pypdf's log and warnings from the terminal; gives the modules that had to log."""
    handler = _LogCollector()
    logger = logging.getLogger("pypdf")
    propagate = logger.propagate
    logger.addHandler(handler)
    logger.propagate = False
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield handler.loggers
    finally:
        logger.propagate = propagate
        logger.removeHandler(handler)


def _open(data: bytes) -> PdfReader:
    from pypdf import PdfReader

    return PdfReader(io.BytesIO(data), strict=False)


def _unlock(reader: PdfReader, source: str, password: Password) -> None:
    # An empty user password is what files have that only restrict printing or copying.
    if reader.decrypt(""):
        return
    given = password(source) if callable(password) else password
    if not given:
        raise PasswordError(
            f"{source} is encrypted: give its password with --password or LONGREAD_PASSWORD"
        )
    # pypdf takes Latin-1 where it can; AES-256 files have UTF-8, in SASLprep's normal form.
    forms = (given, given.encode(), unicodedata.normalize("NFKC", given).encode())
    if not any(reader.decrypt(form) for form in forms):
        raise PasswordError(
            f"the password for {source} is wrong: give another with --password or LONGREAD_PASSWORD"
        )


def _labels(reader: PdfReader, num_pages: int) -> list[str | None]:
    try:
        labels = [clean_line(label) for label in reader.page_labels]
    except Exception:
        return [None] * num_pages
    labels += [""] * (num_pages - len(labels))
    return [label if label not in ("", str(i + 1)) else None for i, label in enumerate(labels)]


def _page_text(page: PageObject, reader: PdfReader) -> str:
    from pypdf.generic import NameObject

    key = NameObject("/Contents")
    try:
        contents = page.raw_get(key)
        stream = _with_word_spacing(page, reader)
    except Exception:
        stream = None  # odd content: pypdf's own reading copes with more
    if stream is None:
        return page.extract_text()
    page[key] = stream
    try:
        # A visitor, even an idle one, spares pypdf turning the operations back into bytes.
        return page.extract_text(visitor_operand_before=_ignore)
    finally:
        page[key] = contents  # the reader keeps its pages: parsed operations would pile up


def _ignore(operator: Any, operands: Any, matrix: Any, text_matrix: Any) -> None:
    return


def _with_word_spacing(page: PageObject, reader: PdfReader) -> Any:
    """Return the page's content with word spacing (`Tw`) written as `TJ` offsets, None if no need.

    pypdf leaves `Tw` out of a string's width (seen in 7.1), so in justified text it takes the
    accumulated error at the next string for a gap and puts a space inside a word: 5 % of the
    words of a groff document. In `TJ` offsets, the same distance is counted.
    """
    from pypdf.generic import ContentStream

    stream = ContentStream(page["/Contents"], reader, "bytes")
    data = stream.get_data()
    if b"Tw" not in data and b'"' not in data:
        return None
    simple_fonts = _simple_fonts(page)
    out: list[tuple[Any, bytes]] = []
    font, size, spacing = None, 0.0, 0.0
    stack = []
    for operands, operator in stream.operations:
        if operator == b"q":
            stack.append((font, size, spacing))
        elif operator == b"Q" and stack:
            font, size, spacing = stack.pop()
        elif operator == b"Tf":
            font, size = operands[0], float(operands[1])
        elif operator == b"Tw":
            spacing = float(operands[0])
            continue
        elif operator == b"'":
            out.append(([], b"T*"))
            operator = b"Tj"
        elif operator == b'"':
            spacing = float(operands[0])
            out += [([operands[1]], b"Tc"), ([], b"T*")]
            operands, operator = operands[2:], b"Tj"
        if operator in (b"Tj", b"TJ") and spacing and size and font in simple_fonts:
            strings = operands[0] if operator == b"TJ" else operands
            operands, operator = [_spaced(strings, -1000 * spacing / size)], b"TJ"
        out.append((operands, operator))
    stream.operations = out
    return stream


def _simple_fonts(page: PageObject) -> set[str]:
    """Names of the page's fonts with one-byte codes: the only ones word spacing applies to."""
    resources: Any = page["/Resources"]
    fonts = resources["/Font"]
    return {name for name in fonts if fonts[name].get("/Subtype") != "/Type0"}


def _spaced(strings: Sequence[Any], offset: float) -> Any:
    """A `TJ` array: `strings` cut after each space (code 32), with `offset` at the cuts."""
    from pypdf.generic import ArrayObject, ByteStringObject, FloatObject

    out = ArrayObject()
    for item in strings:
        if not isinstance(item, bytes) or b" " not in item:
            out.append(item)
            continue
        *heads, tail = item.split(b" ")
        for head in heads:
            out.append(ByteStringObject(head + b" "))
            out.append(FloatObject(offset))
        if tail:
            out.append(ByteStringObject(tail))
    return out


def _reason(exc: Exception) -> str:
    """One short line out of an exception whose text may hold parts of the file."""
    text = clean_line(str(exc)).rstrip(".") or type(exc).__name__
    return text if len(text) <= _REASON_LEN else text[:_REASON_LEN] + "..."
