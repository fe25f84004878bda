"""What --show-selected shows: passages with marked words, the strip, the table of heads."""

from __future__ import annotations

import io
import re
from dataclasses import replace

import pytest
from fake_session import PASSAGE, SELECTION

from longread.events import DocumentInfo, Selection
from longread.render import Screen
from longread.selection_view import head_lines, selection_lines

DOCUMENTS = (DocumentInfo("book.txt", 12, 100),)
HEADS = tuple(tuple(0.01 * (10 * layer + head) for head in range(4)) for layer in range(3))


def _with(**changes: object) -> Selection:
    return replace(SELECTION, passages=(replace(PASSAGE, **changes),))  # type: ignore[arg-type]


def test_selection_report() -> None:
    lines = [line.text for line in selection_lines(SELECTION, DOCUMENTS, 80, cut=True)]
    assert lines[0] == (
        "Selected: policy tokenselect, vote group, index int8, budget 20 tokens per KV head; "
        "25.0% of the cached rows read"
    )
    assert re.split(r"  +", lines[1]) == ["page", "heads", "layers", "mass", "text"]
    assert re.split(r"  +", lines[2]) == [
        "p. 12 (label xii)",
        "50%",
        "100%",
        "12.5%",
        "the passage [bold]text[/bold]",
    ]
    assert lines[3] == "▁▂█▃"
    assert lines[4] == "0%"


def test_selection_of_several_documents_names_them() -> None:
    documents = (DocumentInfo("a.txt", 2, 10), DocumentInfo("b.txt", 2, 30))
    lines = selection_lines(SELECTION, documents, 80, cut=False)
    assert lines[2].text.startswith("book.txt, p. 12")
    assert lines[-1].text == "#1 a.txt; #2 b.txt"


@pytest.mark.parametrize("cut", [True, False])
def test_words_are_marked_where_they_are_shown(cut: bool) -> None:
    text = "the cap\x1btain is Captain Voss of Marsk, " + "and sails " * 40
    marks = tuple((text.index(word), text.index(word) + len(word)) for word in ("Voss", "Marsk,"))
    line = selection_lines(_with(text=text, marks=marks), DOCUMENTS, 90, cut=cut)[2]
    assert "\x1b" not in line.text
    assert [line.text[start:end] for start, end, _ in line.marks] == ["Voss", "Marsk,"]


def test_words_that_were_cut_off_are_not_marked() -> None:
    text = "a word " * 30 + "Voss"
    line = selection_lines(_with(text=text, marks=((210, 214),)), DOCUMENTS, 60, cut=True)[2]
    assert line.marks == () and line.text.endswith("…")


def test_a_row_for_each_layer_and_a_column_for_each_head() -> None:
    lines = head_lines(replace(SELECTION, heads=HEADS), 80)
    assert lines[1].text.split() == ["layer", "0", "1", "2", "3", "all"]
    assert [line.text.split() for line in lines[2:]] == [
        ["0", "0", "1", "2", "3", "2"],
        ["1", "10", "11", "12", "13", "12"],
        ["2", "20", "21", "22", "23", "22"],
    ]
    strong = [line.text[a:b].split() for line in lines for a, b, s in line.marks if "bold" in s]
    assert strong == [["20"], ["21"], ["22"], ["23"], ["22"]]
    assert head_lines(SELECTION, 80) == []


def test_many_heads_come_in_several_tables() -> None:
    wide = tuple(tuple([0.5] * 16) for _ in range(2))
    lines = head_lines(replace(SELECTION, heads=wide), 50)
    assert len(lines) == 1 + 2 * 3
    assert all(len(line.text) <= 50 for line in lines[1:])
    assert lines[4].text.split() == ["layer", *map(str, range(8, 16)), "all"]


def test_the_table_comes_with_verbose_and_colours_on_a_terminal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setenv("TERM", "xterm-256color")
    selection = replace(_with(marks=((4, 11),)), heads=HEADS)
    pipe, terminal = io.StringIO(), Terminal()
    Screen(io.StringIO(), pipe).selected(selection, DOCUMENTS)
    assert "layer " not in pipe.getvalue() and "\x1b" not in pipe.getvalue()
    Screen(io.StringIO(), pipe).selected(selection, DOCUMENTS, heads=True)
    assert "layer    0    1    2    3  all\n" in pipe.getvalue() and "\x1b" not in pipe.getvalue()
    Screen(io.StringIO(), terminal).selected(selection, DOCUMENTS, heads=True)
    assert "\x1b[1mpassage\x1b[0m" in terminal.getvalue()
    assert re.search(r"\x1b\[1;32m +20\x1b", terminal.getvalue())
