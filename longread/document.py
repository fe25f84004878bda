"""Files to documents: a PDF, a text, a book or a page of the web, as pages of clean text.

Owns what a document is and what kind a file is. Extraction from PDFs is
pdf.py's, decoding textfile.py's, other
formats' formats.py's, the text's normal form normalize.py's; nothing here tokenises.
"""

from __future__ import annotations

import hashlib
import os
import stat
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import BinaryIO

from longread import formats, normalize, pdf, sections, textfile, typeset
from longread.errors import DocumentError, NoTextError, UsageError
from longread.events import Progress, ProgressFn
from longread.page_ranges import page_list, parse_pages
from longread.pdf import Password

PAGE_SEPARATOR = "\n\n"  # between pages in what the model reads

_MAX_BYTES = 1 << 30
_MAX_TEXT_BYTES = 64 << 20  # some 16 million tokens; normalising and tokenising it takes a minute
_HEADER_LEN = 1024  # a PDF's header may come after mail or HTTP headers
_MARKDOWN_SUFFIXES = (".md", ".markdown", ".mdown", ".mkd")
_TEXT_SUFFIXES = (*_MARKDOWN_SUFFIXES, ".txt", ".text", ".rst")
_GARBLED_QUALITY = 0.5


@dataclass(frozen=True)
class Page:
    """One page of a document."""

    page_idx: int  # position in the file, from 0
    label: str | None  # as the document prints it, where that is not the plain number
    text: str  # normalised (NFKC); empty where the page holds no text
    engine: str = ""  # what extracted it, without its version
    quality: float = 1.0  # share of the characters that look like text
    note: str = ""  # what is particular about the page: why another engine, blank, a scan


@dataclass(frozen=True)
class Document:
    """The selected pages of one file. Warnings do not repeat the name."""

    name: str
    sha256: str
    kind: str  # pdf, text, markdown, html, epub, docx or code
    engine: str  # what extracted the text, with its version
    num_pages_total: int  # in the file, selected or not
    pages: tuple[Page, ...]
    warnings: tuple[str, ...]


@dataclass(frozen=True)
class RawDocument:
    """A file's bytes before extraction."""

    name: str  # file name without its folder, one printable line
    source: str  # as the user gave it, one printable line: for messages
    kind: str  # as in Document
    sha256: str
    data: bytes


def document_text(document: Document) -> str:
    """What the model reads: the pages with PAGE_SEPARATOR between them."""
    return PAGE_SEPARATOR.join(page.text for page in document.pages)


def read_source(source: str, *, stdin: BinaryIO | None = None) -> RawDocument:
    """Read a file, or `stdin` where `source` is `-`, and hash it; nothing is extracted yet.

    Raises DocumentError where there is nothing to read, UsageError for `-` without `stdin`.
    """
    shown = "standard input" if source == "-" else normalize.clean_line(source)
    try:
        if source == "-":
            if stdin is None:
                raise UsageError("`-` reads the document from standard input, and there is none")
            data = stdin.read(_MAX_BYTES + 1)
        else:
            data = _read_file(source, shown)
    except (OSError, ValueError) as exc:  # ValueError: a NUL in the path, or a closed stdin
        reason = exc.strerror if isinstance(exc, OSError) and exc.strerror else str(exc)
        raise DocumentError(f"{shown} cannot be read: {reason}") from exc
    if not data:
        raise DocumentError(f"{shown} is empty (0 bytes)")
    name = "stdin" if source == "-" else normalize.clean_line(PurePath(source).name)
    kind = kind_of(name, data)
    limit = _MAX_BYTES if kind in ("pdf", "epub", "docx") else _MAX_TEXT_BYTES
    if len(data) > limit:
        raise DocumentError(
            f"{shown} holds more than {limit >> 20:,} MiB of {kind}, far over any model's window; "
            "cut it into parts"
        )
    return RawDocument(name or shown, shown, kind, hashlib.sha256(data).hexdigest(), data)


