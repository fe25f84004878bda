"""Progress of a call that reports through a callback, as a generator of events.

The call runs in a worker thread; whoever iterates sees its events at once. Ctrl-C lands in the
iterating thread, which passes it on, so that the worker's own clean-up runs.
"""

from __future__ import annotations

import ctypes
import queue
import threading
from collections.abc import Callable, Generator
from typing import TypeVar

from longread.errors import InterruptedByUser
from longread.events import Event

T = TypeVar("T")
Emit = Callable[[Event], None]


def live(call: Callable[[Emit], T]) -> Generator[Event, None, T]:
    """Yield what `call(emit)` emits, then return its result or raise what it raised.

    Closing the generator, or an exception thrown into it, raises InterruptedByUser in the worker
    at its next step of Python, and waits until it has ended.
    """
    events: queue.SimpleQueue[Event | None] = queue.SimpleQueue()
    results: list[T] = []
    failures: list[BaseException] = []

    def run() -> None:
        try:
            results.append(call(events.put))
        except BaseException as error:  # carried to the iterating thread
            failures.append(error)
        finally:
            events.put(None)

    worker = threading.Thread(target=run, name="longread-worker", daemon=True)
    worker.start()
    try:
        while (event := events.get()) is not None:
            yield event
    except BaseException:
        assert worker.ident is not None, "the worker was started"
        ctypes.pythonapi.PyThreadState_SetAsyncExc(
            ctypes.c_ulong(worker.ident), ctypes.py_object(InterruptedByUser)
        )
        raise
    finally:
        worker.join()
    if failures:
        raise failures[0]
    return results[0]
