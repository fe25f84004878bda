"""PDF pages through pypdfium2: text, and the shape of the page that says whether to trust it.

Owns every call into PDFium. It is the second engine: fast and permissive, it knows the predefined
CJK encodings and right-to-left order, and it marks hyphens at line ends. PDFium is not safe for
threads, so one process reads with it from one thread.
"""

from __future__ import annotations

import ctypes
import math
import re
from dataclasses import dataclass, replace
from typing import Any

from longread import page_edits, pdf_layout, pdf_marks
from longread.page_edits import NO_EDITS, Edits
from longread.pdf_layout import Char, Rect

HYPHEN = "\ufffe"  # PDFium's mark for a hyphen at a line end, in place of the line break
_RTL = re.compile("[\u0590-\u08ff\ufb1d-\ufdff\ufe70-\ufefc]")
_LETTER = re.compile(r"[^\W\d_]")
# A number with the stop that ends its sentence, which PDFium puts on the number's left.
_STOP_BEFORE_NUMBER = re.compile(r"(?<!\S)([.,:;!?])(\d+(?:[.,]\d+)*)(?!\S)")
_TURNED_SHARE = 0.15
_MIN_WIDTH = 0.01  # points; PDFium passes over text objects that are narrower


class LockedError(Exception):
    """The file needs another password."""


@dataclass(frozen=True)
class PdfiumPage:
    """One page's text and the signs that say how it was laid out."""

    text: str  # without the notes at its foot
    is_rtl: bool
    in_order: bool  # the content stream follows the reading order
    on_page: bool  # false where all text lies outside what the page shows
    has_ink: bool
    rotation: int
    has_notes: bool  # form fields, or notes put on it
    foot_notes: str = ""
    has_marks: bool = False  # raised numbers, foot notes, or a table's head drawn late


