"""The choice between two engines' texts, the layout of pages, fields, and repair."""

from __future__ import annotations

import io

import pytest
from inline_reader import inline_reader  # noqa: F401
from pypdf import PdfReader, PdfWriter
from pypdf.generic import (
    ArrayObject,
    DictionaryObject,
    FloatObject,
    NameObject,
    TextStringObject,
)
from small_pdf import PDF, make_writer, raw_document, show, to_bytes

from longread import pdf_layout, pdf_repair
from longread.document import document_text, extract, options_key
from longread.normalize import has_shifted_letters, join_spaced_letters
from longread.page_choice import Second, bad_share, choose
from longread.pdf_layout import Char
from longread.pdf_pdfium import PdfiumFile
from longread.running import drop_running_lines

GOOD = "We the People of the United States, in Order to form a more perfect Union, do ordain it."


@pytest.mark.parametrize(
    ("first", "second", "wanted"),
    [
        (GOOD, Second(GOOD), False),
        (GOOD, None, False),
        (None, Second(GOOD), True),
        ("", Second(GOOD), True),
        (GOOD, Second(""), False),
        (GOOD.replace(" ", ""), Second(GOOD), True),
        (GOOD, Second(GOOD.replace(" ", "")), False),
        (GOOD.replace("the People of", "thePeopleof"), Second(GOOD), True),
        (" ".join(GOOD.replace(" ", "")), Second(GOOD), True),
        (GOOD, Second(" ".join(GOOD.replace(" ", ""))), False),
        ("/g18/g152/g135/g148 " * 20, Second(GOOD), True),
        ("\ue012\ue013 " * 40, Second(GOOD), True),
        ("꒢꒤꒦꒨꒪", Second("あいうえお"), True),
        ("Ä¿ ¡¡ Â¼ ¹Ø ÓÚ ºì ¾ü", Second("目录关于红军作战的原则"), True),
        (GOOD, Second(GOOD, in_order=False), True),
        (GOOD, Second(GOOD, in_order=False, is_turned=True), False),
        ("שלום עולם", Second("עולם שלום", is_rtl=True), True),
        ("股份有限公司" * 4, Second("股份有限公司"), True),
    ],
)
def test_choice(first: str | None, second: Second | None, wanted: bool) -> None:
    take_second, why = choose(first, second)
    assert take_second is wanted
    assert bool(why) == wanted


def test_shifted_letters_are_known_and_plain_ones_are_not_taken_for_them() -> None:
    words = "Peoples of the United States of America in Order"
    shifted = "".join(chr(ord(char) - 29) for char in words if ord(char) - 29 > 0x20)
    assert has_shifted_letters(shifted) and bad_share(shifted) == 1.0
    for text in (GOOD, GOOD.upper(), "HTTP/1.1 XML RFC", "关于红军作战的原则", "", "x" * 50):
        assert not has_shifted_letters(text)


def test_spaced_letters_are_joined_and_words_are_not() -> None:
    assert join_spaced_letters("关 于 红 军 作 战 的 原 则") == "关于红军作战的原则"
    assert join_spaced_letters("H e l l o  W o r l d") == "Hello World"
    dots = "1.1 Scope . . . . . . . . . . 3\n1.2 New versions . . . . . . 4"
    for text in (GOOD, dots, "a b c", ""):
        assert join_spaced_letters(text) == text


def chars(text: str, x: float, y: float) -> list[Char]:
    made = [Char(c, x + 5 * i, y, x + 5 * i + 5, y + 10) for i, c in enumerate(text)]
    return [*made, Char("\n", 0, 0, 0, 0)]


def test_what_is_drawn_out_of_order_is_read_down_the_page() -> None:
    lines = [(f"line number {i} of it", 72.0, 700.0 - 14 * i) for i in range(30)]
    rects = [(x, y, x + 5 * len(text), y + 10) for text, x, y in lines]
    assert pdf_layout.in_order(rects)
    assert not pdf_layout.in_order(rects[15:] + rects[:15])
    columns = rects + [(x + 300, y, right + 300, top) for x, y, right, top in rects]
    assert pdf_layout.in_order(columns)
    drawn = [char for line in lines[15:] + lines[:15] for char in chars(*line)]
    assert pdf_layout.ordered_text(drawn) == "\n".join(text for text, _, _ in lines)
    both = drawn + [char for text, x, y in lines for char in chars(text, x + 300, y)]
    assert pdf_layout.ordered_text(both) is None


def test_a_gap_is_filled_by_the_word_that_is_drawn_later() -> None:
    drawn = chars("The size", 72, 700) + chars("be kept.", 160, 700) + chars("MUST", 130, 700)
    assert pdf_layout.ordered_text(drawn) == "The size MUST be kept."


