"""Reading documents in the test's own process, for tests that are not about child processes."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator, Sequence

import pytest

from longread import formats, pdf, reader_child
from longread.reader_pool import Reply


class InlineWorkers:
    """Takes the place of Workers: the same jobs and replies, by JSON, without processes."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._open_job: Reply = {}

    def __enter__(self) -> InlineWorkers:
        return self

    def __exit__(self, *exc_info: object) -> None:
        return

    def open(self, password: str | None) -> Reply:
        self._open_job = {"do": "open", "password": password}
        return self.run(self._open_job)

    def run(self, job: Reply) -> Reply:
        return self._serve([job])[-1]

    def read(self, page_indices: Sequence[int], first: str) -> Iterator[tuple[int, Reply]]:
        jobs = [{"do": "page", "page": page_idx, "first": first} for page_idx in page_indices]
        yield from enumerate(self._serve([self._open_job, *jobs])[1:])

    def _serve(self, jobs: Sequence[Reply]) -> list[Reply]:
        lines = b"".join(json.dumps(job).encode() + b"\n" for job in jobs)
        replies = io.BytesIO()
        reader_child.serve(self._data, io.BytesIO(lines), replies)
        return [json.loads(line) for line in replies.getvalue().splitlines()]


@pytest.fixture(autouse=True)
def inline_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    """Import it into a test file to use it there."""
    for module in (pdf, formats):
        monkeypatch.setattr(module, "Workers", InlineWorkers)
