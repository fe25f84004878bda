"""Progress on one stream: a bar on a terminal, and a line now and then anywhere else."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, TextIO

from longread.events import Progress
from longread.plain_text import size_text

if TYPE_CHECKING:
    import rich.progress

STAGE_NAMES = {
    "download": "fetching the model",
    "convert": "converting the model",
    "pack": "packing the weights",
    "load": "loading the model",
    "read": "reading pages",
    "tokenize": "counting tokens",
    "restore": "restoring the cache",
    "prefill": "reading the document",
    "save": "saving the cache",
    "train": "training the predictor",
}
PLAIN_INTERVAL_S = 10.0


def stage_name(progress: Progress) -> str:
    """Return what the user is told is going on."""
    return STAGE_NAMES.get(progress.stage, progress.stage)


def amount_text(progress: Progress) -> str:
    """Return `4,096 of 10,214 tokens`, or sizes for bytes."""
    if progress.unit == "bytes":
        return f"{size_text(progress.done)} of {size_text(progress.total)}"
    return f"{progress.done:,} of {progress.total:,} {progress.unit}"


class PlainProgress:
    """Lines for logs and pipes: none for quick stages, one each ten seconds, one at the end."""

    def __init__(self, stream: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream = stream
        self._clock = clock
        self._stage = ""
        self._last_s = 0.0
        self._told = False

    def update(self, progress: Progress) -> None:
        """Take note of a report and print a line where one is due."""
        now_s = self._clock()
        if progress.stage != self._stage:
            self._stage, self._last_s, self._told = progress.stage, now_s, False
            return
        finished = progress.done >= progress.total
        if now_s - self._last_s >= PLAIN_INTERVAL_S or (finished and self._told):
            with suppress(OSError):  # a log that is full or gone
                self._stream.write(f"longread: {stage_name(progress)}: {amount_text(progress)}\n")
                self._stream.flush()
            self._last_s, self._told = now_s, not finished

    def stop(self) -> None:
        """Forget the stage; lines stay as they are."""
        self._stage = ""


class BarProgress:
    """One rich bar for the stage at work, gone when it stops."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._bars: rich.progress.Progress | None = None
        self._tasks: dict[str, rich.progress.TaskID] = {}

    def update(self, progress: Progress) -> None:
        """Move the stage's bar; a finished stage hides."""
        bars = self._bars or self._start()
        task = self._tasks.get(progress.stage)
        if task is None:
            task = bars.add_task(stage_name(progress), total=progress.total, amount="")
            self._tasks[progress.stage] = task
        bars.update(
            task,
            completed=progress.done,
            total=progress.total,
            amount=amount_text(progress),
            visible=progress.done < progress.total,
        )

    def stop(self) -> None:
        """Clear the bars off the terminal."""
        if self._bars is not None:
            self._bars.stop()
        self._bars = None
        self._tasks = {}

    def _start(self) -> rich.progress.Progress:
        from rich.console import Console
        from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as Bars

        self._bars = Bars(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            TextColumn("{task.fields[amount]}", markup=False),
            TimeRemainingColumn(compact=True),
            console=Console(file=self._stream),
            transient=True,
        )
        self._bars.start()
        return self._bars


class NoProgress:
    """Shows nothing, for --quiet."""

    def update(self, progress: Progress) -> None:
        """Take no note."""

    def stop(self) -> None:
        """Have nothing to stop."""


ProgressView = PlainProgress | BarProgress | NoProgress