def test_vertical_columns_go_from_right_to_left() -> None:
    def column(text: str, x: float) -> list[Char]:
        return [Char(c, x, 690 - 10 * i, x + 10, 700 - 10 * i) for i, c in enumerate(text)]

    assert pdf_layout.vertical_text(column("ある", 100) + column("日本語", 120)) == "日本語\nある"
    assert pdf_layout.vertical_text(chars("level text", 72, 700)) is None


def with_form(**values: str) -> bytes:
    writer = make_writer([show("A form")])
    page = writer.pages[0]
    widgets = ArrayObject()
    for name, value in values.items():
        widget = DictionaryObject()
        widget[NameObject("/Type")] = NameObject("/Annot")
        widget[NameObject("/Subtype")] = NameObject("/Widget")
        widget[NameObject("/FT")] = NameObject("/Tx")
        widget[NameObject("/T")] = TextStringObject(name)
        widget[NameObject("/V")] = TextStringObject(value)
        widget[NameObject("/Rect")] = ArrayObject(FloatObject(n) for n in (10, 10, 90, 30))
        widgets.append(writer._add_object(widget))
    note = DictionaryObject()
    note[NameObject("/Type")] = NameObject("/Annot")
    note[NameObject("/Subtype")] = NameObject("/Text")
    note[NameObject("/Contents")] = TextStringObject("Check \x1b[2J this")
    note[NameObject("/Rect")] = ArrayObject(FloatObject(n) for n in (10, 10, 20, 20))
    widgets.append(writer._add_object(note))
    page[NameObject("/Annots")] = widgets
    return to_bytes(writer)


def test_form_values_and_notes_stand_after_the_page_s_text() -> None:
    document = extract(raw_document(with_form(Name="Alice", Empty="", City="Köln")))
    assert document.pages[0].text == "A form\n\nName: Alice\nCity: Köln\nNote: Check [2J this"


def test_a_file_without_a_table_of_objects_is_rebuilt() -> None:
    cut = PDF[: PDF.rindex(b"xref")]
    rebuilt = pdf_repair.rebuild(cut)
    assert rebuilt is not None and len(PdfReader(io.BytesIO(rebuilt)).pages) == 6
    document = extract(
        raw_document(cut[: cut.rindex(b"startxref")] if b"startxref" in cut else cut)
    )
    assert document.pages[5].text == "This is page number 6."
    assert any("damaged" in warning for warning in document.warnings)
    assert pdf_repair.rebuild(b"%PDF-1.4 nothing") is None


def test_text_outside_the_page_is_no_text_of_it() -> None:
    writer = make_writer([show("Here"), b"BT /F1 12 Tf 900 900 Td (Far away) Tj ET"])
    document = extract(raw_document(to_bytes(writer)))
    assert [page.text for page in document.pages] == ["Here", ""]
    assert document.pages[1].note == "its text lies outside the page"


def test_engines_and_their_versions_are_part_of_the_key_and_of_each_page() -> None:
    key = options_key(raw_document(PDF), None)
    assert "pypdf " in key and "pypdfium2 " in key
    assert {page.engine for page in extract(raw_document(PDF)).pages} == {"pypdf"}
    writer = PdfWriter()
    for number in range(201):
        writer.append(io.BytesIO(to_bytes(make_writer([show(f"Page {number}")]))))
    many = extract(raw_document(to_bytes(writer)))
    assert {page.engine for page in many.pages} == {"pypdfium2"}
    assert document_text(many).split()[-1] == "200"


def test_titles_and_roman_numbers_beside_one_space_go() -> None:
    def body(i: int) -> str:
        return f"Words of page {i} begin.\nand {i} goes on.\nFor {i} there is more,\nand end {i}."

    pages = [f"Northanger Abbey {i}\n{body(i)}" for i in range(12)]
    first, *rest = drop_running_lines(pages, range(12))
    assert first == pages[0] and rest == [body(i) for i in range(1, 12)]
    numerals = ["i", "ii", "iii", "iv", "v"]
    pages = [f"{body(i)}\n{number}" for i, number in enumerate(numerals)]
    assert drop_running_lines(pages, range(5)) == [body(i) for i in range(5)]
    # Chapters' heads beside the right number, on few pages each, whose words stand in the text.
    titles = ["Of the dog", "Of the cat", "Of the cow", "Of the hen"]
    pages = [f"{titles[i // 5]} {i + 1}\n{body(i)} {titles[i // 5]}!" for i in range(20)]
    kept = drop_running_lines(pages, range(20))
    assert all(page.startswith("Words of page") for page in kept)
    pages = [f"{body(i)}\nRFC 9 Some Protocol August 2022" for i in range(12)]
    assert [page.count("August") for page in drop_running_lines(pages, range(12))] == [1] + [0] * 11


def test_pdfium_puts_the_stop_after_a_number_in_right_to_left_text() -> None:
    assert len(PdfiumFile(PDF, None)) == 6
