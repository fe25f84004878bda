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


class _Errand:
    """A question to the iterating thread, for which the worker waits."""

    def __init__(self, call: Callable[[], object]) -> None:
        self._call = call
        self._answers: queue.SimpleQueue[tuple[bool, object]] = queue.SimpleQueue()

    def run(self) -> None:
        """In the iterating thread."""
        answered, answer = False, None
        try:
            answer = self._call()
            answered = True
        finally:
            self._answers.put((answered, answer))

    def wait(self) -> object:
        """In the worker; InterruptedByUser where the call raised, which ends the iteration."""
        while True:  # in slices, so that an interruption of the worker comes through
            try:
                answered, answer = self._answers.get(timeout=0.2)
                break
            except queue.Empty:
                pass
        if not answered:
            raise InterruptedByUser("interrupted")
        return answer


class Live:
    """What a call has of the thread that iterates."""

    def __init__(self, events: queue.SimpleQueue[Event | _Errand | None]) -> None:
        self._events = events

    def emit(self, event: Event) -> None:
        """Hand over an event."""
        self._events.put(event)

    def ask(self, call: Callable[[], T]) -> T:
        """Run `call` in the iterating thread, as a prompt on the terminal must be, and wait."""
        errand = _Errand(call)
        self._events.put(errand)
        return errand.wait()  # type: ignore[return-value]


def live(call: Callable[[Live], T]) -> Generator[Event, None, T]:
    """Yield what `call` emits, then return its result or raise what it raised.

    Closing the generator, or an exception thrown into it, raises InterruptedByUser in the worker
    at its next step of Python, and waits until it has ended.
    """
    events: queue.SimpleQueue[Event | _Errand | None] = queue.SimpleQueue()
    results: list[T] = []
    failures: list[BaseException] = []

    def run() -> None:
        try:
            results.append(call(Live(events)))
        except BaseException as error:  # carried to the iterating thread
            failures.append(error)
        finally:
            events.put(None)

    worker = threading.Thread(target=run, name="longread-worker", daemon=True)
    worker.start()
    try:
        while (event := events.get()) is not None:
            if isinstance(event, _Errand):
                event.run()
            else:
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
