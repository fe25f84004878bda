"""Sources, kinds, page selection, keys, and the sample documents."""

from __future__ import annotations

import hashlib
import io
import os
import re
import sys
import unicodedata
from pathlib import Path

import pytest
from inline_reader import inline_reader  # noqa: F401
from small_pdf import PDF, raw_document

from longread.document import (
    Document,
    document_text,
    extract,
    options_key,
    parse_pages,
    read_source,
)
from longread.errors import DocumentError, UsageError
from longread.events import Progress
from longread.textfile import PAGE_LEN

SAMPLES = Path(__file__).parent.parent / "sample_docs"
WORD = re.compile(r"\w+")


def text_document(data: bytes, pages: str | None = None) -> Document:
    return extract(raw_document(data, "file.txt"), pages=pages)


def test_every_word_of_the_sample_pdf_is_right() -> None:
    document = extract(read_source(str(SAMPLES / "us_constitution.pdf")))
    text = (SAMPLES / "us_constitution.txt").read_text("utf-8")
    # The running head goes on every page: its words stand in the title.
    assert WORD.findall(document_text(document)) == WORD.findall(text)
    assert document.kind == "pdf" and document.engine.startswith("pypdf ")
    assert document.num_pages_total == len(document.pages) == 12
    assert document.warnings == ()
    assert [page.page_idx for page in document.pages] == list(range(12))


@pytest.mark.parametrize("name", ["us_constitution.txt", "northanger_abbey.txt"])
def test_sample_texts_keep_every_word_and_have_pages(name: str) -> None:
    document = extract(read_source(str(SAMPLES / name)))
    text = unicodedata.normalize("NFKC", (SAMPLES / name).read_text("utf-8"))
    assert WORD.findall(document_text(document)) == WORD.findall(text)
    assert document.kind == "text" and document.name == name
    assert all(0 < len(page.text) <= PAGE_LEN for page in document.pages)
    assert len(document.pages) == pytest.approx(len(text) / PAGE_LEN, rel=0.25)


@pytest.mark.parametrize(
    ("text", "ranges"),
    [
        ("3", [range(2, 3)]),
        ("3,10-40", [range(2, 3), range(9, 40)]),
        (" 10 - 40 , 3 ", [range(2, 3), range(9, 40)]),
        ("1-2,2-5,6", [range(0, 6)]),
        ("7-", [range(6, sys.maxsize)]),
        ("7-,1", [range(0, 1), range(6, sys.maxsize)]),
    ],
)
def test_parse_pages(text: str, ranges: list[range]) -> None:
    assert list(parse_pages(text)) == ranges


