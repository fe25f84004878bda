"""Disk errors as one StoreError; what to do about them is the callers' to say."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from longread.errors import StoreError

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@contextmanager
def disk_errors_with(action: str, path: Path, if_full: str, otherwise: str) -> Iterator[None]:
    """Turn an OSError inside the block into a StoreError: `cannot {action} {path}: why; remedy`."""
    try:
        yield
    except OSError as error:
        remedy = if_full if error.errno in _FULL else otherwise
        reason = error.strerror or str(error)
        raise StoreError(f"cannot {action} {path}: {reason}; {remedy}") from error
