"""Where an answer leaves dense's: the token and the line, stored, in tables and as JSON."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from test_cells import KEY, RUN, result

from longread.evaluate import tables
from longread.evaluate.cells import Cell, Place
from longread.evaluate.divergence import compare, first_difference
from longread.evaluate.groups import groups

DENSE_KEY = replace(KEY, policy="dense", variant="dense", fields=(), budget="")
LINES = "13. Amy: 21\n14. Ben: 35\n15. Eva: 47"


def encode(text: str) -> list[int]:
    """A token a character."""
    return [ord(char) for char in text]


@pytest.mark.parametrize(
    ("answer", "expected"),
    (
        (LINES, None),
        (LINES.replace("35", "36"), Place(22, 2)),
        ("1" + LINES[2:], Place(1, 1)),
        (LINES + "\n16. Ida: 3", Place(len(LINES), 3)),
        (LINES[:11], Place(11, 1)),
        (LINES[:12], Place(12, 2)),
        ("", Place(0, 1)),
    ),
)
def test_the_first_token_that_differs(answer: str, expected: Place | None) -> None:
    assert first_difference(answer, LINES, encode) == expected


def test_texts_of_the_same_tokens_are_equal() -> None:
    assert (
        first_difference("a b", "a  b", lambda text: [ord(char) for char in text.split()]) is None
    )


def _cell(key: object, *answers: str) -> Cell:
    cell = Cell(key, [RUN])  # type: ignore[arg-type]
    for number, answer in enumerate(answers):
        cell.results[number] = replace(result(number, 1.0), answers=(answer,))
    return cell


def test_places_are_stored_and_shown() -> None:
    dense = _cell(DENSE_KEY, LINES, LINES, LINES)
    own = _cell(KEY, LINES, LINES.replace("35", "36"), LINES.replace("47", "4"), LINES)
    assert compare(own, dense, encode) == [0, 1, 2]  # dense has not answered the fourth
    assert compare(own, dense, encode) == []
    assert [own.results[n].places for n in range(4)] == [
        (None,),
        (Place(22, 2),),
        (Place(34, 3),),
        (),
    ]
    stored = json.loads(own.to_json())["samples"]
    assert [sample.get("differs") for sample in stored] == [[None], [[22, 2]], [[34, 3]], None]
    assert Cell.from_json(own.to_json()).results == own.results
    assert "differs" not in dense.to_json()

    (group,) = groups([own, dense])
    table = tables.divergence_table(group, "vt")
    assert table in tables.tables(group)
    assert table is not None and table.head == ("", "tokenselect:vote=none 5%")
    assert table.rows == (
        ("answers as dense's", "1 of 3"),
        ("tokens as dense's, median", "34"),
        ("tokens as dense's, least", "22"),
        ("first other line, median", "3"),
    )
    told = tables.summary(group)["variants"]
    assert isinstance(told, list)
    assert "first_differences" not in told[0]["tasks"]["vt"]
    assert told[1]["tasks"]["vt"]["first_differences"] == [
        {"sample": 0, "question": 0, "tokens": None},
        {
            **{"sample": 1, "question": 0, "tokens": 22, "line": 2},
            **{"text": "14. Ben: 36", "dense_text": "14. Ben: 35"},
        },
        {
            **{"sample": 2, "question": 0, "tokens": 34, "line": 3},
            **{"text": "15. Eva: 4", "dense_text": "15. Eva: 47"},
        },
    ]


def test_answers_that_are_denses_all_through() -> None:
    dense, own = _cell(DENSE_KEY, LINES, LINES), _cell(KEY, LINES, LINES)
    compare(own, dense, encode)
    (group,) = groups([own, dense])
    table = tables.divergence_table(group, "vt")
    assert table is not None and [row[1] for row in table.rows] == ["2 of 2", "all", "all", "all"]
    (group,) = groups([dense])
    assert tables.divergence_table(group, "vt") is None


def test_cells_are_compared_with_what_was_read_in_the_same_way() -> None:
    near, far = _cell(DENSE_KEY, "a"), _cell(replace(DENSE_KEY, context="yarn"), "b")
    variants = [_cell(replace(KEY, context=context), "c") for context in ("yarn", "select")]
    (group,) = groups([near, far, *variants])
    names = [cell.key.name for cell in variants]
    assert group.pairs(names[0]) == [(variants[0], far)]
    assert group.pairs(names[1]) == [(variants[1], near)]
    assert group.pairs("dense") == group.pairs("dense[yarn]") == []
