"""Files that are whole or absent: temp + fsync + rename, checksums, and disk errors as StoreError.

Owns how bytes reach the disk and come back verified. What the bytes mean is the callers' business
(tensorfile.py, manifest.py, records.py).
"""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import xxhash

from longread.disk import disk_errors_with
from longread.events import Notice

TEMP_PREFIX = ".tmp-"
_CHUNK_BYTES = 8 << 20  # of a read: many threads that take turns for the interpreter want few


class Damaged(Exception):
    """A file is missing, short or altered; the text says which. Never reaches the user as such."""


@dataclass(frozen=True)
class FileStamp:
    """What a file must look like: its size and the xxh3-128 of its bytes as 32 hex digits."""

    num_bytes: int
    checksum: str


def ignore(notice: Notice) -> None:
    """A NoticeFn for callers that show nothing."""


def disk_errors(action: str, path: Path) -> AbstractContextManager[None]:
    """Turn an OSError inside the block into a StoreError with a remedy of the cache."""
    return disk_errors_with(
        action,
        path,
        if_full="free some space, run `longread cache prune`, or use --no-cache",
        otherwise="set LONGREAD_CACHE_DIR to a directory you can write to, or use --no-cache",
    )


def write_atomic(
    path: Path, chunks: Iterable[bytes | memoryview], *, mode: int = 0o600
) -> FileStamp:
    """Write `chunks` to `path` so that a crash leaves the old file or the new one.

    The caller holds the lock of the directory's owner: the temporary name is fixed, so that the
    next writer overwrites what a killed one left. Raises StoreError.
    """
    temp = path.with_name(TEMP_PREFIX + path.name)
    digest = xxhash.xxh3_128()
    num_bytes = 0
    with disk_errors("write", path):
        try:
            fd = os.open(temp, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
            try:
                for chunk in chunks:
                    digest.update(chunk)
                    num_bytes += _write_all(fd, memoryview(chunk).cast("B"))
                os.fsync(fd)
            finally:
                os.close(fd)
            os.replace(temp, path)
            sync_dir(path.parent)
        except BaseException:
            with suppress(OSError):
                os.unlink(temp)
            raise
    return FileStamp(num_bytes, digest.hexdigest())


def _write_all(fd: int, view: memoryview) -> int:
    written = 0
    while written < len(view):
        written += os.write(fd, view[written:])
    return written


def sync_dir(path: Path) -> None:
    """Make renames and links in a directory durable. Raises OSError."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some network disks have no such call
            raise
    finally:
        os.close(fd)


class VerifiedFile:
    """A file read once from start to end and hashed on the way; `open_verified` makes it."""

    def __init__(self, fd: int, num_bytes: int) -> None:
        self._fd = fd
        self._left = num_bytes
        self._digest = xxhash.xxh3_128()

    def fill(self, view: memoryview) -> int:
        """Read the next bytes into `view`: all of it, or up to the end. Returns how many. Damaged.

        Neither reading nor hashing holds the interpreter's lock.
        """
        start, stop = 0, min(len(view), self._left)
        while start < stop:
            num_read = _read_into(self._fd, view[start : min(start + _CHUNK_BYTES, stop)])
            self._digest.update(view[start : start + num_read])
            start += num_read
        self._left -= stop
        return stop

    def checksum(self) -> str:
        """Of all bytes read so far, as in FileStamp."""
        return self._digest.hexdigest()


@contextmanager
def open_verified(path: Path, stamp: FileStamp) -> Iterator[VerifiedFile]:
    """A file to read inside the block; what was read is right only once the block has ended.

    Raises Damaged, at the end too; StoreError where the file may not be opened.
    """
    with disk_errors("read", path):
        try:
            fd = os.open(path, os.O_RDONLY)
        except (FileNotFoundError, NotADirectoryError):
            raise Damaged("is missing") from None
        try:
            num_bytes = os.fstat(fd).st_size
            if num_bytes != stamp.num_bytes:
                raise Damaged(f"has {num_bytes} bytes where {stamp.num_bytes} were written")
            file = VerifiedFile(fd, num_bytes)
            yield file
        finally:
            os.close(fd)
        if file.checksum() != stamp.checksum:
            raise Damaged("does not match its checksum")


def read_verified(path: Path, stamp: FileStamp) -> mmap.mmap:
    """The bytes of `path`, in private writable memory, once their size and checksum are right.

    Read, not mapped: a bad sector or a file cut while in use is then an error, not a dead process.
    Raises Damaged; StoreError where the file may not be opened.
    """
    with open_verified(path, stamp) as file:
        buffer = _anonymous_memory(stamp.num_bytes)
        with memoryview(buffer) as view:
            file.fill(view)
    return buffer


def check_file(path: Path, stamp: FileStamp) -> None:
    """Verify a file without keeping it in memory. Raises Damaged or StoreError."""
    with open_verified(path, stamp) as file, memoryview(bytearray(_CHUNK_BYTES)) as view:
        while file.fill(view):
            pass


def _read_into(fd: int, view: memoryview) -> int:
    try:
        num_read = os.readv(fd, [view])
    except OSError as error:  # EIO: the disk itself lost the bytes
        raise Damaged(f"cannot be read back ({error.strerror})") from error
    if num_read == 0:
        raise Damaged("ends too early")
    return num_read


def _anonymous_memory(num_bytes: int) -> mmap.mmap:
    """Zeroed memory, in huge pages where there are any: page faults are most of a load's time."""
    buffer = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):
            buffer.madvise(mmap.MADV_HUGEPAGE)
    return buffer
