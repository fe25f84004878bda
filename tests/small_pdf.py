"""Small PDFs for tests, written by pypdf."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Iterable

from pypdf import PdfWriter
from pypdf.generic import DecodedStreamObject, DictionaryObject, NameObject

from longread.document import RawDocument, kind_of


def show(text: str) -> bytes:
    """A content stream that shows `text` on one line."""
    return b"BT /F1 12 Tf 72 700 Td (%s) Tj ET" % text.encode()


def make_writer(contents: Iterable[bytes]) -> PdfWriter:
    writer = PdfWriter()
    font = DictionaryObject()
    font[NameObject("/Type")] = NameObject("/Font")
    font[NameObject("/Subtype")] = NameObject("/Type1")
    font[NameObject("/BaseFont")] = NameObject("/Helvetica")
    fonts = DictionaryObject({NameObject("/F1"): writer._add_object(font)})
    for content in contents:
        page = writer.add_blank_page(612, 792)
        page[NameObject("/Resources")] = DictionaryObject({NameObject("/Font"): fonts})
        stream = DecodedStreamObject()
        stream.set_data(content)
        page[NameObject("/Contents")] = writer._add_object(stream)
    return writer


def to_bytes(writer: PdfWriter) -> bytes:
    buffer = io.BytesIO()
    writer.write(buffer)
    return buffer.getvalue()


def raw_document(data: bytes, name: str = "file.pdf") -> RawDocument:
    kind = kind_of(name, data)
    return RawDocument(name, name, kind, hashlib.sha256(data).hexdigest(), data)


PDF = to_bytes(make_writer(show(f"This is page number {number}.") for number in range(1, 7)))
