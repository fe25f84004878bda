"""Raised numbers, foot notes and late table heads: found by size and place, written into text."""

from __future__ import annotations

import io
import time

import pytest
from inline_reader import inline_reader  # noqa: F401
from pypdf import PdfWriter
from small_pdf import make_writer, raw_document, to_bytes

from longread import page_edits, pdf_marks
from longread.document import Document, document_text, extract
from longread.pdf_layout import Rect
from longread.pdf_marks import Marks, Raised


def line(text: str, x: float, y: float, size: float = 10) -> bytes:
    """One line in Helvetica; what stands between carets is drawn small and raised."""
    out = [f"BT {x} {y} Td"]
    for i, part in enumerate(text.split("^")):
        small, rise = (0.6 * size, 0.4 * size) if i % 2 else (size, 0)
        out.append(f"/F1 {small} Tf {rise} Ts ({part}) Tj" if part else "")
    return " ".join([*out, "ET"]).encode()


def read(*pages: list[bytes]) -> Document:
    return extract(raw_document(to_bytes(make_writer([b" ".join(page) for page in pages]))))


BODY = [line(f"This is line {i} of the text, and it goes on", 72, 700 - 14 * i) for i in range(30)]


@pytest.mark.parametrize(
    ("drawn", "wanted"),
    [
        ("modulo 2^32^ - 1 in all", "modulo 2^32 - 1 in all"),
        ("is 10^-3^ of it", "is 10^-3 of it"),
        ("in 1999.^12^ And then", "in 1999.^12 And then"),
        ("the 1^st^ of May", "the 1st of May"),
    ],
)
def test_small_raised_numbers_are_parted_from_what_they_follow(drawn: str, wanted: str) -> None:
    assert document_text(read([line(drawn, 72, 700)])) == wanted


@pytest.mark.parametrize(
    ("base", "raised", "wanted"),
    [("O(n", "k", "O(n^k"), ("x", "T", "x^T"), ("1", "st", "1st"), ("XVII", "e", "XVIIe")],
)
def test_raised_letters(base: str, raised: str, wanted: str) -> None:
    mark = Raised(1, raised, None)
    text = f"{base}\r\n{raised}"
    found = page_edits.edits(Marks((mark,)), text, lambda i: len(base) + 2)
    assert page_edits.applied(found, text) == (wanted, "")


def test_digits_of_a_table_and_letters_of_a_kerned_word_are_not_raised() -> None:
    # Measured: `514` of a balance sheet drawn digit by digit, and `g` + `ave` of a book.
    digits: list[Rect] = [
        (35.9, 203.7, 119.6, 211.3),
        (462.1, 206.0, 466.4, 212.6),
        (467.7, 206.1, 470.1, 212.7),
        (471.9, 206.1, 476.3, 212.6),
    ]
    texts = ["Noncontrolling interests ", "5", "1", "4"]
    assert pdf_marks.find_marks(digits, texts.__getitem__) == Marks()
    word: list[Rect] = [(72.0, 497.8, 77.0, 504.6), (77.1, 500.0, 90.0, 504.6)]
    assert pdf_marks.find_marks(word, ["g", "ave"].__getitem__) == Marks()


def note(number: int, text: str, y: float) -> bytes:
    return line(f"^{number}^ {text}", 72, y, 8)


def test_notes_leave_the_foot_and_keep_their_numbers() -> None:
    body = [*BODY[:3], line("A claim that needs a note.^1^ More", 72, 658), *BODY[4:]]
    foot = [
        note(1, "The note says why,", 200),
        line("in two lines.", 72, 190, 8),
        note(2, "Another.", 180),
        line("17", 530, 40, 9),
    ]
    text = document_text(read([*body, *foot]))
    assert "A claim that needs a note.[1] More\n" in text
    assert text.endswith("\n17\n\n[1] The note says why,\nin two lines.\n[2] Another.")


def test_a_number_without_a_mark_in_the_text_begins_no_note() -> None:
    text = document_text(read([*BODY, note(2, "percent of that work", 200)]))
    assert "[2]" not in text and text.endswith("percent of that work")