@pytest.mark.parametrize(
    "text", ["", ",", "0", "0-3", "5-3", "-3", "a", "1-2-3", "1,,2", "٣", "1.5", "9" * 5000, "\x1b"]
)
def test_bad_pages_are_usage_errors(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_pages(text)
    assert "--pages" in str(caught.value) and "\x1b" not in str(caught.value)


def test_selected_pages_are_read_and_keep_their_positions() -> None:
    document = extract(raw_document(PDF), pages="5-,2")
    assert [(page.page_idx, page.text) for page in document.pages] == [
        (1, "This is page number 2."),
        (4, "This is page number 5."),
        (5, "This is page number 6."),
    ]
    assert document.num_pages_total == 6
    assert document_text(document).count("\n\n") == 2


def test_pages_past_the_end() -> None:
    with pytest.raises(UsageError, match="no page 7; its pages are 1-6"):
        extract(raw_document(PDF), pages="2,7-9")
    document = extract(raw_document(PDF), pages="5-90")
    assert len(document.pages) == 2
    assert document.warnings == ("--pages asks for pages up to 90, but the last is 6",)
    with pytest.raises(UsageError, match="its pages are 1-1"):
        text_document(b"short", pages="2")


def test_progress_counts_the_selected_pages() -> None:
    seen: list[Progress] = []
    extract(raw_document(PDF), pages="2-4", progress=seen.append)
    assert [(p.stage, p.done, p.total, p.unit) for p in seen] == [
        ("read", done, 3, "pages") for done in range(4)
    ]


def test_read_source_hashes_and_names(tmp_path: Path) -> None:
    path = tmp_path / "note\n\x1b[1m.md"
    path.write_bytes(b"# Title\n")
    document = read_source(str(path))
    assert document.name == "note [1m.md" and "\x1b" not in document.source
    assert document.kind == "markdown" and document.data == b"# Title\n"
    assert document.sha256 == hashlib.sha256(b"# Title\n").hexdigest()


def test_stdin_may_be_text_or_pdf() -> None:
    document = read_source("-", stdin=io.BytesIO(b"some text"))
    assert (document.name, document.kind) == ("stdin", "text")
    document = read_source("-", stdin=io.BytesIO(PDF))
    assert document.kind == "pdf" and len(extract(document).pages) == 6
    with pytest.raises(UsageError, match="standard input"):
        read_source("-", stdin=None)
    with pytest.raises(DocumentError, match="standard input is empty"):
        read_source("-", stdin=io.BytesIO())


@pytest.mark.parametrize(
    ("name", "data", "kind"),
    [
        ("a", PDF, "pdf"),
        ("a.txt", PDF, "pdf"),
        ("a.PDF", b"no pdf at all", "pdf"),
        ("a", b"HTTP/1.1 200 OK\r\n\r\n" + PDF, "pdf"),
        ("a.txt", b"A file begins with %PDF-1.7, then 1 0 obj", "text"),
        ("a", b"A file begins with %PDF-1.7", "text"),
        ("a.markdown", b"# x", "markdown"),
    ],
)
def test_kinds(tmp_path: Path, name: str, data: bytes, kind: str) -> None:
    (tmp_path / name).write_bytes(data)
    assert read_source(str(tmp_path / name)).kind == kind


def test_what_cannot_be_read_is_an_error_of_one_line(tmp_path: Path) -> None:
    (tmp_path / "empty.txt").write_bytes(b"")
    (tmp_path / "secret.txt").symlink_to(tmp_path / "secret.txt")
    for source, wording in [
        (str(tmp_path / "missing.pdf"), "no such file"),
        (str(tmp_path), "is a folder"),
        (str(tmp_path / "empty.txt"), r"empty \(0 bytes\)"),
        (str(tmp_path / "secret.txt"), "cannot be read"),
        (str(tmp_path / "empty.txt" / "inside"), "cannot be read"),
        ("nul\0name", "cannot be read"),
        ("", "."),
        ("x" * 5000, "cannot be read"),
        (os.devnull, "is a device"),
    ]:
        with pytest.raises(DocumentError, match=wording) as caught:
            read_source(source)
        assert caught.value.exit_code == 3 and "\n" not in str(caught.value)


def test_text_and_file_round_trip_through_form_feeds() -> None:
    document = extract(raw_document(PDF))
    again = text_document("\f".join(page.text for page in document.pages).encode())
    assert [page.text for page in again.pages] == [page.text for page in document.pages]


def test_options_key_tells_what_changes_the_text() -> None:
    pdf_file, text_file = raw_document(PDF), raw_document(b"text", "a.txt")
    keys = {options_key(pdf_file, pages) for pages in (None, "1", "1-2", "2", "2-")}
    assert len(keys) == 5
    assert options_key(pdf_file, "1-3,4") == options_key(pdf_file, " 4, 1-3")
    assert options_key(pdf_file, None) != options_key(text_file, None)
    assert extract(pdf_file).engine in options_key(pdf_file, None)
    assert extract(text_file).engine in options_key(text_file, None)


def test_more_text_than_any_model_reads_is_refused_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "huge.txt"
    with path.open("wb") as file:
        file.write(b"words")
        file.truncate((64 << 20) + 1)
    with pytest.raises(DocumentError, match="more than 64 MiB of text.*cut it into parts"):
        read_source(str(path))
    endless = io.BytesIO(b"word " * 30)
    monkeypatch.setattr("longread.document._MAX_BYTES", 99)
    monkeypatch.setattr("longread.document._MAX_TEXT_BYTES", 99)
    with pytest.raises(DocumentError, match="standard input holds more than"):
        read_source("-", stdin=endless)
    assert endless.tell() == 100


def test_an_empty_name_is_not_the_working_directory() -> None:
    with pytest.raises(DocumentError, match="name is empty"):
        read_source("")
