"""One lock per entry, held across processes; a lock dies with its process.

Owns waiting, and telling the user about it. Lock files may be deleted by whoever holds them:
filelock takes no lock on a file that was unlinked while it waited.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

from longread.atomic import disk_errors
from longread.errors import StoreError
from longread.events import Notice, NoticeFn

_UNREMARKABLE_WAIT_S = 0.3  # loading an entry is about as short; not worth a line


class Locks:
    """Named exclusive locks, one file each in `directory`."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    @contextmanager
    def hold(self, name: str, *, wait: bool, notice: NoticeFn) -> Iterator[None]:
        """Hold the lock inside the block. Waits with a Notice; StoreError if `wait` is False."""
        lock = self._file_lock(name)
        with disk_errors("lock", self._path(name)):
            try:
                lock.acquire(timeout=_UNREMARKABLE_WAIT_S if wait else 0)
            except Timeout:
                if not wait:
                    raise StoreError(
                        "another longread process is reading this document; "
                        "try again when it is done, or leave --no-wait out"
                    ) from None
                notice(
                    Notice(
                        "waiting for another longread process that reads this document "
                        "(Ctrl-C to stop, --no-wait to fail at once)",
                        "info",
                    )
                )
                lock.acquire()
        try:
            yield
        finally:
            lock.release()

    @contextmanager
    def try_hold(self, name: str) -> Iterator[bool]:
        """Hold the lock inside the block if it is free; yields whether it was."""
        lock = self._file_lock(name)
        held = False
        with disk_errors("lock", self._path(name)), suppress(Timeout):
            lock.acquire(timeout=0)
            held = True
        try:
            yield held
        finally:
            if held:
                lock.release()

    def discard(self, name: str) -> None:
        """Delete the file of a lock that the caller holds and whose entry is gone."""
        with suppress(OSError):
            self._path(name).unlink()

    def _path(self, name: str) -> Path:
        return self._directory / f"{name}.lock"

    def _file_lock(self, name: str) -> FileLock:
        with disk_errors("create", self._directory):
            self._directory.mkdir(mode=0o700, exist_ok=True)
        return FileLock(self._path(name), mode=0o600, thread_local=False)
