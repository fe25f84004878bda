"""Counting the words of a known text in an extraction, and the command that prints it."""

from __future__ import annotations

import json
import random
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from longread.completeness import compare, word_starts, words
from longread.document import document_text, extract, read_source

SAMPLES = Path(__file__).parent.parent / "sample_docs"
TEXT = (SAMPLES / "us_constitution.txt").read_text("utf-8")
WORDS = words(TEXT)


def test_the_same_text_is_all_found_whatever_its_case_breaks_and_punctuation() -> None:
    found = compare(TEXT.upper().replace(" ", "\n"), TEXT)
    assert found.found_share == 1.0 and found.extra_share == 0.0
    assert found.num_expected == found.num_read == found.num_found == len(WORDS)
    assert found.missing == found.extra == ()


def test_missing_extra_and_moved_words_are_counted() -> None:
    read = WORDS[:100] + WORDS[110:4000] + ["qqq", "zzz"] + WORDS[4200:] + WORDS[4000:4200]
    found = compare(" ".join(read), TEXT)
    assert found.num_found == pytest.approx(len(WORDS) - 210, abs=3)
    assert found.num_moved == pytest.approx(200, abs=3)
    assert found.num_read - found.num_found - found.num_moved <= 4
    assert any("qqq" in sample for sample in found.extra)
    assert any(" ".join(WORDS[101:104]) in sample for sample in found.missing)


def test_the_longest_differences_are_named_with_their_places() -> None:
    read = ["qqq", *WORDS[:100], *WORDS[110:4000], *WORDS[4200:], *WORDS[4000:4200]]
    found = compare(" ".join(read), TEXT).differences
    assert [difference.kind for difference in found[:2]] == ["elsewhere", "missing"]
    moved, missing = found[:2]
    assert moved.num_words == pytest.approx(200, abs=3) and moved.text.startswith(WORDS[4000])
    assert moved.read_idx == pytest.approx(1 + len(WORDS) - 210, abs=3)
    assert moved.expected_idx == pytest.approx(4000, abs=3)
    assert missing.read_idx is None and missing.expected_idx == pytest.approx(100, abs=3)
    extra = next(difference for difference in found if difference.kind == "extra")
    assert (extra.read_idx, extra.expected_idx, extra.text) == (0, None, "qqq")
    assert word_starts(["a b", "", "c", "d e f"]) == [0, 2, 2, 3]


def test_random_damage_is_measured_to_a_tenth_of_a_percent() -> None:
    rng = random.Random(3)
    read, num_lost = [], 0
    for word in WORDS * 3:
        if rng.random() < 0.03:
            num_lost += 1
            read.append("x" * rng.randrange(4, 9))
        else:
            read.append(word)
    found = compare(" ".join(read), " ".join(WORDS * 3))
    assert found.found_share == pytest.approx(1 - num_lost / len(WORDS) / 3, abs=0.001)


def test_other_texts_empty_texts_and_long_ones_end_soon() -> None:
    assert compare("", TEXT).found_share == 0.0
    assert compare(TEXT, "").extra_share == 1.0
    assert compare("", "").found_share == 1.0
    start = time.perf_counter()
    rng = random.Random(1)
    noise = " ".join(str(rng.randrange(50)) for _ in range(50_000))
    assert compare(noise, TEXT).found_share < 0.1
    assert compare("a " * 100_000, "a " * 90_000).found_share == 1.0
    assert time.perf_counter() - start < 10


@pytest.mark.parametrize(
    ("pdf", "text"),
    [
        ("books/pdf/us_constitution.pdf", "us_constitution"),
        ("books/pdf/moby_dick_two_columns.pdf", "moby_dick"),
    ],
)
def test_books_are_complete(evaldata: Path, pdf: str, text: str) -> None:
    document = extract(read_source(str(evaldata / pdf)))
    expected = (evaldata / "books/txt" / f"{text}.txt").read_text("utf-8")
    found = compare(document_text(document), expected)
    assert found.found_share >= 0.999 and found.extra_share <= 0.001


def test_a_document_in_two_forms_is_complete(evaldata: Path) -> None:
    document = extract(read_source(str(evaldata / "pdfs/real/rfc9293.pdf")))
    expected = (evaldata / "books/txt/rfc9293.txt").read_text("utf-8")
    found = compare(document_text(document), expected)
    # The text draws its tables line by line through all cells: docs/campaigns/completeness.txt.
    assert found.found_share >= 0.987 and found.found_share + found.moved_share >= 0.9955
    assert found.extra_share <= 0.005
    assert all(difference.num_words < 25 for difference in found.differences)


def test_notes_at_the_foot_are_elsewhere_and_little_is_extra(evaldata: Path) -> None:
    document = extract(read_source(str(evaldata / "pdfs/real/debian-policy.pdf")))
    expected = (evaldata / "books/txt/debian-policy.txt").read_text("utf-8")
    found = compare(document_text(document), expected)
    assert found.found_share >= 0.929 and found.found_share + found.moved_share >= 0.9945
    assert found.extra_share <= 0.005


def test_the_command_prints_shares_and_json(tmp_path: Path) -> None:
    pdf, text = str(SAMPLES / "us_constitution.pdf"), str(SAMPLES / "us_constitution.txt")
    command = [sys.executable, "-m", "longread", "inspect", pdf, "--against", text]
    done = subprocess.run([*command, "--json"], capture_output=True, text=True)
    record = json.loads(done.stdout)
    assert record["found_share"] == 1.0 and record["extra_share"] == 0.0 and record["version"] == 1
    assert record["differences"] == []
    changed = tmp_path / "changed.txt"
    changed.write_text(TEXT.replace("perfect", "perfect and lasting", 1), "utf-8")
    command[-1] = str(changed)
    done = subprocess.run([*command, "-v"], capture_output=True, text=True)
    assert re.search(r"(?m)^missing +2 +- +\d+  and lasting$", done.stdout)
    done = subprocess.run([*command, "--page", "1"], capture_output=True, text=True)
    assert done.returncode == 2 and "--against" in done.stderr
