"""What a PDF and the text of the same document differ in, beyond what was read wrongly.

    python scripts/completeness_differences.py PDF TEXT

`longread inspect PDF --against TEXT` compares the two as they stand. This script undoes, on the
text's side, two ways in which a text of 72 columns orders what a page shows side by side, and
counts what then remains: tables drawn with lines (`| a | b |`), which hold the cells of a row line
by line, are written out cell by cell; notes, which such a text collects at the end of a chapter and
a page has at its foot, are compared by themselves. It also says how much of what is extra is a
number alone, such as that of a chapter which the two count differently.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator, Sequence

from longread import normalize, pdf, typeset
from longread.completeness import Completeness, compare, words
from longread.document import read_source

RULE = re.compile(r"\s*\+[-=+]+\+\s*")
ROW = re.compile(r"\s*\|.*\|\s*")
NOTE = re.compile(r"\[\d+\] \S")
NUMBER = re.compile(r"\d+|[a-z]|[ivx]+")


def by_cells(text: str) -> tuple[str, int]:
    """The text with drawn tables written out cell by cell, and how many words those hold."""
    out: list[str] = []
    rows: list[list[str]] = []
    num_words = 0
    for line in [*text.split("\n"), ""]:
        if ROW.fullmatch(line):
            rows.append(line.strip().strip("|").split("|"))
            continue
        if rows and RULE.fullmatch(line) and all(len(row) == len(rows[0]) for row in rows):
            cells = [" ".join(part.strip() for part in cell) for cell in zip(*rows, strict=True)]
            out += cells
            num_words += len(words(" ".join(cells)))
        else:
            out += ["|".join(row) for row in rows]
        rows = []
        out.append("" if RULE.fullmatch(line) else line)
    return "\n".join(out), num_words


def in_notes(lines: Iterable[str]) -> Iterator[bool]:
    """Of each line, whether it belongs to a collected note."""
    in_note = False
    for line in lines:
        in_note = bool(NOTE.match(line)) or (in_note and (not line or line.startswith("    ")))
        yield in_note


def without_notes(text: str) -> tuple[str, str]:
    """The text without its collected notes, and the notes."""
    lines = text.split("\n")
    flags = list(in_notes(lines))
    body = [line for line, in_note in zip(lines, flags, strict=True) if not in_note]
    notes = [line for line, in_note in zip(lines, flags, strict=True) if in_note]
    return "\n".join(body), "\n".join(notes)


def num_elsewhere_in(found: Completeness, lines: Sequence[str], flags: Iterable[bool]) -> int:
    """How many of the words that are found elsewhere stand in the lines with a flag."""
    flagged = [
        flag for line, flag in zip(lines, flags, strict=True) for _ in range(len(words(line)))
    ]
    return sum(
        sum(flagged[item.expected_idx : item.expected_idx + item.num_words])
        for item in found.differences
        if item.kind == "elsewhere" and item.expected_idx is not None
    )


def read_pdf(path: str) -> tuple[str, str, str]:
    """The PDF's text as a model reads it, the same without its foot notes, and the notes."""
    raw = read_source(path)
    read = pdf.read_pdf(
        raw.data,
        raw.source,
        select=lambda num_pages: range(num_pages),
        password=None,
        progress=lambda progress: None,
    )
    bodies, notes = typeset.bodies_and_notes(read.pages)
    whole = typeset.place_notes(bodies, notes)
    return "\n\n".join(whole), "\n\n".join(bodies), "\n\n".join(notes)


def row(name: str, found: Completeness) -> str:
    """One line of the table."""
    num_extra = found.num_read - found.num_found - found.num_moved
    return (
        f"{name:32} {found.num_expected:>8,} {found.num_found:>8,} {found.found_share:>8.2%} "
        f"{found.num_moved:>6,} {found.moved_share:>7.2%} {num_extra:>5,} {found.extra_share:>7.2%}"
    )


def lines(pdf_path: str, text_path: str) -> Iterator[str]:
    """The report."""
    with open(text_path, encoding="utf-8") as file:
        expected = normalize.clean_text(file.read())
    whole, bodies, notes = read_pdf(pdf_path)
    head = f"{'':32} {'words':>8} {'in order':>17} {'elsewhere':>14} {'extra':>13}"
    yield head
    found = compare(whole, expected, num_differences=sys.maxsize)
    yield row("as they stand", found)
    drawn, num_drawn = by_cells(expected)
    if num_drawn:
        yield row("tables of the text by cells", compare(whole, drawn))
    text_body, text_notes = without_notes(drawn)
    if text_notes and notes:
        yield row("notes apart: the text", compare(bodies, text_body))
        yield row("notes apart: the notes", compare(notes, text_notes))
    yield ""
    texts = expected.split("\n")
    if num_drawn:
        inside = num_elsewhere_in(found, texts, (bool(ROW.fullmatch(line)) for line in texts))
        yield f"{num_drawn:,} words stand in drawn tables, {inside:,} of those elsewhere"
    if text_notes:
        inside = num_elsewhere_in(found, texts, in_notes(texts))
        number = len(words(text_notes))
        yield f"{number:,} words stand in collected notes, {inside:,} of those elsewhere"
    extra = [item for item in found.differences if item.kind == "extra"]
    numbers = sum(item.num_words for item in extra if NUMBER.fullmatch(item.text))
    chapters = sum(item.num_words for item in extra if item.text.startswith("chapter "))
    yield f"extra: {numbers:,} numbers and letters alone, {chapters:,} words of `CHAPTER ONE`"


def main() -> int:
    pdf_path, text_path = sys.argv[1:]
    sys.stdout.write("\n".join(lines(pdf_path, text_path)) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
