"""Where each file of the store lies, and that only its owner may look: directories are 0700.

kv/<key>/          one KV entry: manifest.json, tokens.i32, block-*.safetensors, extra-*.safetensors
kv/<key>.new/      an entry being set up; kv/<key>.del/ one being deleted: rubbish after a crash
documents/<key>    one document record
locks/<key>.lock   outside the entries, so that deleting one cannot race with opening it
quarantine/        the last few damaged files
"""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass
from pathlib import Path

from longread.atomic import disk_errors

NEW_SUFFIX = ".new"
DELETED_SUFFIX = ".del"
_PRIVATE = 0o700


@dataclass(frozen=True)
class StoreDirs:
    """The store's directories below `root`; nothing is created before `prepare`."""

    root: Path

    @property
    def entries(self) -> Path:
        return self.root / "kv"

    @property
    def documents(self) -> Path:
        return self.root / "documents"

    @property
    def locks(self) -> Path:
        return self.root / "locks"

    @property
    def quarantine(self) -> Path:
        return self.root / "quarantine"

    def entry(self, key: str) -> Path:
        return self.entries / key

    def entry_dirs(self) -> list[Path]:
        """The directories of all entries, without rubbish. Raises StoreError."""
        with disk_errors("read", self.entries):
            names = sorted(os.listdir(self.entries))
        return [self.entries / name for name in names if "." not in name]

    def prepare(self) -> None:
        """Create what is missing and close it to others. Raises StoreError.

        An existing root is tightened only where it holds nothing but the store: a cache directory
        set to /tmp or a home must not shut its other users out. The parts below always are.
        """
        parts = (self.entries, self.documents, self.locks, self.quarantine)
        with disk_errors("use the cache directory", self.root):
            self.root.mkdir(mode=_PRIVATE, parents=True, exist_ok=True)
            if {name for name in os.listdir(self.root)} <= {part.name for part in parts}:
                _tighten(self.root)
            for part in parts:
                part.mkdir(mode=_PRIVATE, exist_ok=True)
                _tighten(part)


def _tighten(path: Path) -> None:
    if stat.S_IMODE(path.stat().st_mode) & ~_PRIVATE:
        path.chmod(_PRIVATE)
