"""Answers as JSON lines in the order of their questions, and a file of them that is gone on with.

Answers come in any order and wait for those before them. What documents, settings and model come
to stands in each line as `run`, so that a file of other ones is not mixed up with these.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from longread.config import Settings
from longread.conversation import Matter
from longread.disk import disk_errors_with
from longread.errors import StoreError, UsageError
from longread.history import answer_settings
from longread.plain_text import json_text
from longread.questions import ListedQuestion
from longread.schema import line_head

_MORE_SETTINGS = ("policy", "budget", "vote", "index", "truncate")


def run_key(matter: Matter, settings: Settings, session_name: str | None) -> str:
    """What besides a question decides its answer, as 16 hex digits."""
    model = settings.model
    parts = {
        "documents": matter.sha256s,
        # Of several documents the model is told the names.
        "names": [os.path.basename(source) for source in matter.sources[1:] and matter.sources],
        "pages": matter.pages,
        "model": os.path.abspath(model) if os.path.exists(model) else model,
        "settings": answer_settings(settings),
        "more": {name: getattr(settings, name) for name in _MORE_SETTINGS},
        "session": session_name,
    }
    text = json.dumps(parts, sort_keys=True, default=str)
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()[:16]


class AnswerLines:
    """Writes lines, each in the order of its question's number, from 1 on."""

    def __init__(
        self,
        write: Callable[[str], object],
        num_there: int = 0,
        waiting: Mapping[int, str] | None = None,
    ) -> None:
        """num_there: lines that are written already; waiting: such as are known behind them."""
        self._write = write
        self._next = num_there + 1
        self._waiting = dict(waiting or {})
        self.kept = frozenset((*range(1, self._next), *self._waiting))

    def put(self, number: int, line: str) -> None:
        """Take in a line, and write what waited for it as well."""
        self._waiting[number] = line
        while self._next in self._waiting:
            self._next += 1
            # Taken out first: interrupted here a line is asked for again, and never comes twice.
            self._write(self._waiting.pop(self._next - 1) + "\n")

    def finish(self) -> None:
        """Write what still waits for lines that do not come."""
        for number in sorted(self._waiting):
            self._write(self._waiting.pop(number) + "\n")


@contextmanager
def answer_file(path: Path, run: str, questions: Sequence[ListedQuestion]) -> Iterator[AnswerLines]:
    """The file's lines, of which those that are there are kept; one process at a time has it.

    A last line that was cut goes. Raises UsageError for a file of other documents, settings or
    questions, or of none, and StoreError where it cannot be written.
    """
    with _disk_errors("write", path):
        fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    with os.fdopen(fd, "r+b", buffering=0) as file:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise UsageError(f"{path} is no plain file; name another, or leave --out out")
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise StoreError(f"another run writes to {path}; wait for it") from None

        def write(line: str) -> None:
            with _disk_errors("write", path):
                data = line.encode()
                while data:
                    data = data[os.write(fd, data) :]

        with _disk_errors("read", path):
            num_there, end, waiting = _kept_lines(path, file, run, questions)
            file.truncate(end)
            file.seek(end)
        lines = AnswerLines(write, num_there, waiting)
        try:
            yield lines
        finally:
            lines.finish()


def _kept_lines(
    path: Path, file: Iterable[bytes], run: str, questions: Sequence[ListedQuestion]
) -> tuple[int, int, dict[int, str]]:
    """How many lines from the first question on there are, where they end, and those behind."""
    head = json_text(line_head(run))[:-1]
    by_id = {question.id: question for question in questions}
    num_there, end, waiting, last = 0, 0, dict[int, str](), 0
    for line_number, data in enumerate(file, 1):
        line = data.decode(errors="replace")
        if not line.startswith(head[: len(line)]):
            raise UsageError(
                f"{path}, line {line_number}, is no answer of these documents, settings and model: "
                "name another file, or remove that one"
            )
        if not line.endswith("\n"):
            break  # it was cut
        try:
            record = json.loads(line)
            question = by_id[record["id"]]
            is_next = question.number > last and question.text == record["question"]
        except (ValueError, KeyError, TypeError, RecursionError):
            is_next = False
        if not is_next:
            raise UsageError(
                f"{path}, line {line_number}, answers another question than the file of questions "
                "has there: name another file, or remove that one"
            )
        last = question.number
        if last == num_there + 1:
            num_there, end = last, end + len(data)
        else:
            waiting[last] = line.rstrip("\n")
    return num_there, end, waiting


def _disk_errors(action: str, path: Path) -> AbstractContextManager[None]:
    return disk_errors_with(
        action,
        path,
        if_full="free some space and run the same command again: the answers there stay",
        otherwise="name another file with --out",
    )
