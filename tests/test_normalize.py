from __future__ import annotations

import random
import time
import unicodedata

import pytest

from longread.normalize import (
    clean_line,
    clean_text,
    join_hyphens,
    quality_warnings,
)
from longread.running import drop_running_lines

# Ligatures, spaces, combining marks, controls, halves of a pair, direction overrides, jamo.
ALPHABET = (
    "aZ9 -\n\r\t\f\x00\x0b\x1b\x85\xa0\xad\u0301\u1100\u1161\u200b\u202e\u2028\ufb01ﬀ½한"
    "\U0001f600\ud83d\ude00"
)


@pytest.mark.parametrize(
    ("raw", "clean"),
    [
        ("e\ufb03cient \ufb02oor", "efficient floor"),
        ("a\r\nb\rc\x0bd\u2028e", "a\nb\nc\nd\ne"),
        ("nul\x00 esc\x1b[31m bell\x07", "nul esc[31m bell"),
        ("co\xadoperate fi-\nnal", "cooperate fi-\nnal"),
        ("confir\xad\n  med", "confirmed"),
        ("one  \t\ntwo\xa0\n", "one\ntwo\n"),
        ("A\u030alesund cafe\u0301", "Ålesund café"),
        ("e\xad\u0301", "é"),
        ("\ud83d\ude00 \ud83d", "\U0001f600 \ufffd"),
        ("user\u202etxt.exe", "usertxt.exe"),
        ("tab\tand form\ffeed", "tab\tand form\nfeed"),
        ("می\u200cخواهم", "می\u200cخواهم"),
    ],
)
def test_clean_text(raw: str, clean: str) -> None:
    assert clean_text(raw) == clean


def test_clean_text_keeps_form_feeds_when_asked() -> None:
    assert clean_text("a \f b", keep_form_feeds=True) == "a \f b"


def test_clean_line_is_one_safe_line() -> None:
    assert clean_line("bad\x1b[2J\nname\udcff .pdf ") == "bad[2J name\ufffd .pdf"


def test_clean_text_is_normal_and_idempotent_on_random_text() -> None:
    rng = random.Random(2)
    for _ in range(2000):
        text = clean_text("".join(rng.choices(ALPHABET, k=rng.randrange(40))))
        assert text == clean_text(text)
        assert unicodedata.is_normalized("NFKC", text)
        assert all(
            char in "\n\t" or unicodedata.category(char) not in ("Cc", "Cs") for char in text
        )


@pytest.mark.parametrize(
    ("page", "joined"),
    [
        ("most numer-\nous Branch", "most numerous Branch"),
        ("regu\u2010\nlar", "regular"),
        # The other words of the page decide about compounds.
        ("a well-known fact, well-\nknown", "a well-known fact, well-known"),
        ("the pump and the room: pump-\nroom", "the pump and the room: pump-room"),
        ("without doubt, with him and out: with-\nout", "without doubt, with him and out: without"),
        ("numerous, the most numer -\nous", "numerous, the most numerous"),
        ("commander-in-\nchief", "commander-in-chief"),
        ("established; well-estab-\nlished", "established; well-established"),
        ("he spoke -\nand left", "he spoke -\nand left"),
        ("New-\nYork, Franco-\nGerman", "New-\nYork, Franco-\nGerman"),
        ("1787-\n1788, page-\n2", "1787-\n1788, page-\n2"),
        ("a dash--\nand more", "a dash--\nand more"),
        ("Welfare: WEL-\nFARE, FOO-\nBAR", "Welfare: WELFARE, FOO-\nBAR"),
    ],
)
def test_join_hyphens_of_typeset_pages(page: str, joined: str) -> None:
    assert join_hyphens([page], typeset=True) == [joined]


def test_join_hyphens_of_plain_text_needs_the_whole_word() -> None:
    pages = ["numer-\nous and numerous", "a left-\nhanded man, numer-\nous"]
    assert join_hyphens(pages, typeset=False) == [
        "numerous and numerous",
        "a left-\nhanded man, numerous",
    ]


