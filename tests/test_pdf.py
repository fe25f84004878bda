"""PDFs: damage, passwords, labels, word spacing, and real files."""

from __future__ import annotations

import io
import logging
import re
import zlib

import pytest
from inline_reader import inline_reader  # noqa: F401
from pypdf import PdfReader, PdfWriter
from pypdf.constants import PageLabelStyle
from pypdf.generic import DecodedStreamObject, DictionaryObject, NameObject
from small_pdf import PDF, make_writer, raw_document, show, to_bytes

from longread.document import document_text, extract
from longread.errors import DocumentError, NoTextError, PasswordError
from longread.pdf_pypdf import page_text


def test_page_labels_are_none_where_they_are_the_plain_number() -> None:
    writer = make_writer(show(f"Page {number}") for number in range(6))
    writer.set_page_label(0, 1, PageLabelStyle.LOWERCASE_ROMAN)
    writer.set_page_label(2, 3, PageLabelStyle.DECIMAL, start=1)
    writer.set_page_label(4, 5, PageLabelStyle.DECIMAL, start=5)
    document = extract(raw_document(to_bytes(writer)))
    assert [page.label for page in document.pages] == ["i", "ii", "1", "2", None, None]


def with_unreadable_page() -> bytes:
    writer = make_writer([show("First page"), show("Second page"), b"", show("Fourth page")])
    contents = writer.pages[1]["/Contents"]
    contents.set_data(zlib.compress(contents.get_data()))  # type: ignore[attr-defined]
    contents[NameObject("/Filter")] = NameObject("/NoSuchFilter")  # type: ignore[index]
    return to_bytes(writer)


def test_a_damaged_page_is_a_warning_and_so_is_one_without_text() -> None:
    document = extract(raw_document(with_unreadable_page()))
    assert [page.text for page in document.pages] == ["First page", "", "", "Fourth page"]
    unreadable, blank = document.warnings
    assert unreadable.startswith("page 2 could not be read (") and "NoSuchFilter" in unreadable
    assert blank.startswith("no text on page 3 ") and "ocrmypdf" in blank


def test_only_damaged_pages_are_an_error_that_says_why() -> None:
    with pytest.raises(DocumentError, match="NoSuchFilter") as caught:
        extract(raw_document(with_unreadable_page()), pages="2")
    assert caught.value.exit_code == 3


def test_textless_pdf_names_ocrmypdf() -> None:
    with pytest.raises(NoTextError, match="ocrmypdf") as caught:
        extract(raw_document(to_bytes(make_writer([b"", b"0 0 10 10 re f"]))))
    assert caught.value.exit_code == 5
    with pytest.raises(NoTextError, match="selected pages"):
        extract(raw_document(with_unreadable_page()), pages="3")


def test_many_page_numbers_in_a_warning_are_ranges_and_bounded() -> None:
    contents = [b"" if number % 3 else show("Text") for number in range(60)]
    (warning,) = extract(raw_document(to_bytes(make_writer(contents)))).warnings
    assert warning.startswith("no text on pages 2-3, 5-6, ") and "and more, 40 in all" in warning