class PdfiumFile:
    """An open file. Raises LockedError, and PDFium's own errors."""

    def __init__(self, data: bytes, password: str | None) -> None:
        import pypdfium2

        self._raw = pypdfium2.raw
        try:
            self._document = pypdfium2.PdfDocument(data, password=password)
        except pypdfium2.PdfiumError as exc:
            if "password" in str(exc).lower():
                raise LockedError from exc
            raise

    def __len__(self) -> int:
        return len(self._document)

    def page(self, page_idx: int, *, widen: bool = False) -> PdfiumPage:
        """Read one page, with `widen` also text of no width. Raises what PDFium raises."""
        page = self._document[page_idx]
        try:
            if widen:
                self._widen_thin_text(page)
            textpage = page.get_textpage()
            try:
                return self._read(page, textpage, widen)
            finally:
                textpage.close()
        finally:
            page.close()

    def chars(self, page_idx: int) -> list[Char]:
        """The characters of one page in PDFium's order, with their boxes in the page's space."""
        page = self._document[page_idx]
        try:
            textpage = page.get_textpage()
            try:
                return self._chars(textpage)
            finally:
                textpage.close()
        finally:
            page.close()

    def _has_notes(self, page: Any) -> bool:
        """Whether a page has form fields or notes; links do not count."""
        raw = self._raw
        for i in range(raw.FPDFPage_GetAnnotCount(page.raw)):
            annotation = raw.FPDFPage_GetAnnot(page.raw, i)
            kind = raw.FPDFAnnot_GetSubtype(annotation)
            raw.FPDFPage_CloseAnnot(annotation)
            if kind not in (raw.FPDF_ANNOT_LINK, raw.FPDF_ANNOT_POPUP):
                return True
        return False

    def _read(self, page: Any, textpage: Any, widen: bool) -> PdfiumPage:
        text = textpage.get_text_range()
        rtl = len(_RTL.findall(text))
        is_rtl = rtl > 0 and rtl * 2 > len(_LETTER.findall(text))
        box = page.get_bbox()
        rects = [textpage.get_rect(i) for i in range(textpage.count_rects())]
        on_page = not rects or any(pdf_layout.touches(rect, box) for rect in rects)
        has_ink = bool(rects) or self._raw.FPDFPage_CountObjects(page.raw) > 0
        in_order = True
        foot_notes, has_marks = "", False
        vertical = pdf_layout.vertical_text(self._chars(textpage)) if widen else None
        if vertical is not None:
            text = vertical
        elif is_rtl:
            text = self._right_to_left(textpage)
        elif page.get_rotation() == 0:
            edits = self._edits(textpage, rects, text)
            has_marks = edits.tells
            body, foot_notes = page_edits.applied(edits, text)
            ordered = None
            if self._is_turned(textpage) or not pdf_layout.in_order(rects):
                ordered = pdf_layout.ordered_text(_edited(self._chars(textpage), edits))
            in_order, text = ordered is None, body if ordered is None else ordered
        text, foot_notes = (part.replace(HYPHEN, "-\n") for part in (text, foot_notes))
        has_notes = self._has_notes(page)
        rotation = page.get_rotation()
        return PdfiumPage(
            text, is_rtl, in_order, on_page, has_ink, rotation, has_notes, foot_notes, has_marks
        )

    def _edits(self, textpage: Any, rects: list[Rect], text: str) -> Edits:
        if len(text) != textpage.count_chars():
            return NO_EDITS  # characters that Python counts otherwise: the places would be wrong

        def text_of(i: int) -> str:
            return textpage.get_text_bounded(*rects[i])

        def place_of(i: int) -> int | None:
            if i == len(rects):
                return len(text)
            left, bottom, right, top = rects[i]
            x, y, first = min(left + 1, (left + right) / 2), (bottom + top) / 2, text_of(i).strip()
            place = self._raw.FPDFText_GetCharIndexAtPos(textpage.raw, x, y, 2, 2)
            return place if place >= 0 and first and text[place] == first[0] else None

        return page_edits.edits(pdf_marks.find_marks(rects, text_of), text, place_of)

    def _widen_thin_text(self, page: Any) -> None:
        """Give text objects of no width some, or PDFium leaves them out.

        Glyphs of a vertical font that is neither embedded nor installed have none. A slant of a
        hundredth moves nothing out of its line.
        """
        raw = self._raw
        changed = False
        for obj in page.get_objects(filter=[raw.FPDF_PAGEOBJ_TEXT], max_depth=1):
            left, _, right, _ = obj.get_bounds()
            if right - left < _MIN_WIDTH:
                raw.FPDFPageObj_Transform(obj.raw, 1, 0, 0.01, 1, 0, 0)
                changed = True
        if changed:
            raw.FPDFPage_GenerateContent(page.raw)

    def _is_turned(self, textpage: Any) -> bool:
        """Whether many characters stand at another angle than the first ones."""
        raw = self._raw
        num_chars = textpage.count_chars()
        sample = range(0, num_chars, max(1, num_chars // 50))
        angles = [raw.FPDFText_GetCharAngle(textpage.raw, i) for i in sample]
        if not angles:
            return False
        num_turned = sum(abs(math.sin((angle - angles[0]) / 2)) > 0.05 for angle in angles)
        return num_turned > _TURNED_SHARE * len(angles)

    def _right_to_left(self, textpage: Any) -> str:
        raw, page = self._raw, textpage.raw
        out = []
        for i in range(textpage.count_chars()):
            # A glyph without a meaning stands for a part of its neighbour.
            if raw.FPDFText_HasUnicodeMapError(page, i) != 1:
                out.append(_char(raw.FPDFText_GetUnicode(page, i)))
        return _STOP_BEFORE_NUMBER.sub(r"\2\1", "".join(out))

    def _chars(self, textpage: Any) -> list[Char]:
        raw, page = self._raw, textpage.raw
        rect = raw.FS_RECTF()
        reference = ctypes.byref(rect)
        chars = []
        for i in range(textpage.count_chars()):
            raw.FPDFText_GetLooseCharBox(page, i, reference)
            text = _char(raw.FPDFText_GetUnicode(page, i))
            chars.append(Char(text, rect.left, rect.bottom, rect.right, rect.top))
        return chars


def _edited(chars: list[Char], edits: Edits) -> list[Char]:
    """The characters as they are written, without notes; raised ones are put on their line."""
    written = page_edits.without_notes(edits, [char.text for char in chars])
    for start, end, _ in edits.replaced:
        if start and chars[start - 1].top > chars[start - 1].bottom:
            line = chars[start - 1]
            for i in range(start, end):
                chars[i] = replace(chars[i], bottom=line.bottom, top=line.top)
    return [replace(char, text=new) for char, new in zip(chars, written, strict=True) if new]


def _char(code: int) -> str:
    return chr(code) if 0 < code <= 0x10FFFF else ""
