"""Child processes that read documents: started, asked, timed, and always ended.

Owns the parent's side: one thread a child, limits on time and memory, and a clean end also when
the reading is interrupted. What a child says is JSON, so that a child gone wrong can only lie.
"""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

MEMORY_LIMIT = 2 << 30  # bytes of address space of a child, and four times the file's own
OPEN_LIMIT_S = 60.0
PAGE_LIMIT_S = 20.0  # for both engines; then once more for the second alone
CPU_LIMIT_S = 3600
MAX_RESTARTS = 8  # of one reading; a file that ends more children is given up
_PAGES_A_WORKER = 24  # fewer are not worth another process
_MAX_WORKERS = 4
_TICK_S = 0.1
_CODE = (
    "import sys; sys.path.insert(0, sys.argv[1]); from longread.reader_child import main; main()"
)
_PACKAGE_PARENT = str(Path(__file__).resolve().parent.parent)

Reply = dict[str, Any]


class Worker:
    """One child with the file. Only one thread talks to it; another may end it."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._deadline: float | None = None
        self._timed_out = False
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()  # of starting and ending
        self._ended = False

    def ask(self, job: dict[str, Any], limit_s: float) -> Reply:
        """The child's reply; `state` is `died` where it took too long, crashed or was ended."""
        self._timed_out = False
        self._deadline = time.monotonic() + limit_s
        reply: Reply | None = None
        try:
            process = self._start()
            if process is not None and process.stdin and process.stdout:
                process.stdin.write(json.dumps(job).encode() + b"\n")
                process.stdin.flush()
                line = process.stdout.readline()
                if line.endswith(b"\n"):
                    reply = json.loads(line)
        except (OSError, ValueError):
            pass  # a child that ended breaks the pipe
        finally:
            self._deadline = None
        if reply is not None:
            return reply
        self.kill()
        why = (
            f"it took more than {limit_s:.0f} s" if self._timed_out else "the reader crashed on it"
        )
        return {"state": "died", "reason": why}

    def is_running(self) -> bool:
        """Whether there is a child; one that died is started anew, unopened, by the next job."""
        return self._process is not None

    def check_time(self) -> None:
        """End a child that is over its time; called by the thread that watches."""
        deadline = self._deadline
        if deadline is not None and time.monotonic() > deadline:
            self._timed_out = True
            with self._lock:
                if self._process is not None:
                    self._process.kill()

    def kill(self, *, for_good: bool = False) -> None:
        """End the child and wait for it, so that none is left behind."""
        with self._lock:
            self._ended = self._ended or for_good
            process, self._process = self._process, None
        if process is None:
            return
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            with suppress(OSError):
                if pipe is not None:
                    pipe.close()

    def _start(self) -> subprocess.Popen[bytes] | None:
        with self._lock:
            if self._ended:
                return None
            if self._process is not None:
                return self._process
            self._process = process = subprocess.Popen(
                [sys.executable, "-P", "-c", _CODE, _PACKAGE_PARENT],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
            )
        length = len(self._data)
        memory = MEMORY_LIMIT + 4 * length
        header = {"length": length, "memory": memory, "cpu_s": CPU_LIMIT_S}
        assert process.stdin is not None
        process.stdin.write(json.dumps(header).encode() + b"\n")
        process.stdin.write(self._data)
        return process


class Workers:
    """The children of one reading; leaving the `with` block ends them, whatever happened."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._workers = [Worker(data)]
        self._threads: list[threading.Thread] = []
        self._stop = threading.Event()
        self._num_deaths = 0
        self._password: str | None = None

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stop.set()
        for worker in self._workers:
            worker.kill(for_good=True)
        for thread in self._threads:
            thread.join()

    def open(self, password: str | None) -> Reply:
        """Open a PDF in the first child."""
        self._password = password
        return self.run({"do": "open", "password": password})

    def run(self, job: dict[str, Any]) -> Reply:
        """What the first child makes of a job that takes the whole file."""
        replies: queue.SimpleQueue[Reply] = queue.SimpleQueue()
        self._spawn(lambda: replies.put(self._workers[0].ask(job, OPEN_LIMIT_S)))
        return self._next(replies)

    def read(self, page_indices: Sequence[int], first: str) -> Iterator[tuple[int, Reply]]:
        """The pages' replies as they come, in any order, each with its place in `page_indices`."""
        num_workers = min(_num_cpus(), _MAX_WORKERS, 1 + len(page_indices) // _PAGES_A_WORKER)
        while len(self._workers) < num_workers:
            self._workers.append(Worker(self._data))
        places = iter(enumerate(page_indices))
        lock = threading.Lock()
        replies: queue.SimpleQueue[tuple[int, Reply]] = queue.SimpleQueue()

        def run(worker: Worker) -> None:
            while not self._stop.is_set():
                with lock:
                    item = next(places, None)
                if item is None:
                    return
                replies.put((item[0], self._page(worker, item[1], first)))

        for worker in self._workers:
            self._spawn(lambda worker=worker: run(worker))  # type: ignore[misc]
        for _ in page_indices:
            yield self._next(replies)

    def _page(self, worker: Worker, page_idx: int, first: str) -> Reply:
        reply: Reply = {}
        # A page that ends the child is tried once more, with the second engine first.
        for engine in (first, "pypdfium2 alone"):
            if not worker.is_running():
                if self._num_deaths > MAX_RESTARTS:
                    return {"state": "died", "reason": "other pages took too long or crashed"}
                quick = first != "pypdf"
                job = {"do": "open", "password": self._password, "quick": quick}
                opened = worker.ask(job, OPEN_LIMIT_S)
                if opened["state"] != "open":
                    return opened
            reply = worker.ask({"do": "page", "page": page_idx, "first": engine}, PAGE_LIMIT_S)
            if reply["state"] != "died":
                break
            self._num_deaths += 1
        return reply

    def _spawn(self, run: Callable[[], None]) -> None:
        thread = threading.Thread(target=run, name="longread-reader", daemon=True)
        self._threads.append(thread)
        thread.start()

    def _next(self, replies: queue.SimpleQueue[Any]) -> Any:
        """The next item; the wait is in short steps, for interrupts and for the children's time."""
        while True:
            try:
                return replies.get(timeout=_TICK_S)
            except queue.Empty:
                for worker in self._workers:
                    worker.check_time()


def _num_cpus() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