def _read_file(source: str, shown: str) -> bytes:
    """A file's bytes, of a larger one than can be read so many that it shows."""
    if not source:
        raise DocumentError("a document's name is empty; name a file")
    path = Path(source)
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        raise DocumentError(f"{shown}: there is no such file; check the path") from None
    if stat.S_ISDIR(mode):
        raise DocumentError(f"{shown} is a folder; name the files in it")
    if stat.S_ISCHR(mode) or stat.S_ISBLK(mode) or stat.S_ISSOCK(mode):
        raise DocumentError(f"{shown} is a device, not a file; `-` reads standard input")
    with path.open("rb") as file:
        return file.read(_MAX_BYTES + 1)


def kind_of(name: str, data: bytes) -> str:
    """What a file is, by its first bytes and its name."""
    suffix = os.path.splitext(name)[1].lower()
    if suffix == ".pdf" or data.lstrip().startswith(b"%PDF-"):
        return "pdf"
    # A text about PDFs may well have a header in it: objects too make it a file with a prefix.
    if suffix not in _TEXT_SUFFIXES and b"%PDF-" in data[:_HEADER_LEN] and b" obj" in data:
        return "pdf"
    if suffix in _TEXT_SUFFIXES:
        return "markdown" if suffix in _MARKDOWN_SUFFIXES else "text"
    return formats.kind_of(suffix, data) or "text"


def options_key(raw: RawDocument, pages: str | None) -> str:
    """Everything but the file's bytes that decides the text `extract` gives: for a record's key."""
    engine = pdf.engine_name() if raw.kind == "pdf" else textfile.ENGINE
    if raw.kind in formats.KINDS:
        engine = formats.engine_name(raw.kind, raw.source)
    ranges = "all" if pages is None else ",".join(f"{r.start}:{r.stop}" for r in parse_pages(pages))
    return f"{raw.kind}; {engine}; {normalize.NORMALIZER}; pages {ranges}"


def extract(
    raw: RawDocument,
    *,
    pages: str | None = None,
    password: Password = None,
    progress: ProgressFn = lambda progress: None,
) -> Document:
    """Extract and normalise the text of `raw`, or of the `pages` named as parse_pages reads them.

    password: of an encrypted PDF, or a callable that is asked for it with the file's name, and
    only where the empty one fails. progress: called with stage `read`, unit `pages`.
    Raises DocumentError, PasswordError, NoTextError, and UsageError for bad `pages`.
    """
    ranges = None if pages is None else parse_pages(pages)
    if raw.kind == "pdf":
        return _extract_pdf(raw, ranges, password, progress)
    if raw.kind in formats.KINDS:
        return _extract_sections(raw, ranges, progress)
    return _extract_text(raw, ranges, progress)


def _extract_pdf(
    raw: RawDocument,
    ranges: tuple[range, ...] | None,
    password: Password,
    progress: ProgressFn,
) -> Document:
    read = pdf.read_pdf(
        raw.data,
        raw.source,
        select=lambda num_pages: _select(raw, ranges, num_pages),
        password=password,
        progress=progress,
    )
    failed = [page.page_idx for page in read.pages if page.text is None]
    texts = typeset.clean_pages(read.pages)
    pages = tuple(
        Page(page.page_idx, page.label, text, page.engine, page.quality, _page_note(page, text))
        for page, text in zip(read.pages, texts, strict=True)
    )
    if not any(text.strip() for text in texts):
        if failed:
            raise DocumentError(
                f"{raw.source}: no page could be read ({read.problem}); "
                "try another copy, or repair it with `qpdf`"
            )
        which = "it holds" if ranges is None else "the selected pages hold"
        raise NoTextError(
            f"{raw.source}: {which} no text, as scanned pages do; "
            "add a text layer with `ocrmypdf IN.pdf OUT.pdf` and read that"
        )
    warnings = _clip_warnings(ranges, read.num_pages_total)
    if read.repaired:
        warnings.append("the file is damaged and was repaired as it was read; text may be missing")
    if failed:
        warnings.append(f"{page_list(failed)} could not be read ({read.problem})")
    garbled = [page.page_idx for page in pages if page.quality < _GARBLED_QUALITY]
    if garbled:
        warnings.append(
            f"the fonts on {page_list(garbled)} do not say which letters they show, so much of "
            "the text is wrong or missing; `ocrmypdf --force-ocr IN.pdf OUT.pdf` reads the pages"
        )
    blank = [page.page_idx for page in read.pages if not (page.text or "").strip()]
    blank = sorted(set(blank) - set(failed))
    if blank:
        warnings.append(
            f"no text on {page_list(blank)} (blank or scanned; `ocrmypdf` adds text to scans)"
        )
    return _document(raw, read.engine, read.num_pages_total, pages, warnings)


