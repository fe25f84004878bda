"""One PDF behind both engines: opened by whichever can, and read page by page by the better one.

Owns the order in which engines are tried. Runs in a child process (reader_child.py), since
a damaged file may take any time and memory, or end the process.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, replace

from longread import page_choice, pdf_repair
from longread.normalize import clean_line, clean_text
from longread.page_choice import Second
from longread.pdf_fields import page_fields
from longread.pdf_pdfium import LockedError, PdfiumFile, PdfiumPage
from longread.pdf_pypdf import PypdfFile, captured_log

PYPDF, PDFIUM, PDFIUM_ALONE = "pypdf", "pypdfium2", "pypdfium2 alone"
_REASON_LEN = 160
_SCAN = "no text; a picture or a scan"


class UnreadableError(Exception):
    """No engine opens the file; the text says why."""


@dataclass(frozen=True)
class PageRead:
    """One page: `text` is None where no engine could read it, and `problem` says why."""

    text: str | None
    engine: str
    note: str = ""  # why the second engine was taken, or what the page is
    problem: str | None = None
    quality: float = 1.0  # share of the characters that look like text
    foot_notes: str = ""  # from the page's foot; not in `text`


class PdfFile:
    """A file that is opened once and read page by page."""

    def __init__(self, data: bytes, password: str | None, *, quick: bool = False) -> None:
        """Raises LockedError where the password is wrong or needed, UnreadableError otherwise.

        With `quick`, where pypdfium2 opens the file pypdf does so only once a page needs it, and
        `labels` are not read.
        """
        self._pending: tuple[bytes, str | None] | None = None
        self.repaired = False
        self._problem = "the page holds nothing"  # or why pypdf cannot open the file
        self._pypdf: PypdfFile | None = None
        self._pdfium: PdfiumFile | None = None
        try:
            if quick:
                with suppress(Exception):
                    self._pdfium = PdfiumFile(data, password or None)
            if self._pdfium is not None and len(self._pdfium) > 0:
                self._pending = (data, password)
            else:
                self._open(data, password)
        except UnreadableError:
            rebuilt = pdf_repair.rebuild(data)
            if rebuilt is None:
                raise
            self._open(rebuilt, password)
            self.repaired = True
        self.num_pages = len(self._pypdf or self._pdfium or ())
        self.labels: list[str | None] = [None] * self.num_pages
        if self._pypdf is not None:
            with suppress(Exception):
                self.labels = self._pypdf.labels()
        # Pages are compared one with another, which needs the same ones.
        self._paired = self._pdfium is not None and len(self._pdfium) == self.num_pages

    def _open(self, data: bytes, password: str | None) -> None:
        problem = ""
        with captured_log() as loggers:
            try:
                self._open_pypdf(data, password)
                self.repaired = "pypdf._reader" in loggers
            except LockedError:
                raise
            except Exception as exc:
                # Damaged files raise anything, such as RecursionError or TypeError.
                problem = reason(exc)
        try:
            pdfium = PdfiumFile(data, password or None)
            if len(pdfium) > 0:
                self._pdfium = pdfium
        except LockedError:
            if self._pypdf is None:
                raise
        except Exception as exc:
            problem = problem or reason(exc)
        if self._pypdf is None and self._pdfium is None:
            raise UnreadableError(problem)
        self.repaired = self.repaired or self._pypdf is None
        self._problem = problem or self._problem

    def _open_pypdf(self, data: bytes, password: str | None) -> None:
        opened = PypdfFile(data)
        if not opened.unlock(password):
            raise LockedError
        if len(opened) == 0:
            raise ValueError("it has no pages")
        self._pypdf = opened

    def read(self, page_idx: int, first: str) -> PageRead:
        """Read a page with both engines where it takes both; `first` is the one to begin with.

        With PDFIUM first, pypdf is asked only where that text looks wrong; with PDFIUM_ALONE, as
        after pypdf took too long, never.
        """
        with captured_log():
            second, problem = self._ask_pdfium(page_idx)
            read = self._read(page_idx, first, second, problem)
            if read.text is None:
                return read
            quality = 1.0 - page_choice.bad_share(read.text)
            text = read.text
            if first != PDFIUM_ALONE and (second is None or second.has_notes):
                text = self._with_fields(page_idx, text)
            return replace(read, text=text, quality=quality)

    def _read(
        self, page_idx: int, first: str, second: PdfiumPage | None, problem_b: str | None
    ) -> PageRead:
        if second is not None and not second.on_page:
            return PageRead("", PDFIUM, "its text lies outside the page")
        if first == PDFIUM_ALONE:
            note = "pypdf takes too long or fails"
            if second is None:
                return PageRead(None, PDFIUM, note, problem_b)
            return PageRead(second.text, PDFIUM, note, problem_b, foot_notes=second.foot_notes)
        if first == PDFIUM and second is not None:
            turned = second.rotation == 180
            if not turned and not page_choice.needs_second_opinion(second.text):
                return PageRead(second.text, PDFIUM, foot_notes=second.foot_notes)
        text, problem_a = self._ask_pypdf(page_idx)
        if text is None and (second is None or not second.text.strip()):
            if self._pypdf is None and second is not None and second.has_ink:
                return PageRead("", PDFIUM, _SCAN)
            return PageRead(None, "", problem=problem_a or problem_b or self._problem)
        if text is not None and second is not None and _lacks_letters(second.text, text):
            second = self._ask_pdfium(page_idx, widen=True)[0] or second
        take_second, why = page_choice.choose(text, _second(second))
        if take_second and second is not None:
            why = why.replace("the first engine", PYPDF)
            return PageRead(second.text, PDFIUM, why, foot_notes=second.foot_notes)
        note = ""
        if not (text or "").strip() and second is not None:
            note = _SCAN if second.has_ink else "blank"
        return PageRead(text or "", PYPDF, note)

    def _with_fields(self, page_idx: int, text: str) -> str:
        if self._pypdf is None and self._pending is not None:
            self._ask_pypdf(page_idx)
        lines: list[str] = []
        if self._pypdf is not None:
            with suppress(Exception):
                lines = page_fields(self._pypdf.reader.pages[page_idx])
        shown = " ".join(clean_text(text).split()) if lines else ""
        lines = [line for line in lines if line not in shown]
        if not lines:
            return text
        return "\n".join([text.rstrip(), "", *lines] if text.strip() else lines)

    def _ask_pypdf(self, page_idx: int) -> tuple[str | None, str | None]:
        if self._pending is not None:
            (data, password), self._pending = self._pending, None
            try:
                self._open_pypdf(data, password)
            except Exception as exc:
                return None, reason(exc)
        if self._pypdf is None:
            return None, None
        try:
            return self._pypdf.text(page_idx), None
        except Exception as exc:
            return None, reason(exc)

    def _ask_pdfium(
        self, page_idx: int, *, widen: bool = False
    ) -> tuple[PdfiumPage | None, str | None]:
        if self._pdfium is None or not self._paired:
            return None, None
        try:
            return self._pdfium.page(page_idx, widen=widen), None
        except Exception as exc:
            return None, reason(exc)


def reason(exc: BaseException) -> str:
    """One short line out of an exception whose text may hold parts of the file."""
    text = clean_line(str(exc)).rstrip(".") or type(exc).__name__
    return text if len(text) <= _REASON_LEN else text[:_REASON_LEN] + "..."


def _lacks_letters(second: str, first: str) -> bool:
    """Whether the second text is so much shorter that PDFium may have passed over some."""
    return (
        any(char > "\u2e7f" for char in second)
        and len(second.split()) > 0
        and (sum(map(str.isalnum, second)) < 0.8 * sum(map(str.isalnum, first)))
    )


def _second(page: PdfiumPage | None) -> Second | None:
    if page is None:
        return None
    text = f"{page.text}\n{page.foot_notes}" if page.foot_notes else page.text
    is_turned = page.rotation != 0
    return Second(text, page.is_rtl, page.in_order, page.on_page, is_turned, page.has_marks)
