"""The end of a session's events, which is what most tests look at."""

from __future__ import annotations

from collections.abc import Iterable

from longread.events import Event, Notice


def last_event(events: Iterable[Event], notices: list[str] | None = None) -> Event:
    """The last event; the messages of notices are added to `notices`."""
    last = None
    for last in events:
        if notices is not None and isinstance(last, Notice):
            notices.append(last.message)
    assert last is not None
    return last
