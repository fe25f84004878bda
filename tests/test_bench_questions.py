"""`bench questions`: what it asks and reports."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from last_event import last_event
from test_ask_listed import cli as cli  # the fixture
from test_cli import Cli, last_error

from longread.bench import questions
from longread.config import Settings
from longread.session import Session


def test_every_count_answers_the_same_questions(settings: Settings, tmp_path: Path) -> None:
    document = tmp_path / "document.txt"
    document.write_text("The captain is Voss. The ship is the Nerissa. " * 20)
    session = Session(replace(settings, max_tokens=4))
    last_event(session.open([str(document)]))
    found = list(questions.run(session, [1, 3], ["Who?", "What?"], 5, warm_up=True))
    assert [figure.at_once for figure in found] == [1, 3]
    for figure in found:
        assert figure.num_questions == figure.same == 5
        assert 5 <= figure.answer_tokens <= 20
        assert figure.tokens_per_s == pytest.approx(figure.answer_tokens / figure.seconds)
        assert figure.questions_per_min == pytest.approx(300 / figure.seconds)
    assert found[0].answer_tokens == found[1].answer_tokens


def test_a_table_and_a_line_of_json(cli: Cli) -> None:
    words = ("--questions", "q.txt", "--at-once", "1,2", "--count", "2", "--device", "cpu")
    result = cli("bench", "questions", "book.txt", *words)
    assert result.code == 0
    *table, line = result.out.splitlines()
    assert table[0].split() == ["at_once", "s", "tokens/s", "questions/min", "speed", "same"]
    assert [row.split()[0] for row in table[1:]] == ["1", "2"]
    figures = json.loads(line)["figures"]
    assert [figure["at_once"] for figure in figures] == [1, 2]
    assert figures[1]["same"] == 2 and figures[1]["answer_tokens"] == 10
    assert sorted(cli.fake.last.asked) == ["When?", "When?", "Who?", "Who?"]


def test_a_question_that_does_not_fit_is_an_error(cli: Cli) -> None:
    result = cli("bench", "questions", "book.txt", "--questions", "q.txt", "--device", "cpu")
    assert (result.code, result.out) == (2, "")
    assert "question 3 is not answered: too long" in last_error(result)
    assert "--at-once takes whole" in last_error(cli("bench", "questions", "b", "--at-once", "x"))
