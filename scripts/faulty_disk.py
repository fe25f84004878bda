"""A disk that fails, or a process that dies, at one chosen writing call and ever after."""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

NEEDS_ROOM = ("write", "fsync", "replace", "rename", "mkdir", "link", "open")
CHANGES = (*NEEDS_ROOM, "unlink", "rmdir", "utime", "chmod")
FULL, READ_ONLY = (errno.ENOSPC, NEEDS_ROOM), (errno.EROFS, CHANGES)

Fault = Callable[[Callable[..., object], str, tuple[object, ...]], None]


@contextmanager
def from_call(
    num_calls: int, names: Sequence[str], fault: Fault, *, spared_fd: int = -1
) -> Iterator[list[str]]:
    """`fault` happens at the call number `num_calls` of `names` and at all after; yields those.

    Opening a file counts where it makes one; what goes to `spared_fd` does not count.
    """
    real = {name: getattr(os, name) for name in names}
    struck: list[str] = []
    seen = 0

    def guarded(name: str) -> Callable[..., object]:
        def call(*arguments: object, **named: object) -> object:
            nonlocal seen
            only_reads = name == "open" and not int(str(arguments[1])) & os.O_CREAT
            if not only_reads and arguments[0] != spared_fd:
                seen += 1
                if seen > num_calls:
                    struck.append(name)
                    fault(real[name], name, arguments)
            return real[name](*arguments, **named)

        return call

    for name in names:
        setattr(os, name, guarded(name))
    try:
        yield struck
    finally:
        for name, function in real.items():
            setattr(os, name, function)


def refuse(number: int) -> Fault:
    """The call fails with this errno."""

    def fault(call: Callable[..., object], name: str, arguments: tuple[object, ...]) -> None:
        raise OSError(number, os.strerror(number))

    return fault


def die(call: Callable[..., object], name: str, arguments: tuple[object, ...]) -> None:
    """The process is killed here; of what it was writing, the first half reaches the disk."""
    if name == "write":
        fd, content = arguments
        call(fd, content[: len(content) // 2])  # type: ignore[index, arg-type]
    os.kill(os.getpid(), signal.SIGKILL)


def in_child(work: Callable[[], bool]) -> int:
    """Start a process that ends with 0 where `work` is true, and with 1 where not or raising."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            code = 0 if work() else 1
        finally:
            os._exit(code)
    return pid
