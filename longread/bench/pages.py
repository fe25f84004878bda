"""Pages a second of reading documents, with the memory of the processes that read.

What is timed is `document.extract`, as the first `ask` of a file does it: child processes started,
every page read, the text put into its normal form. No model, no store.
"""

from __future__ import annotations

import os
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from longread.document import document_text, extract, read_source
from longread.errors import LongreadError
from longread.pdf import Password

_SAMPLE_S = 0.01
_PROC = Path("/proc")


@dataclass(frozen=True)
class PagesTimes:
    """One document. Memory is None where the system has no /proc to read it from."""

    name: str
    num_pages: int
    num_chars: int
    read_s: tuple[float, ...]  # each run's
    num_processes: int | None  # that read, beside this one
    peak_bytes: int | None  # resident, the sum of their peaks: the most of any run

    @property
    def pages_per_s(self) -> float:
        """Of the run in the middle."""
        return self.num_pages / median(self.read_s)


def run(source: str, repeats: int = 3, *, password: Password = None) -> PagesTimes:
    """Read the document `repeats` times. Raises what `extract` does, LongreadError if texts differ.

    The processes' peaks are read while they run, every 10 ms, so a peak in the last moment before
    one ends can be missed.
    """
    raw = read_source(source)
    read_s = []
    num_processes = peak_bytes = num_pages = 0
    texts = set()
    for _ in range(repeats):
        with _Watch() as watch:
            started = time.perf_counter()
            document = extract(raw, password=password)
            read_s.append(time.perf_counter() - started)
        num_processes = max(num_processes, len(watch.peaks))
        peak_bytes = max(peak_bytes, sum(watch.peaks.values()))
        num_pages = len(document.pages)
        texts.add(document_text(document))
    if len(texts) != 1:
        raise LongreadError(f"{raw.source} reads differently each time: nothing is reported")
    return PagesTimes(
        raw.name,
        num_pages,
        len(texts.pop()),
        tuple(read_s),
        num_processes if _PROC.is_dir() else None,
        peak_bytes if _PROC.is_dir() else None,
    )


class _Watch:
    """Looks at this process's children while the `with` block runs; peaks: pid to bytes."""

    def __init__(self) -> None:
        self.peaks: dict[int, int] = {}
        self._before = _children()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="longread-watch", daemon=True)

    def __enter__(self) -> _Watch:
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(_SAMPLE_S):
            for pid in _children() - self._before:
                peak = _peak_bytes(pid)
                if peak is not None:
                    # The last one counts: before it runs another program, a child is a copy of us.
                    self.peaks[pid] = peak


def _children() -> set[int]:
    """Process ids of all threads' children; empty without /proc."""
    found: set[int] = set()
    for path in (_PROC / str(os.getpid()) / "task").glob("*/children"):
        try:
            found.update(int(pid) for pid in path.read_text().split())
        except OSError:
            continue  # the thread ended
    return found


def _peak_bytes(pid: int) -> int | None:
    """The highest resident memory so far; None where the process has none, or ended."""
    try:
        status = (_PROC / str(pid) / "status").read_text()
    except OSError:
        return None
    for line in status.splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return None
