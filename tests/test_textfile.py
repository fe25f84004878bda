"""Encodings, binary data, and where text is cut into pages."""

from __future__ import annotations

import random

import pytest
from small_pdf import raw_document

from longread.document import Document, document_text, extract
from longread.errors import DocumentError, NoTextError
from longread.textfile import PAGE_LEN, split_pages


def text_document(data: bytes, pages: str | None = None) -> Document:
    return extract(raw_document(data, "file.txt"), pages=pages)


@pytest.mark.parametrize(
    "data",
    [b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR", b"PK\x03\x04" + bytes(30), bytes(range(1, 256))],
)
def test_binary_data_is_refused(data: bytes) -> None:
    with pytest.raises(DocumentError, match="binary") as caught:
        text_document(data)
    assert caught.value.exit_code == 3


@pytest.mark.parametrize("data", [b" \n\t\r\n", b"\xef\xbb\xbf", b"\f\f", "\u200b\n".encode()])
def test_white_space_is_no_text(data: bytes) -> None:
    with pytest.raises(NoTextError) as caught:
        text_document(data)
    assert caught.value.exit_code == 5


@pytest.mark.parametrize(
    ("data", "warning"),
    [
        ("Ålesund – “5 €”".encode(), None),
        ("Ålesund – “5 €”".encode("utf-8-sig"), None),
        ("Ålesund – “5 €”".encode("utf-16"), None),
        (b"\xfe\xff" + "Ålesund – “5 €”".encode("utf-16-be"), None),
        ("Ålesund – “5 €”".encode("utf-32"), None),
        ("Ålesund – “5 €”".encode("cp1252"), "not UTF-8"),
    ],
)
def test_encodings(data: bytes, warning: str | None) -> None:
    document = text_document(data)
    assert document_text(document) == "Ålesund – “5 €”"
    if warning is None:
        assert document.warnings == ()
    else:
        assert len(document.warnings) == 1 and warning in document.warnings[0]


def test_encodings_that_are_damaged() -> None:
    assert document_text(text_document(b"caf\xe9 \x81 cr\xe8me")) == "café  crème"  # Latin-1
    document = text_document("é".encode() * 100 + b"\xff end")
    assert document_text(document) == "é" * 100 + "\ufffd end"
    assert "1 characters are damaged" in document.warnings[0]
    lone = text_document(b"\xff\xfea\x00\x3d\xd8b\x00")  # half of a pair in UTF-16
    assert document_text(lone) == "a\ufffdb" and lone.warnings
    document_text(lone).encode()


def test_form_feeds_part_pages() -> None:
    document = text_document(b"one\n\f\ntwo\n\f\fthree\n\f")
    assert [page.text for page in document.pages] == ["one", "two", "", "three"]
    assert [page.label for page in document.pages] == [None] * 4
    selected = text_document(b"one\ftwo\fthree", pages="2-")
    assert [(page.page_idx, page.text) for page in selected.pages] == [(1, "two"), (2, "three")]
    with pytest.raises(NoTextError, match="selected"):
        text_document(b"one\f\fthree", pages="2")


def test_pages_end_at_paragraphs_then_lines_then_words() -> None:
    paragraph = "word " * 150 + "end.\n\n"
    text = paragraph * 12
    pages = split_pages(text)
    assert all(page.endswith("end.") and page.startswith("word") for page in pages)
    assert "\n\n".join(pages) + "\n\n" == text
    lines = "A line of verse\n" * 600
    assert "\n".join(split_pages(lines)) + "\n" == lines
    assert " ".join(split_pages("word " * 3000)) == "word " * 3000
    assert "".join(split_pages("x" * 10_000)) == "x" * 10_000
    accents = split_pages("e\u0323\u0301" * 3000)
    assert all(page.startswith("e") for page in accents)


def test_no_text_is_lost_or_moved_between_pages() -> None:
    rng = random.Random(3)
    pieces = ["word", " ", "\n", "\n\n", "\n\n\n", "x" * 500, "a\u0301", "語", "  indented", "\t"]
    for with_feeds in (False, True):
        for _ in range(60):
            text = "".join(rng.choices(pieces + ["\f"] * with_feeds, k=rng.randrange(1, 400)))
            pages = split_pages(text)
            assert "".join("".join(pages).split()) == "".join(text.split())
            assert all(len(page) <= PAGE_LEN for page in pages) or "\f" in text
    assert split_pages("one page\f") == ["one page"]
