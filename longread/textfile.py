"""The bytes of a text or Markdown file to characters, and characters to pages.

Owns encodings and where a text without pages is cut. Does not normalise; reads no files.
"""

from __future__ import annotations

import codecs
import unicodedata

from longread.errors import DocumentError

ENGINE = "text 1"  # raise it whenever decoding or the cut into pages changes
PAGE_LEN = 3000  # characters of a page of text without form feeds, at most

_BOMS = (  # UTF-32 first: its little-endian mark begins with UTF-16's
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF8, "utf-8-sig"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)
_CONTROL_SHARE = 0.05  # more control bytes than this, and it is no text
_CONTROL_BYTES = bytes(set(range(32)) - set(b"\b\t\n\v\f\r\x1b"))


def decode(data: bytes, source: str) -> tuple[str, list[str]]:
    """Return the characters of `data`, and a warning where they had to be guessed.

    UTF-8, -16 or -32 with a byte order mark, else UTF-8, else Windows-1252, else Latin-1. Raises
    DocumentError where `data` is no text; `source` stands in its message.
    """
    for bom, encoding in _BOMS:
        if data.startswith(bom):
            text = data.decode(encoding, "replace")
            num_bad = text.count("\ufffd")
            return text, [f"{num_bad} characters are damaged"] if num_bad else []
    zero_idx = data.find(0)
    num_control = len(data) - len(data.translate(None, _CONTROL_BYTES))
    if zero_idx >= 0 or num_control > _CONTROL_SHARE * len(data):
        raise DocumentError(
            f"{source} is not text but binary data; "
            "longread reads PDF, text, Markdown, HTML, EPUB, DOCX and source code: convert it"
        )
    try:
        return data.decode("utf-8"), []
    except UnicodeDecodeError:
        pass
    text = data.decode("utf-8", "replace")
    num_bad = text.count("\ufffd")
    # A few broken bytes among many good sequences are damage, not another encoding.
    if num_bad * 10 < sum(1 for char in text if char > "\x7f"):
        return text, [f"{num_bad} characters are damaged (not UTF-8)"]
    for encoding in ("cp1252", "latin-1"):
        try:
            text = data.decode(encoding)
            break
        except UnicodeDecodeError:
            continue
    return text, ["not UTF-8; read as Western European (Windows-1252), so check the accents"]


def split_pages(text: str) -> list[str]:
    """Cut normalised text into pages: at form feeds where it has any between texts, else by size.

    By size, a page ends at the last end of a paragraph in the second half of PAGE_LEN characters,
    else at the last line end, else at a space, else anywhere. Every character but the white space
    at the cuts is kept, in order.
    """
    parts = [part.strip("\n") for part in text.rstrip("\n\f").split("\f")]
    if sum(1 for part in parts if part.strip()) > 1:
        return parts
    text = text.replace("\f", "\n")
    pages = []
    start = 0
    while len(text) - start > PAGE_LEN:
        half, end = start + PAGE_LEN // 2, start + PAGE_LEN
        for mark in ("\n\n", "\n", " "):
            cut = text.rfind(mark, half, end)
            if cut >= 0:
                next_start = cut + len(mark)
                break
        else:
            cut = end
            # A combining mark stays with its letter.
            while cut > half and unicodedata.combining(text[cut]):
                cut -= 1
            next_start = cut
        pages.append(text[start:cut].strip("\n"))
        start = next_start
    pages.append(text[start:].strip("\n"))
    return [page for page in pages if page.strip()]
