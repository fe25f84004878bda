"""The models directory: where model files lie, its locks, its free space, what `models ls` shows.

    gguf/<file>                     downloaded files, each verified before it gets its name
    converted/<name>-<identity>/    converted models; a directory is there whole or not at all
    converted/.sources/             which local files or hub ids a converted model came from

Knows nothing of what stands in the files, except the name in a converted model's config.json.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock, Timeout

from longread.disk import disk_errors_with
from longread.errors import StoreError
from longread.events import Notice, NoticeFn

_IDENTITY_DIGITS = 16
TEMP_PREFIX = ".tmp-"


@dataclass(frozen=True)
class ConvertedModel:
    """One converted model on disk."""

    name: str
    path: Path
    num_bytes: int


def gguf_dir(models_dir: Path) -> Path:
    """Return where downloaded GGUF files lie."""
    return models_dir / "gguf"


def converted_dir(models_dir: Path) -> Path:
    """Return where converted models lie."""
    return models_dir / "converted"


def converted_path(models_dir: Path, name: str, identity: str) -> Path:
    """Return the directory of a converted model, there or not; `identity` is its SHA-256."""
    slug = re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip(".-") or "model"
    return converted_dir(models_dir) / f"{slug[:80]}-{identity[:_IDENTITY_DIGITS]}"


def find_converted(models_dir: Path, identity: str) -> Path | None:
    """Return the converted model with this identity, under whatever name, or None."""
    root = converted_dir(models_dir)
    found = sorted(root.glob(f"[!.]*-{identity[:_IDENTITY_DIGITS]}"))
    return next((path for path in found if path.is_dir()), None)


def list_converted(models_dir: Path) -> list[ConvertedModel]:
    """Return the converted models by name; a directory whose config is unreadable has its own."""
    root = converted_dir(models_dir)
    if not root.is_dir():
        return []
    models = []
    for path in sorted(root.iterdir()):
        if path.is_dir() and not path.name.startswith("."):
            try:
                name = str(json.loads((path / "config.json").read_bytes())["name"])
            except (OSError, ValueError, KeyError, TypeError):
                name = path.name
            num_bytes = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
            models.append(ConvertedModel(name, path, num_bytes))
    return sorted(models, key=lambda model: model.name)


def weight_forms(path: Path) -> list[str]:
    """The forms that the weights of a converted model are there in: bf16, and what is packed."""
    packed = {file.name.partition("-")[0] for file in path.glob("int*-*.safetensors")}
    return ["bf16", *sorted(packed, reverse=True)]


def remove_converted(models_dir: Path, name: str) -> int:
    """Remove the converted models called `name` (or of that directory); return the bytes freed."""
    freed = 0
    for model in list_converted(models_dir):
        if name in (model.name, model.path.name):
            with disk_errors("remove", model.path):
                # Renamed first: a removal that is cut short must not leave half a model behind.
                doomed = model.path.with_name(TEMP_PREFIX + model.path.name)
                shutil.rmtree(doomed, ignore_errors=True)
                model.path.rename(doomed)
                shutil.rmtree(doomed)
            freed += model.num_bytes
    return freed


def find_recorded(models_dir: Path, source: Path, files: Sequence[Path]) -> Path | None:
    """Return what `source` was converted to, where none of `files` has changed since."""
    try:
        record = json.loads(_record_path(models_dir, source).read_bytes())
        path = converted_dir(models_dir) / record["directory"]
        return path if record["files"] == _stamps(files) and path.is_dir() else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def record(models_dir: Path, source: Path, files: Sequence[Path], converted: Path) -> None:
    """Remember what `source` was converted to, so that its files need no hashing next time."""
    path = _record_path(models_dir, source)
    content = {"source": str(source), "files": _stamps(files), "directory": converted.name}
    with disk_errors("write", path):
        path.parent.mkdir(parents=True, exist_ok=True)
        temp = path.with_name(f"{path.name}.{os.getpid()}.{threading.get_ident()}")
        temp.write_text(json.dumps(content), encoding="utf-8")
        os.replace(temp, path)


def _record_path(models_dir: Path, source: Path) -> Path:
    digest = hashlib.sha256(str(source).encode("utf-8", "surrogateescape")).hexdigest()
    return converted_dir(models_dir) / ".sources" / f"{digest[:_IDENTITY_DIGITS]}.json"


def _stamps(files: Sequence[Path]) -> list[list[str | int]]:
    stats = [(file.name, file.stat()) for file in files]
    return [[name, stat.st_size, stat.st_mtime_ns] for name, stat in stats]


@contextmanager
def locked(path: Path, notice: NoticeFn, what: str) -> Iterator[None]:
    """Hold the lock of `path` (a file or directory that need not exist), waiting visibly.

    `what` ends the sentence "another longread process is ...". Raises StoreError.
    """
    lock = FileLock(path.with_name(path.name + ".lock"))
    with disk_errors("lock", path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            lock.acquire(timeout=0)
        except Timeout:
            notice(Notice(f"another longread process is {what}; waiting for it", "info"))
            lock.acquire()
    try:
        yield
    finally:
        lock.release()


def require_free(directory: Path, num_bytes: int, what: str) -> None:
    """Raise StoreError unless `num_bytes` are free where `directory` is."""
    free = shutil.disk_usage(directory).free
    if free < num_bytes:
        raise StoreError(
            f"not enough disk space in {directory}: {what} needs {num_bytes / 1e9:.1f} GB, "
            f"{free / 1e9:.1f} GB are free; free some, or choose another LONGREAD_MODELS_DIR"
        )


def disk_errors(action: str, path: Path) -> AbstractContextManager[None]:
    """Turn an OSError inside the block into a StoreError with a remedy of the models directory."""
    return disk_errors_with(
        action,
        path,
        if_full="free some space, or choose another LONGREAD_MODELS_DIR",
        otherwise="check the directory, or choose another with LONGREAD_MODELS_DIR",
    )
