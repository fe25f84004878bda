"""`longread ask --questions FILE`: many questions, and a JSON line for each, in their order."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from longread.answer_lines import AnswerLines, answer_file, run_key
from longread.errors import UsageError
from longread.events import Notice
from longread.output_file import output_path
from longread.plain_text import json_text, one_line
from longread.questions import ListedQuestion, parse_questions
from longread.render import opened_line
from longread.schema import answer_line

if TYPE_CHECKING:
    from longread.commands.run import Run

_SHOWN_QUESTION_LEN = 200


def ask_listed(
    run: Run,
    sources: list[str],
    file: str,
    out: str | None,
    *,
    pages: str | None,
    password: str | None,
    name: str | None,
    with_selected: bool,
) -> None:
    """Answer the questions of `file`, on standard output or in the file `out`, in their order.

    name: of a session, in which each question follows the one before.
    """
    if not sources and name is None:
        raise UsageError("no document is named: all words before --questions are documents")
    questions = read_questions(file, sources)
    conversation = run.converse(sources, pages=pages, password=password, name=name)
    matter = conversation.matter
    if out is not None and not all(matter.sha256s):
        raise UsageError("what comes from a pipe cannot be asked again: leave --out out")
    key = run_key(matter, conversation.settings, name)
    screen = run.screen
    with _lines(run, out, [file, *matter.sources], key, questions) as lines:
        todo = [(item.number, item.text) for item in questions if item.number not in lines.kept]
        num_done = len(lines.kept)
        if out is not None and num_done:
            screen.note(
                f"longread: {num_done:,} of {len(questions):,} answers are in {out} already"
            )
        if not todo:
            return
        screen.note(f"longread: {opened_line(run.open(conversation))}")
        try:
            for answered in conversation.ask_each(todo):
                question = questions[answered.number - 1]
                record = answer_line(key, question, answered, with_selected=with_selected)
                lines.put(question.number, json_text(record))
                num_done += 1
                shown = one_line(question.text, _SHOWN_QUESTION_LEN)
                screen.note(f"longread: {num_done:,} of {len(questions):,} answered: {shown}")
        except KeyboardInterrupt:
            screen.notice(Notice(_interrupted(num_done, len(questions), out)))
            raise typer.Exit(130) from None
    conversation.session.close()


def read_questions(source: str, documents: Sequence[str]) -> list[ListedQuestion]:
    """The questions of a file, or of standard input (-). Raises UsageError."""
    if source == "-" and "-" in documents:
        raise UsageError("standard input (-) cannot be the document and the questions at once")
    try:
        data = sys.stdin.buffer.read() if source == "-" else Path(source).read_bytes()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise UsageError(f"--questions {one_line(source)} cannot be read: {reason}") from None
    return parse_questions(source, data)


@contextmanager
def _lines(
    run: Run,
    out: str | None,
    sources: Sequence[str],
    key: str,
    questions: Sequence[ListedQuestion],
) -> Iterator[AnswerLines]:
    """The lines of the file `out`, or of standard output, which are all written at the end."""
    if out is not None:
        with answer_file(output_path(out, sources), key, questions) as lines:
            yield lines
        return

    def write(line: str) -> None:
        run.screen.out.write(line)
        run.screen.out.flush()

    lines = AnswerLines(write)
    try:
        yield lines
    finally:
        lines.finish()


def _interrupted(num_done: int, num_questions: int, out: str | None) -> str:
    again = "" if out is None else "; the same command goes on from there"
    return f"interrupted; {num_done:,} of {num_questions:,} questions are answered{again}"
