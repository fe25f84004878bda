"""Files that a user asked for by name: checked before the work, written whole or not at all.

Owns what may be written over. What stands in the file is the callers' business.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Sequence
from pathlib import Path

from longread import values
from longread.atomic import write_atomic
from longread.errors import StoreError, UsageError

_MODE = 0o644  # less what the umask takes: the user may want to pass the file on


def output_path(file: str, sources: Iterable[str]) -> Path:
    """Return the path that `file` names; UsageError where it is one of the documents `sources`."""
    try:
        path = values.path(file)
    except ValueError as error:
        raise UsageError(f"cannot write {file!r}: {error}") from None
    if any(_same_file(path, source) for source in sources):
        raise UsageError(f"{path} is a document of the conversation; name another file")
    return path


def check_output(path: Path, *marks: bytes) -> None:
    """Raise UsageError where `path` cannot be made, or is a file that none of `marks` stands in.

    So a long reading is not followed by an error, and only files of our own are written over.
    """
    if not path.parent.is_dir():
        raise _cannot_write(path, f"there is no folder {path.parent}")
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        if os.access(path.parent, os.W_OK):
            return
        raise _cannot_write(path, "the folder is closed to writing") from None
    except OSError as error:
        raise _cannot_write(path, error.strerror or str(error)) from None
    if stat.S_ISDIR(mode):
        raise _cannot_write(path, "it is a folder")
    if stat.S_ISREG(mode) and path.stat().st_size and not _holds(path, marks):
        raise UsageError(
            f"{path} is there already, and not as longread writes it; name another file, or remove "
            "that one"
        )


def write_output(path: Path, data: bytes) -> None:
    """Write the file, also through a symbolic link. Raises UsageError."""
    try:
        if path.exists() and not path.is_file():  # /dev/stdout, or a named pipe
            path.write_bytes(data)
        else:
            write_atomic(Path(os.path.realpath(path)), [data], mode=_MODE)
    except StoreError as error:
        # The cache's remedies are none here.
        cause = error.__cause__
        reason = cause.strerror if isinstance(cause, OSError) else None
        raise _cannot_write(path, reason or str(cause)) from None
    except OSError as error:
        raise _cannot_write(path, error.strerror or str(error)) from None


def _cannot_write(path: Path, reason: str) -> UsageError:
    return UsageError(f"cannot write {path}: {reason}; name another file")


def _holds(path: Path, marks: Sequence[bytes]) -> bool:
    try:
        data = path.read_bytes()
        return any(mark in data for mark in marks)
    except OSError:
        return False


def _same_file(path: Path, source: str) -> bool:
    try:
        return os.path.samefile(path, source)
    except (OSError, ValueError):
        return False
