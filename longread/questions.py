"""Questions from a file: a line each, or a JSON object a line with `question` and an `id`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass

from longread.errors import UsageError
from longread.plain_text import clean, one_line

_SHOWN_LEN = 60


@dataclass(frozen=True)
class ListedQuestion:
    """number: its place among the questions, from 1, which is its id where it has no other."""

    number: int
    id: str | int
    text: str


def parse_questions(source: str, data: bytes) -> list[ListedQuestion]:
    """The questions of a file's bytes; blank lines count for nothing.

    The first line that is not blank decides: where it begins with {, each is JSON. Raises
    UsageError, with the line, for what is no question and for an id that comes twice.
    """
    name = f"--questions {one_line(source)}"
    try:
        text = data.decode("utf-8-sig")
    except ValueError:
        raise UsageError(f"{name} is not text in UTF-8") from None
    found: list[ListedQuestion] = []
    lines_of: dict[str, int] = {}
    is_json = text.lstrip().startswith("{")
    for line_number, line in _filled_lines(text):
        where, number = f"{name}, line {line_number}", len(found) + 1
        question = _from_json(where, number, line) if is_json else _plain(number, line)
        if not question.text:
            raise UsageError(f"{where}: the question is empty")
        before = lines_of.setdefault(str(question.id), line_number)
        if before != line_number:
            shown = one_line(str(question.id), _SHOWN_LEN)
            raise UsageError(f"{where}: the id {shown} is that of line {before} already")
        found.append(question)
    if not found:
        raise UsageError(f"{name} holds no question; give one a line")
    return found


def _filled_lines(text: str) -> Iterator[tuple[int, str]]:
    """The lines that are not blank, with their numbers from 1."""
    for number, line in enumerate(text.replace("\r\n", "\n").replace("\r", "\n").split("\n"), 1):
        if clean(line).strip():
            yield number, line


def _plain(number: int, line: str) -> ListedQuestion:
    return ListedQuestion(number, number, clean(line).strip())


def _from_json(where: str, number: int, line: str) -> ListedQuestion:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        raise UsageError(f"{where}: it is not JSON, as the first line is") from None
    text = record.get("question") if isinstance(record, dict) else None
    if not isinstance(text, str):
        raise UsageError(f'{where}: it has no "question", which is a text')
    own_id = record.get("id", number)
    if not isinstance(own_id, str | int) or isinstance(own_id, bool):
        raise UsageError(f"{where}: an id is a text or a whole number")
    if isinstance(own_id, str):
        own_id = clean(own_id)
    return ListedQuestion(number, own_id, clean(text).strip())
