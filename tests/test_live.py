"""Events of a working thread: order, results, failures, interruption."""

from __future__ import annotations

import threading
import time

import pytest

from longread.errors import InterruptedByUser, ModelError
from longread.events import Notice
from longread.live import Live, live


def test_events_come_in_order_and_the_result_last() -> None:
    def call(live_: Live) -> int:
        for i in range(5):
            live_.emit(Notice(str(i)))
        return 42

    events = live(call)
    seen = [next(events) for _ in range(5)]
    assert [event.message for event in seen] == list("01234")  # type: ignore[union-attr]
    with pytest.raises(StopIteration) as stop:
        next(events)
    assert stop.value.value == 42


def test_events_come_while_the_call_runs() -> None:
    go_on = threading.Event()

    def call(live_: Live) -> None:
        live_.emit(Notice("first"))
        assert go_on.wait(10)

    events = live(call)
    assert next(events) == Notice("first")
    go_on.set()
    assert list(events) == []


def test_a_failure_is_raised_after_the_events_before_it() -> None:
    def call(live_: Live) -> None:
        live_.emit(Notice("before"))
        raise ModelError("no such model")

    events = live(call)
    assert next(events) == Notice("before")
    with pytest.raises(ModelError, match="no such model"):
        next(events)


@pytest.mark.parametrize("how", ("close", "ctrl-c"))
def test_an_interrupted_call_cleans_up_before_the_caller_goes_on(how: str) -> None:
    cleaned: list[type[BaseException]] = []

    def call(live_: Live) -> None:
        live_.emit(Notice("started"))
        try:
            while True:  # as a lock does that another process holds
                time.sleep(0.01)
        except InterruptedByUser as error:
            cleaned.append(type(error))
            raise

    events = live(call)
    next(events)
    if how == "close":
        events.close()
    else:
        with pytest.raises(KeyboardInterrupt):
            events.throw(KeyboardInterrupt())
    assert cleaned == [InterruptedByUser]


def test_questions_are_asked_in_the_iterating_thread() -> None:
    asked_in: list[threading.Thread] = []

    def prompt() -> str:
        asked_in.append(threading.current_thread())
        return "secret"

    def call(live_: Live) -> str:
        answer = live_.ask(prompt)
        live_.emit(Notice(answer))
        return answer

    assert list(live(call)) == [Notice("secret")]
    assert asked_in == [threading.current_thread()]


def test_ctrl_c_at_a_question_ends_the_call() -> None:
    cleaned: list[type[BaseException]] = []

    def prompt() -> str:
        raise KeyboardInterrupt

    def call(live_: Live) -> None:
        try:
            live_.ask(prompt)
        except InterruptedByUser as error:
            cleaned.append(type(error))
            raise

    with pytest.raises(KeyboardInterrupt):
        list(live(call))
    assert cleaned == [InterruptedByUser]


def test_closing_before_a_question_was_asked_does_not_hang() -> None:
    cleaned = threading.Event()

    def call(live_: Live) -> None:
        live_.emit(Notice("started"))
        try:
            live_.ask(lambda: "never")
        except InterruptedByUser:
            cleaned.set()
            raise

    events = live(call)
    next(events)
    events.close()
    assert cleaned.is_set()