@pytest.mark.parametrize(
    "unit", ["a", " ", "a-", "a ", "-\n", "a-\n", "\xad ", "\n", "1", " -", "g"]
)
def test_time_is_linear_on_pages_of_one_kind_of_character(unit: str) -> None:
    page = unit * (400_000 // len(unit))
    start = time.perf_counter()
    text = clean_text(page)
    (text,) = join_hyphens([text], typeset=True)
    drop_running_lines([text] * 4, range(4))
    quality_warnings(text)
    assert time.perf_counter() - start < 5  # quadratic time would be minutes


def test_time_of_running_heads_is_bounded_on_lines_of_gaps() -> None:
    start = time.perf_counter()
    for line in ("a" + " " * 390 + "b", "a  " * 130 + "b", "- " * 190 + "b", "a\t(" * 120):
        drop_running_lines([line] * 50, range(50))
    assert time.perf_counter() - start < 5


def body(page_idx: int) -> str:
    return f"Body {page_idx} begins\nand goes on.\nMore of {page_idx}\nuntil {page_idx} ends."


def test_page_numbers_and_repeated_heads_go() -> None:
    pages = [
        f"The Laws of Whist        {page_idx + 3}\n{body(page_idx)}\n- {page_idx + 1} -"
        for page_idx in range(6)
    ]
    first, *rest = drop_running_lines(pages, range(6))
    assert first == f"{pages[0].splitlines()[0]}\n{body(0)}"  # a head's wording is kept once
    assert rest == [body(page_idx) for page_idx in range(1, 6)]


@pytest.mark.parametrize("number", ["{}", "Page {}", "page {} of 9", "[{}]", "{}/9", "– {} –"])
def test_forms_of_page_numbers(number: str) -> None:
    pages = [f"{body(page_idx)}\n{number.format(page_idx + 1)}" for page_idx in range(9)]
    assert drop_running_lines(pages, range(9)) == [body(page_idx) for page_idx in range(9)]


def test_page_numbers_are_recognised_in_a_selection_of_pages() -> None:
    indices = [4, 7, 20, 21]
    pages = [f"{page_idx + 1}\n{body(page_idx)}" for page_idx in indices]
    assert drop_running_lines(pages, indices) == [body(page_idx) for page_idx in indices]


@pytest.mark.parametrize(
    "line",
    [
        "Section {}",  # a heading, though it counts with the pages
        "{} members voted for it",
        "Year 19{}",
        "The same sentence on every page.",
        "{0}{0}",  # numbers that do not count with the pages
    ],
)
def test_content_at_the_edge_of_pages_stays(line: str) -> None:
    pages = [f"{line.format(page_idx)}\n{body(page_idx)}" for page_idx in range(9)]
    pages[0] = body(0)
    assert drop_running_lines(pages, range(9)) == pages


def test_a_page_never_becomes_empty_and_two_pages_prove_nothing() -> None:
    assert drop_running_lines(["Hello world"] * 5, range(5)) == ["Hello world"] * 5
    pages = [f"{body(0)}\n1", f"{body(1)}\n2"]
    assert drop_running_lines(pages, range(2)) == pages


def test_quality_warnings() -> None:
    good = "We the People of the United States, in Order to form a more perfect Union. " * 20
    assert quality_warnings(good) == []
    assert quality_warnings("") == []
    (run_on,) = quality_warnings(good + "mustsatisfytobeincludedinthedistribution " * 10)
    assert "without spaces" in run_on
    (unmapped,) = quality_warnings(good + "\ue012\ue013\ue014" * 20)
    assert "60 of" in unmapped
    (names,) = quality_warnings(good + "/g18/g152/g135/g148 " * 20)
    assert "no known meaning" in names
    assert quality_warnings(good * 5 + "\uf0b7") == []  # one odd bullet is no alarm


def test_words_of_compounds_are_known_where_a_compound_breaks() -> None:
    page = "default-mysql-server is compatible, and so is mysql-\ncompatible software."
    assert "mysql-compatible software" in join_hyphens([page], typeset=True)[0]
    # What stands in front of many words says nothing.
    page = "A demi-god, as john said of a demi-\njohn."
    assert "demijohn" in join_hyphens([page], typeset=True)[0]