def _page_note(page: pdf.PdfPage, text: str) -> str:
    is_bare = bool((page.text or "").strip()) and not text.strip()
    return page.note or ("nothing but a running head or foot" if is_bare else "")


def _extract_text(
    raw: RawDocument, ranges: tuple[range, ...] | None, progress: ProgressFn
) -> Document:
    decoded, warnings = textfile.decode(raw.data, raw.source)
    # Joined first and cut afterwards, so that no join crosses from a page to the next.
    text = normalize.clean_text(decoded, keep_form_feeds=True)
    (text,) = normalize.join_hyphens([text], typeset=False)
    if not text.strip():
        raise NoTextError(f"{raw.source} holds no text, only white space")
    parts = textfile.split_pages(text)
    page_indices = _select(raw, ranges, len(parts))
    pages = tuple(Page(page_idx, None, parts[page_idx]) for page_idx in page_indices)
    if not any(page.text for page in pages):
        raise NoTextError(f"{raw.source}: the selected pages hold no text; choose others")
    progress(Progress("read", len(pages), len(pages), "pages"))
    warnings = _clip_warnings(ranges, len(parts)) + warnings
    return _document(raw, textfile.ENGINE, len(parts), pages, warnings)


def _extract_sections(
    raw: RawDocument, ranges: tuple[range, ...] | None, progress: ProgressFn
) -> Document:
    found, warnings = formats.read(raw.kind, raw.data, raw.source)
    engine = formats.engine_name(raw.kind, raw.source)
    parts: list[tuple[str | None, str]] = []
    for section in sections.merged(found):
        label = sections.label_of(section.heading)
        text = normalize.clean_text(section.text)
        # Source code stays as it was cut, by lines.
        cut = [text.strip("\n")] if raw.kind == "code" else textfile.split_pages(text)
        parts += [(label, part) for part in cut if part.strip()]
    if not parts:
        raise NoTextError(f"{raw.source} holds no text")
    page_indices = _select(raw, ranges, len(parts))
    pages = tuple(Page(page_idx, *parts[page_idx], raw.kind) for page_idx in page_indices)
    progress(Progress("read", len(pages), len(pages), "pages"))
    warnings = _clip_warnings(ranges, len(parts)) + warnings
    return _document(raw, engine, len(parts), pages, warnings)


def _document(
    raw: RawDocument,
    engine: str,
    num_pages_total: int,
    pages: tuple[Page, ...],
    warnings: Sequence[str],
) -> Document:
    quality = normalize.quality_warnings("\n".join(page.text for page in pages))
    return Document(
        raw.name, raw.sha256, raw.kind, engine, num_pages_total, pages, (*warnings, *quality)
    )


def _select(raw: RawDocument, ranges: tuple[range, ...] | None, num_pages: int) -> list[int]:
    if ranges is None:
        return list(range(num_pages))
    for wanted in ranges:
        if wanted.start >= num_pages:
            raise UsageError(
                f"--pages: {raw.source} has no page {wanted.start + 1}; its pages are 1-{num_pages}"
            )
    return [idx for r in ranges for idx in range(r.start, min(r.stop, num_pages))]


def _clip_warnings(ranges: tuple[range, ...] | None, num_pages: int) -> list[str]:
    if ranges and num_pages < ranges[-1].stop < sys.maxsize:
        return [f"--pages asks for pages up to {ranges[-1].stop}, but the last is {num_pages}"]
    return []
