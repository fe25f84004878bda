"""First and second `ask` of one document as a user meets them: whole processes, timed outside.

The first run starts from an empty cache, the second finds what it left. What is timed is the time
from the start of the process to the first byte of the answer.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from longread.errors import LongreadError
from longread.store import Store


@dataclass(frozen=True)
class AskTimes:
    """Seconds from the start of the process."""

    first_token_s: float
    total_s: float
    answer: str


def run(
    source: str, question: str, flags: Sequence[str] = (), repeats: int = 3
) -> tuple[AskTimes, list[AskTimes]]:
    """Ask once with an empty cache, then `repeats` times from it.

    flags: options for `longread ask`. Raises LongreadError with the child's message if it fails.
    """
    with tempfile.TemporaryDirectory(prefix="longread-bench-") as cache_dir:
        command = [sys.executable, "-m", "longread", "ask", "--cache-dir", cache_dir]
        command += ["--quiet", *flags, "--", source, question]
        first = _timed(command)
        states = [entry.state for entry in Store(Path(cache_dir), 1 << 62).list_entries()]
        if states != ["complete"]:
            raise LongreadError("the first run left no cache (no_cache?): nothing is reported")
        later = [_timed(command) for _ in range(repeats)]
        if any(times.answer != first.answer for times in later):
            raise LongreadError("an answer from the cache differs: nothing is reported")
        return first, later


def _timed(command: Sequence[str]) -> AskTimes:
    started = time.perf_counter()
    child = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0
    )
    assert child.stdout is not None, "stdout is a pipe"
    first = child.stdout.read(1)
    first_token_s = time.perf_counter() - started
    rest, errors = child.communicate()
    total_s = time.perf_counter() - started
    if child.returncode != 0:
        raise LongreadError(f"the timed run failed: {errors.decode(errors='replace').strip()}")
    return AskTimes(first_token_s, total_s, (first + rest).decode(errors="replace").strip())