def test_a_repaired_file_says_so_and_nothing_reaches_the_log_or_terminal(
    capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    damaged = re.sub(rb"startxref\n\d+", b"startxref\n99", PDF)
    logger = logging.getLogger("pypdf")
    before = (list(logger.handlers), logger.propagate)
    document = extract(raw_document(damaged))
    assert len(document.pages) == 6 and document.pages[5].text == "This is page number 6."
    assert any("damaged" in warning for warning in document.warnings)
    assert capfd.readouterr() == ("", "") and not caplog.records
    assert (list(logger.handlers), logger.propagate) == before


def test_a_form_that_calls_itself_ends() -> None:
    writer = make_writer([b"/X0 Do " + show("Text")])
    form = DecodedStreamObject()
    form[NameObject("/Type")] = NameObject("/XObject")
    form[NameObject("/Subtype")] = NameObject("/Form")
    form.set_data(b"/X0 Do")
    reference = writer._add_object(form)
    resources = writer.pages[0]["/Resources"]
    resources[NameObject("/XObject")] = DictionaryObject({NameObject("/X0"): reference})  # type: ignore[index]
    form[NameObject("/Resources")] = resources
    assert "Text" in document_text(extract(raw_document(to_bytes(writer))))


def encrypted(user: str, owner: str, algorithm: str) -> bytes:
    writer = PdfWriter(clone_from=io.BytesIO(PDF))
    writer.encrypt(user, owner, algorithm=algorithm)
    return to_bytes(writer)


@pytest.mark.parametrize("algorithm", ["RC4-128", "AES-128", "AES-256"])
def test_passwords(algorithm: str) -> None:
    document = raw_document(encrypted("geheim", "owner", algorithm))
    for password in ("geheim", "owner", lambda name: "geheim"):
        assert extract(document, password=password).pages[0].text == "This is page number 1."
    for missing in (None, "", lambda name: None):
        with pytest.raises(PasswordError, match="--password or LONGREAD_PASSWORD") as caught:
            extract(document, password=missing)
        assert "encrypted" in str(caught.value)
    with pytest.raises(PasswordError, match="wrong.*--password or LONGREAD_PASSWORD") as caught:
        extract(document, password="falsch")
    assert caught.value.exit_code == 4


@pytest.mark.parametrize("password", ["pässwört", "pässwört☃", "ﬁne"])
def test_passwords_outside_ascii(password: str) -> None:
    document = raw_document(encrypted(password, "owner", "AES-256"))
    assert len(extract(document, password=password).pages) == 6


def test_a_file_with_permissions_only_opens_without_asking() -> None:
    def ask(name: str) -> str:
        raise AssertionError("asked for a password that is not needed")

    document = extract(raw_document(encrypted("", "owner", "AES-256")), password=ask)
    assert len(document.pages) == 6
    assert len(extract(raw_document(PDF), password=ask).pages) == 6


def test_the_callable_is_asked_for_the_file_by_name() -> None:
    asked: list[str] = []
    with pytest.raises(PasswordError):
        extract(raw_document(encrypted("a", "b", "RC4-128"), "secret.pdf"), password=asked.append)
    assert asked == ["secret.pdf"]


def spaced(show_text: bytes) -> bytes:
    """Justified text: two pieces of a word, the second placed where the first ends."""
    # Helvetica at 10 points: "one two three four fi" is 87.32 wide, and its four spaces get 3 each.
    return b"BT /F1 10 Tf 72 700 Td 3 Tw " + show_text + b" 99.32 0 Td (ve six) Tj ET"


@pytest.mark.parametrize(
    "show_text",
    [
        b"(one two three four fi) Tj",
        b"[(one two ) -0.1 (three four fi)] TJ",
        b"12 TL (one two three four fi) '",
        b'12 TL 3 0 (one two three four fi) "',
        b"q 1 Tw Q (one two three four fi) Tj",
    ],
)
def test_word_spacing_puts_no_space_into_words(show_text: bytes) -> None:
    content = spaced(show_text)
    assert document_text(extract(raw_document(to_bytes(make_writer([content]))))) == (
        "one two three four five six"
    )


def test_word_gaps_beside_word_spacing_stay() -> None:
    content = b"BT /F1 10 Tf 72 700 Td 3 Tw (one two) Tj 60 0 Td (three) Tj ET"
    assert document_text(extract(raw_document(to_bytes(make_writer([content]))))) == "one two three"


def test_odd_text_operators_do_not_lose_the_page() -> None:
    content = b"BT /F1 10 Tf (bad) Tw /F9 12 Tf 1 Tw (a b) Tj Q Q ET " + show("Still here")
    assert "Still here" in document_text(extract(raw_document(to_bytes(make_writer([content])))))


def test_reading_leaves_the_reader_free_of_parsed_content() -> None:
    reader = PdfReader(io.BytesIO(to_bytes(make_writer([spaced(b"(one two three four fi) Tj")]))))
    page = reader.pages[0]
    contents = page.raw_get("/Contents")
    assert page_text(page, reader) == page_text(page, reader) == "one two three four five six"
    assert page.raw_get("/Contents") is contents