def test_a_sentence_goes_on_to_the_next_page_without_the_notes_between() -> None:
    first = [
        line("It is said here.^1^", 72, 600),
        line("The next sentence is", 72, 586),
        note(1, "A note.", 200),
    ]
    document = read(first, [line("continued overleaf.", 72, 700)])
    assert document.pages[0].text == "It is said here.[1]\n\n[1] A note.\n\nThe next sentence is"
    assert document.pages[1].text == "continued overleaf."
    # Where a new sentence begins, the notes stay at the end.
    document = read(first, [line("Another one.", 72, 700)])
    assert document.pages[0].text.endswith("The next sentence is\n\n[1] A note.")


def test_notes_of_two_columns_are_put_together() -> None:
    left = [
        line(f"Left {i} is a line of it^{1 if i == 3 else ''}^", 72, 700 - 14 * i)
        for i in range(30)
    ]
    right = [line(f"Right {i} is a line of it", 320, 700 - 14 * i) for i in range(30)]
    text = document_text(
        read([*left, note(1, "Left note.", 200), *right, line("^2^ Right note.", 320, 200, 8)])
    )
    assert text.endswith("Right 29 is a line of it\n\n[1] Left note.\n[2] Right note.")


def test_the_head_of_a_table_that_is_drawn_last_comes_first() -> None:
    rows = [line(f"Feature number {i}", 72, 680 - 14 * i) for i in range(20)]
    cells = [line("MUST", 300, 700), line("SHOULD", 350, 700), line("MAY", 410, 700)]
    text = document_text(read([line("Feature", 72, 700), *rows, *cells]))
    assert text.startswith("Feature MUST SHOULD MAY\nFeature number 0\n")
    # A second column of text is no head.
    column = [line(f"Right column, {i}", 300, 700 - 14 * i) for i in range(20)]
    text = document_text(read([line("Left column", 72, 700), *rows, *column]))
    assert text.index("Feature number 19") < text.index("Right column, 0")


def test_marks_are_read_in_long_files_too() -> None:
    writer = PdfWriter()
    for i in range(201):
        page = [line(f"Number {i} is no 2^5^ at all", 72, 700)]
        writer.append(io.BytesIO(to_bytes(make_writer([b" ".join(page)]))))
    document = extract(raw_document(to_bytes(writer)))
    assert {page.engine for page in document.pages} == {"pypdfium2"}
    assert document.pages[100].text == "Number 100 is no 2^5 at all"


def test_a_mark_after_a_stop_that_is_a_piece_of_its_own() -> None:
    # Measured: `any-cpu`, `.` and a mark in a manual's page, its letters spaced.
    rects: list[Rect] = [
        (189.1, 381.5, 205.6, 387.7),
        (206.9, 383.2, 208.0, 384.3),
        (209.4, 386.9, 211.4, 391.7),
    ]
    assert pdf_marks.find_marks(rects, ["cpu", ".", "1"].__getitem__).raised == (
        Raised(2, "1", None),
    )
    # The same digit on the line is none, nor is one after a comma or a dash.
    for low in ((206.9, 383.2, 208.0, 384.3), (206.9, 381.5, 208.0, 384.3), (206, 386, 210, 386.5)):
        digit = (211.0, 383.2, 214.4, 389.8)
        assert pdf_marks.find_marks([low, digit], [".", "1"].__getitem__) == Marks()


def test_a_note_that_begins_with_low_letters_and_one_whose_number_is_unknown() -> None:
    body = [
        line(f"Line {i} is here.^{i if i in (1, 2, 4) else ''}^", 72, 700 - 14 * i)
        for i in range(30)
    ]
    foot = [
        note(1, "Let it be.", 200),
        b"BT /F1 4.8 Tf 72 190 Td 3.2 Ts (2) Tj /F1 8 Tf 0 Ts ( man ) Tj (is Low.) Tj ET",
        line("* no number", 72, 180, 8),
        note(4, "End.", 170),
    ]
    text = document_text(read([*body, *foot]))
    assert text.endswith("\n\n[1] Let it be.\n[2] man is Low.\n* no number\n[4] End.")


def test_a_page_of_very_many_pieces_takes_no_long_time() -> None:
    # Two tables side by side, each drawn by rows: every row of the second is late.
    rows = [
        (x + 60.0 * k, 10.0 * y, x + 60.0 * k + 20, 10.0 * y + 8)
        for x in (0.0, 300.0)
        for y in range(5000, 0, -1)
        for k in range(4)
    ]
    started = time.perf_counter()
    assert pdf_marks.find_marks(rows, lambda i: "word") == Marks()
    assert time.perf_counter() - started < 5
