"""`bench pages`: what it counts, and the line of JSON at its end."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from small_pdf import make_writer, show, to_bytes

from longread.bench import pages
from longread.errors import DocumentError, LongreadError


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "book.pdf"
    path.write_bytes(to_bytes(make_writer(show(f"This is page {i}.") for i in range(30))))
    return path


def test_pages_processes_and_memory_are_counted(source: Path) -> None:
    times = pages.run(str(source), repeats=2)
    assert (times.name, times.num_pages, len(times.read_s)) == ("book.pdf", 30, 2)
    low, high = sorted(30 / read_s for read_s in times.read_s)
    assert low <= times.pages_per_s <= high
    if Path("/proc/self/status").exists():
        assert times.num_processes in (1, 2)
        assert times.peak_bytes is not None and 10e6 < times.peak_bytes < 1e9


def test_without_proc_there_is_no_memory(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "_PROC", source.parent / "none")
    times = pages.run(str(source), repeats=1)
    assert times.num_processes is None and times.peak_bytes is None


def test_a_text_that_changes_is_not_reported(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = iter(["one", "two"])
    monkeypatch.setattr(pages, "document_text", lambda document: next(texts))
    with pytest.raises(LongreadError, match="differently"):
        pages.run(str(source), repeats=2)


def test_the_command_prints_a_table_and_json(source: Path) -> None:
    command = [sys.executable, "-m", "longread", "bench", "pages", "--repeats", "1"]
    done = subprocess.run([*command, str(source)], capture_output=True, text=True)
    *table, last = done.stdout.splitlines()
    assert table[0].split() == ["document", "pages", "pages/s", "processes", "peak"]
    (record,) = json.loads(last)["documents"]
    assert record["num_pages"] == 30 and record["pages_per_s"] > 0
    done = subprocess.run([*command, str(source) + "x"], capture_output=True, text=True)
    assert done.returncode == DocumentError.exit_code and done.stderr.count("\n") == 1
