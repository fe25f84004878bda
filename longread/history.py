"""Saved sessions: the turns of a conversation about documents, one JSON file each.

Owns the file format and the names. It does not own the KV cache: turns are text, and a session
that is resumed reads them again.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import stat
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import xxhash

from longread.atomic import sync_dir
from longread.config import Settings
from longread.errors import StoreError, UsageError
from longread.events import (
    Answer,
    CacheUse,
    Citation,
    Passage,
    Selection,
    Timings,
    Usage,
)

FORMAT_VERSION = 1
_NAME = re.compile(r"[A-Za-z0-9._-]{1,100}")
_SUFFIX = ".json"
_TEMP_PREFIX = ".saving-"
_CHECKSUM = "checksum"
_SAVING_TAKES_AT_MOST_S = 3600.0  # an older file of that prefix was left by a killed process
_ANSWER_SETTINGS = (
    "dtype",
    "weights",
    "kv_dtype",
    "context",
    "min_votes",
    "index_dim",
    "sink_size",
    "window_size",
    "reselect",
    "butler",
    "neighbours",
    "max_tokens",
    "temperature",
    "top_p",
    "seed",
)


@dataclass(frozen=True)
class Turn:
    """One question and its finished answer."""

    question: str
    answer: Answer
    settings: dict[str, Any] = field(default_factory=dict)  # `answer_settings` of then


@dataclass(frozen=True)
class SavedSession:
    """A conversation that can be taken up again on the same documents."""

    name: str
    created: str  # ISO 8601, UTC
    model: str
    sources: tuple[str, ...]  # absolute paths; "-" where the document came on standard input
    sha256s: tuple[str, ...]  # of the files' bytes, in the order of `sources`
    pages: str | None  # the text of --pages
    turns: tuple[Turn, ...]


def answer_settings(settings: Settings) -> dict[str, Any]:
    """Return the settings that decide an answer and that the answer itself does not tell."""
    return {name: getattr(settings, name) for name in _ANSWER_SETTINGS}


def check_name(name: str) -> str:
    """Return `name`; UsageError where it could not be a file name on every system."""
    if not _NAME.fullmatch(name) or name.startswith("."):
        raise UsageError(
            f"session name {name!r} is not usable: take letters, digits, '-', '_' and '.', "
            "beginning with none of the dots"
        )
    return name


def exists(sessions_dir: Path, name: str) -> bool:
    """Return whether a session of that name is saved."""
    return os.path.isfile(_path(sessions_dir, name))


def list_names(sessions_dir: Path) -> list[str]:
    """Return the names of the saved sessions, sorted."""
    try:
        files = list(sessions_dir.iterdir())
    except FileNotFoundError:
        return []
    except OSError as error:
        raise _store_error("list the sessions in", sessions_dir, error) from error
    return sorted(file.stem for file in files if file.suffix == _SUFFIX and _usable(file.stem))


def check_writable(sessions_dir: Path) -> None:
    """Raise StoreError where nothing can be saved: better before a long reading than after it."""
    try:
        _make_private(sessions_dir)
        with tempfile.TemporaryFile(dir=sessions_dir):
            pass
    except OSError as error:
        raise _store_error("save sessions in", sessions_dir, error) from error


def save(sessions_dir: Path, session: SavedSession) -> Path:
    """Write the session under its name, whole or not at all; return the file."""
    path = _path(sessions_dir, session.name)
    try:
        _make_private(sessions_dir)
        _sweep(sessions_dir)
        record = session_record(session)
        _write_atomically(path, json.dumps({**record, _CHECKSUM: _checksum(record)}))
    except OSError as error:
        raise _store_error("save the session in", sessions_dir, error) from error
    return path


def load(sessions_dir: Path, name: str) -> SavedSession:
    """Read a saved session; UsageError where there is none, StoreError where it is damaged."""
    path = _path(sessions_dir, name)
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        known = ", ".join(list_names(sessions_dir)) or "none yet"
        raise UsageError(
            f"there is no session {name!r} in {sessions_dir}; saved: {known}"
        ) from None
    except OSError as error:
        raise _store_error("read the session in", path, error) from error
    except (ValueError, RecursionError) as error:
        raise _damaged(path, name) from error
    version = record.get("version") if isinstance(record, dict) else None
    if isinstance(version, int) and version > FORMAT_VERSION:
        raise StoreError(
            f"session file {path} has format {version}, this longread reads {FORMAT_VERSION}; "
            "update longread"
        )
    try:
        # Files of before there were checksums have none.
        if record.pop(_CHECKSUM, None) not in (None, _checksum(record)):
            raise _damaged(path, name)
        # The name is the file's: a copy under another one is a session of its own.
        return dataclasses.replace(_session_from(record), name=name)
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise _damaged(path, name) from error


def remove(sessions_dir: Path, name: str) -> None:
    """Delete a saved session; UsageError where there is none."""
    path = _path(sessions_dir, name)
    try:
        path.unlink()
    except FileNotFoundError:
        raise UsageError(f"there is no session {name!r} in {sessions_dir}") from None
    except OSError as error:
        raise _store_error("remove the session in", path, error) from error


def session_record(session: SavedSession) -> dict[str, Any]:
    """Return the session as plain JSON values with a `version`: what the file holds."""
    return {"version": FORMAT_VERSION, **dataclasses.asdict(session)}


def _make_private(sessions_dir: Path) -> None:
    """Make the folder, and close one that was there where it holds nothing but ours.

    Set to /tmp or a home it must not shut others out; the files are private by themselves.
    """
    sessions_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
    mode = stat.S_IMODE(sessions_dir.stat().st_mode)
    if mode & ~0o700 and all(_is_ours(name) for name in os.listdir(sessions_dir)):
        with suppress(PermissionError):  # it is another user's
            sessions_dir.chmod(mode & 0o700)


def _sweep(sessions_dir: Path) -> None:
    """Delete what killed processes left: nobody sees it, and what was said stands in it."""
    for path in sessions_dir.glob(f"{_TEMP_PREFIX}*"):
        with suppress(OSError):
            if abs(time.time() - path.stat().st_mtime) > _SAVING_TAKES_AT_MOST_S:
                path.unlink()


def _checksum(record: dict[str, Any]) -> str:
    text = json.dumps(record, sort_keys=True, separators=(",", ":"))
    return xxhash.xxh3_128_hexdigest(text.encode())


def _is_ours(name: str) -> bool:
    stem, suffix = os.path.splitext(name)
    return (
        name == "history" or name.startswith(_TEMP_PREFIX) or (suffix == _SUFFIX and _usable(stem))
    )


def _path(sessions_dir: Path, name: str) -> Path:
    return sessions_dir / (check_name(name) + _SUFFIX)


def _usable(name: str) -> bool:
    return bool(_NAME.fullmatch(name)) and not name.startswith(".")


def _write_atomically(path: Path, content: str) -> None:
    descriptor, temp_name = tempfile.mkstemp(prefix=_TEMP_PREFIX, dir=path.parent)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temp_name, path)
        sync_dir(path.parent)
    except BaseException:
        Path(temp_name).unlink(missing_ok=True)
        raise


def _session_from(record: dict[str, Any]) -> SavedSession:
    pages = record["pages"]
    session = SavedSession(
        name=str(record["name"]),
        created=str(record["created"]),
        model=str(record["model"]),
        sources=_strings(record["sources"]),
        sha256s=_strings(record["sha256s"]),
        pages=None if pages is None else str(pages),
        turns=tuple(_turn_from(turn) for turn in record["turns"]),
    )
    if len(session.sources) != len(session.sha256s):
        raise ValueError("sources and sha256s differ in number")
    return session


def _turn_from(record: dict[str, Any]) -> Turn:
    # Sessions of before 0.1 was out lack the settings.
    settings = dict(record.get("settings", {}))
    return Turn(str(record["question"]), _answer_from(record["answer"]), settings)


def _strings(values: Sequence[object]) -> tuple[str, ...]:
    if not isinstance(values, list):
        raise TypeError("a list was expected")
    return tuple(str(value) for value in values)


def _answer_from(record: dict[str, Any]) -> Answer:
    selection = dict(record["selection"])
    selection["passages"] = tuple(map(_passage_from, selection["passages"]))
    selection["strip"] = tuple(selection["strip"])
    selection["heads"] = tuple(map(tuple, selection.get("heads", ())))
    fields = dict(record)
    fields["citations"] = tuple(Citation(**citation) for citation in record["citations"])
    fields["usage"] = Usage(**record["usage"])
    fields["cache"] = CacheUse(**record["cache"])
    fields["selection"] = Selection(**selection)
    fields["timings"] = Timings(**record["timings"])
    answer = Answer(**fields)
    if not isinstance(answer.text, str):
        raise TypeError("an answer's text must be text")
    return answer


def _passage_from(record: dict[str, Any]) -> Passage:
    return Passage(**(record | {"marks": tuple(map(tuple, record.get("marks", ())))}))


def _store_error(what: str, path: Path, error: OSError) -> StoreError:
    return StoreError(f"cannot {what} {path}: {error.strerror or error}; see `longread doctor`")


def _damaged(path: Path, name: str) -> StoreError:
    return StoreError(
        f"session file {path} is damaged; remove it with `longread sessions rm {name}`"
    )
