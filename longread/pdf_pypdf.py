"""PDF pages through pypdf: opening, decrypting, labels and text.

Owns every use of pypdf for reading text. It is the first engine: strict about what a file says,
and it follows the content stream. Does not judge the text.
"""

from __future__ import annotations

import io
import logging
import unicodedata
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from longread.normalize import clean_line

if TYPE_CHECKING:
    from pypdf import PageObject, PdfReader


class PypdfFile:
    """An open file. Its methods raise whatever pypdf meets: damaged files raise anything."""

    def __init__(self, data: bytes) -> None:
        from pypdf import PdfReader

        self.reader = PdfReader(io.BytesIO(data), strict=False)

    def unlock(self, password: str | None) -> bool:
        """Whether the file is open now. An empty password is tried first.

        It is what files have that only restrict printing or copying.
        """
        if not self.reader.is_encrypted or self.reader.decrypt(""):
            return True
        if not password:
            return False
        # pypdf takes Latin-1 where it can; AES-256 files have UTF-8, in SASLprep's normal form.
        forms = (password, password.encode(), unicodedata.normalize("NFKC", password).encode())
        return any(bool(self.reader.decrypt(form)) for form in forms)

    def __len__(self) -> int:
        return len(self.reader.pages)

    def labels(self) -> list[str | None]:
        """A label a page, None where it is the plain number."""
        return _labels(self.reader, len(self))

    def text(self, page_idx: int) -> str:
        """The raw text of one page."""
        return page_text(self.reader.pages[page_idx], self.reader)


class _LogCollector(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.loggers: set[str] = set()

    def emit(self, record: logging.LogRecord) -> None:
        self.loggers.add(record.name)


@contextmanager
def captured_log() -> Iterator[set[str]]:
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


def _labels(reader: PdfReader, num_pages: int) -> list[str | None]:
    try:
        labels = [clean_line(label) for label in reader.page_labels]
    except Exception:
        return [None] * num_pages
    labels += [""] * (num_pages - len(labels))
    return [label if label not in ("", str(i + 1)) else None for i, label in enumerate(labels)]


def page_text(page: PageObject, reader: PdfReader) -> str:
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
