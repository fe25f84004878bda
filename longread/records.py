"""Document records on disk: what extraction and tokenising made of a file, so it is done once.

Owns the file form: one checksummed file a record. What a record says is the caller's: JSON data
in which numpy arrays may stand anywhere as values.
"""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path

import numpy as np
import xxhash

from longread.atomic import TEMP_PREFIX, Damaged, disk_errors, ignore, write_atomic
from longread.events import Notice, NoticeFn
from longread.locks import Locks
from longread.space import RECORDS_LOCK, Space
from longread.store_dirs import StoreDirs

_KIND = b"longread record "
_MAGIC = _KIND + b"1\n"
_ARRAY = "__array__"


class DocumentRecords:
    """Records by key; a key is the hash of all that decides the content, from the caller."""

    def __init__(self, dirs: StoreDirs, locks: Locks, space: Space) -> None:
        self._dirs = dirs
        self._locks = locks
        self._space = space

    def load(self, key: str, notice: NoticeFn) -> dict | None:
        """The record, with tuples come back as lists; None where there is none or it was damaged.

        A damaged one goes to quarantine with a Notice. Raises StoreError where it may not be read.
        """
        record, _ = self._read(key, notice)
        if record is not None:
            with suppress(OSError):
                os.utime(self._path(key))
        return record

    def check(self, key: str, notice: NoticeFn) -> str | None:
        """What is wrong with a record, which then is in quarantine; None where nothing is."""
        return self._read(key, notice)[1]

    def save(self, key: str, record: dict, notice: NoticeFn) -> None:
        """Write or replace a record. Raises StoreError."""
        content = encode(record)
        self._dirs.prepare()
        self._space.reserve(len(content), notice=notice)
        with self._locks.hold(RECORDS_LOCK, wait=True, notice=ignore):
            for path in self._dirs.documents.glob(f"{TEMP_PREFIX}*"):
                with suppress(OSError):
                    path.unlink()
            write_atomic(self._path(key), [content])

    def _read(self, key: str, notice: NoticeFn) -> tuple[dict | None, str | None]:
        path = self._path(key)
        with disk_errors("read", path):
            try:
                raw = path.read_bytes()
            except FileNotFoundError:
                return None, None
        if _is_other_version(raw):
            return None, None
        try:
            return decode(raw), None
        except Damaged as error:
            self._space.quarantine(path, key)
            notice(Notice(f"document record {key[:12]} {error}; quarantined, it is made again"))
            return None, str(error)

    def _path(self, key: str) -> Path:
        assert key.isalnum(), f"bad record key {key!r}"
        return self._dirs.documents / key


def encode(record: dict) -> bytes:
    """The file of a record: magic, xxh3-128, then a safetensors body of its arrays and its JSON."""
    from safetensors.numpy import save

    arrays: list[np.ndarray] = []

    def put_aside(value: object) -> dict[str, int]:
        assert isinstance(value, np.ndarray), f"{type(value).__name__} in a document record"
        arrays.append(np.ascontiguousarray(value))
        return {_ARRAY: len(arrays) - 1}

    text = json.dumps(record, default=put_aside, separators=(",", ":")).encode()
    named = {f"array-{number}": array for number, array in enumerate(arrays)}
    body = save(named | {"json": np.frombuffer(text, dtype=np.uint8)})
    return _MAGIC + xxhash.xxh3_128_hexdigest(body).encode() + b"\n" + body


def decode(raw: bytes) -> dict:
    """The inverse of `encode`. Raises Damaged."""
    head_len = len(_MAGIC) + 33
    body = raw[head_len:]
    checksum = xxhash.xxh3_128_hexdigest(body).encode()
    if raw[:head_len] != _MAGIC + checksum + b"\n":
        raise Damaged("does not match its checksum")
    from safetensors.numpy import load

    arrays = load(body)

    def put_back(value: dict) -> object:
        return arrays[f"array-{value[_ARRAY]}"] if _ARRAY in value else value

    return json.loads(arrays["json"].tobytes(), object_hook=put_back)


def _is_other_version(raw: bytes) -> bool:
    head = raw[: len(_KIND) + 8].split(b"\n")[0] + b"\n"
    return head.startswith(_KIND) and head != _MAGIC and head[len(_KIND) : -1].isdigit()
