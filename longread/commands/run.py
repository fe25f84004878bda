"""One run of a command: its screen, settings and services, from the typer context."""

from __future__ import annotations

import getpass
import logging
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import BinaryIO

import typer

from longread import config, history
from longread.config import OPTION_NAMES, Settings, load_settings
from longread.conversation import (
    Conversation,
    FingerprintFn,
    SessionLike,
    gather,
)
from longread.events import Opened, PasswordFn
from longread.plain_text import json_text, one_line
from longread.render import Screen


def _real_session(settings: Settings) -> SessionLike:
    from longread.session import Session

    return Session(settings)


def _file_sha256(source: str, stdin: BinaryIO | None) -> str:
    from longread.document import read_source

    return read_source(source, stdin=stdin).sha256


@dataclass(frozen=True)
class Services:
    """What commands build on; tests give others."""

    make_session: Callable[[Settings], SessionLike] = _real_session
    fingerprint: FingerprintFn = _file_sha256


@dataclass(frozen=True)
class Run:
    """The screen, the settings with their origins, and the services of one command."""

    screen: Screen
    settings: Settings
    origins: dict[str, str]
    services: Services
    verbose: bool

    @classmethod
    def start(cls, ctx: typer.Context) -> Run:
        """Resolve the settings from the options of `ctx`; UsageError where one is bad."""
        services = ctx.obj if isinstance(ctx.obj, Services) else Services()
        resolved = load_settings({name: ctx.params.get(name) for name in OPTION_NAMES})
        screen = Screen(sys.stdout, sys.stderr, quiet=bool(ctx.params.get("quiet")))
        verbose = logging.getLogger("longread").isEnabledFor(logging.DEBUG)
        return cls(screen, resolved.settings, resolved.origins, services, verbose)

    def print_json(self, record: object) -> None:
        """Print one JSON document."""
        self.screen.out.write(json_text(record, indent=2) + "\n")

    def converse(
        self,
        sources: Sequence[str],
        *,
        pages: str | None,
        password: str | None,
        name: str | None = None,
    ) -> Conversation:
        """Return a conversation that is yet to be opened, taken up where `name` is saved."""
        from longread.document import parse_pages

        if pages is not None:
            parse_pages(pages)
        settings = self.settings
        saved = None
        if name is not None and history.exists(settings.sessions_dir, name):
            saved = history.load(settings.sessions_dir, name)
            if not self.origins["model"].startswith("--"):
                settings = replace(settings, model=saved.model)
        matter = gather(sources, pages, standard_input(), self.services.fingerprint, saved)
        if name is not None:
            matter.check_can_be_saved()
            history.check_writable(settings.sessions_dir)
        session = self.services.make_session(settings)
        asker = password_asker(password, self.screen)
        return Conversation(session, settings, matter, name=name, password=asker)

    def open(self, conversation: Conversation) -> Opened:
        """Read the documents, showing progress; return what was read."""
        opened = self.screen.show(conversation.open())
        assert isinstance(opened, Opened), "a session's open ends with Opened"
        return opened


def standard_input() -> BinaryIO | None:
    """Return the bytes of standard input, or None where it is closed."""
    return sys.stdin.buffer if sys.stdin is not None else None


def password_asker(given: str | None, screen: Screen) -> PasswordFn:
    """Return who is asked for a document's password: the option, the variable, the user."""

    def ask(name: str) -> str | None:
        known = given or config.password()
        if known:
            return known
        if sys.stdin is None or not (sys.stdin.isatty() and screen.err.isatty()):
            return None
        screen.stop_progress()
        try:
            return getpass.getpass(f"Password of {one_line(name)}: ", screen.err) or None
        except EOFError:
            return None

    return ask


def date_text(seconds: float) -> str:
    """Return a moment, in seconds since the epoch, as local date and time."""
    return datetime.fromtimestamp(seconds).strftime("%Y-%m-%d %H:%M")


def table_lines(head: Sequence[str], rows: Iterable[Sequence[str]], right: str = "") -> list[str]:
    """Return rows as aligned columns; `right` names the heads whose columns align right."""
    cells = [list(head), *([one_line(cell) for cell in row] for row in rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(head))]
    rights = [name in right.split() for name in head]
    return [
        "  ".join(
            cell.rjust(width) if to_right else cell.ljust(width)
            for cell, width, to_right in zip(row, widths, rights, strict=True)
        ).rstrip()
        for row in cells
    ]
