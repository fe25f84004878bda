"""What the store's files take up, and what goes when there is no room: least recently used first.

Owns the cap, the free-space check, eviction, pruning and the quarantine. A file that several
entries share by hard links counts once, and is freed only with the last of them. Nothing whose
lock another process holds is deleted.
"""

from __future__ import annotations

import os
import shutil
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

from longread.atomic import TEMP_PREFIX, Damaged, disk_errors, ignore
from longread.errors import StoreError
from longread.events import Notice, NoticeFn
from longread.locks import Locks
from longread.manifest import MANIFEST_NAME, Manifest, OtherVersion
from longread.plain_text import count_text, size_text
from longread.store_dirs import DELETED_SUFFIX, NEW_SUFFIX, StoreDirs

FREE_MARGIN_BYTES = 256 << 20  # left free on the disk for everyone else
QUARANTINE_MAX_BYTES = 256 << 20
CLOCK_SKEW_S = 3600.0  # by which a network disk's clock may be ahead
RECORDS_LOCK = "documents"
_STORE_LOCK = "store"

Inode = tuple[int, int]


@dataclass(frozen=True)
class Item:
    """Something in the store that is deleted as a whole."""

    path: Path
    kind: str  # entry, record or rubbish (left by a crash, or quarantined)
    lock: str | None
    last_used_s: float  # seconds since the epoch; 0 for rubbish, which goes first
    inodes: dict[Inode, int]  # bytes of each file

    @property
    def num_bytes(self) -> int:
        return sum(self.inodes.values())


@dataclass(frozen=True)
class PruneResult:
    """What pruning did; `num_skipped` were in use or could not be deleted."""

    num_removed: int
    freed_bytes: int
    num_skipped: int


def used_bytes(items: Iterable[Item]) -> int:
    """Bytes of all files of `items`, each file once."""
    return sum({inode: size for item in items for inode, size in item.inodes.items()}.values())


class Space:
    """The room that the store has: `max_bytes` in all, and what the disk leaves free."""

    def __init__(self, dirs: StoreDirs, locks: Locks, max_bytes: int) -> None:
        self._dirs = dirs
        self._locks = locks
        self.max_bytes = max_bytes

    def items(self) -> list[Item]:
        """Everything in the store, least recently used first. Raises StoreError."""
        with disk_errors("read the cache directory", self._dirs.root):
            # Entries are directories, records files; others leave things too (.DS_Store, .nfs*).
            entries = [path for path in _ours(self._dirs.entries) if os.path.isdir(path)]
            records = [path for path in _ours(self._dirs.documents) if os.path.isfile(path)]
            found = [self._entry_item(path) for path in entries]
            found += [_record_item(path) for path in records]
            for path in _children(self._dirs.quarantine):
                found.append(Item(path, "rubbish", None, 0.0, _inodes([path])))
        # A time to come was taken from a wrong clock; if it counted, its item would stay for years.
        now_s = time.time() + CLOCK_SKEW_S
        return sorted(found, key=lambda item: (0 < item.last_used_s < now_s, item.last_used_s))

    def reserve(self, num_bytes: int, *, own_key: str | None = None, notice: NoticeFn) -> None:
        """Make room for `num_bytes` more, evicting what was not used for longest.

        own_key: the entry that is to grow; it stays. Nothing is deleted unless that is enough.
        What another process has announced for an entry that it is writing counts as taken.
        Raises StoreError where there is no such room.
        """
        with self._locks.hold(_STORE_LOCK, wait=True, notice=ignore):
            stubborn: set[Path] = set()
            while True:
                with ExitStack() as held:
                    victims = self._plan(num_bytes, own_key, stubborn, held)
                    failed = self._delete_all(victims, notice)
                entries = [item for item in victims if item.kind == "entry"]
                if entries and not failed:
                    freed = size_text(used_bytes(entries))
                    count = count_text(len(entries), "old entry", "old entries")
                    notice(Notice(f"made room in the cache: {count} removed ({freed})", "info"))
                if not failed:
                    return
                stubborn |= failed

    def prune(
        self, choose: Callable[[Item], bool], target_bytes: int | None, notice: NoticeFn
    ) -> PruneResult:
        """Delete rubbish, every item that `choose` picks, and the oldest down to `target_bytes`."""
        num_removed = num_skipped = 0
        if not os.path.exists(self._dirs.root):
            return PruneResult(0, 0, 0)
        with self._locks.hold(_STORE_LOCK, wait=True, notice=ignore):
            items = self.items()
            before = used_bytes(items)
            kept = list(items)
            for item in items:
                over = target_bytes is not None and used_bytes(kept) > target_bytes
                if not (item.kind == "rubbish" or over or choose(item)):
                    continue
                with ExitStack() as held:
                    if not self._lock(item, held) or self._delete_all([item], notice):
                        num_skipped += item.kind != "rubbish"
                        continue
                num_removed += item.kind != "rubbish"
                kept.remove(item)
            self._discard_idle_locks()
        return PruneResult(num_removed, before - used_bytes(kept), num_skipped)

    def delete(self, path: Path) -> None:
        """Delete a file, or an entry in one step for onlookers. Its lock is held. OSError."""
        if not os.path.isdir(path):
            path.unlink(missing_ok=True)
            return
        if path.suffix not in (NEW_SUFFIX, DELETED_SUFFIX):
            doomed = path.with_name(path.name + DELETED_SUFFIX)
            if doomed.exists():
                shutil.rmtree(doomed)
            os.rename(path, doomed)
            path = doomed
        shutil.rmtree(path)

    def quarantine(self, path: Path, key: str) -> None:
        """Take a damaged file out of use; the last few are kept to be looked at."""
        keep = min(QUARANTINE_MAX_BYTES, self.max_bytes // 16)
        with suppress(OSError):
            if path.stat().st_size <= keep:
                os.replace(path, self._dirs.quarantine / f"{key[:12]}-{path.name}")
        with suppress(OSError):
            path.unlink(missing_ok=True)
        with suppress(OSError):
            stats = [(file.stat(), file) for file in _children(self._dirs.quarantine)]
            for stat, file in sorted(stats, key=lambda pair: pair[0].st_ctime, reverse=True):
                keep -= stat.st_size
                if keep < 0:
                    file.unlink()

    def _plan(
        self, num_bytes: int, own_key: str | None, stubborn: Collection[Path], held: ExitStack
    ) -> list[Item]:
        """The items to evict, their locks taken in `held`."""
        items = self.items()
        own = [item for item in items if item.kind == "entry" and item.path.name == own_key]
        wanted = used_bytes(own) + num_bytes
        if wanted > self.max_bytes:
            raise StoreError(
                f"this document needs {size_text(wanted)} in the cache, which may hold "
                f"{size_text(self.max_bytes)}; set a larger cache_size, or use --no-cache"
            )
        pending = sum(self._pending_bytes(item) for item in items if item not in own)
        free = shutil.disk_usage(self._dirs.root).free
        over_cap = used_bytes(items) + pending + num_bytes - self.max_bytes
        over_disk = num_bytes + pending + FREE_MARGIN_BYTES - free
        shortfall = max(over_cap, over_disk)
        links = Counter(inode for item in items for inode in item.inodes)
        pinned = {inode for item in own for inode in item.inodes}
        victims: list[Item] = []
        # An entry that shares most of its bytes with the growing one frees little: it goes last.
        for item in sorted(items, key=lambda item: _share(item, pinned) > 0.5):
            if shortfall <= 0:
                break
            if item in own or item.path in stubborn or not self._lock(item, held):
                continue
            victims.append(item)
            links.subtract(item.inodes.keys())
            shortfall -= sum(size for inode, size in item.inodes.items() if links[inode] == 0)
        if shortfall <= 0:
            return victims
        if over_disk > over_cap:
            raise StoreError(
                f"the disk of {self._dirs.root} has {size_text(free)} free, and "
                f"{size_text(num_bytes + pending + FREE_MARGIN_BYTES)} are needed; "
                "free some space, or use --no-cache"
            )
        raise StoreError(
            f"the cache needs {size_text(num_bytes)} more but may hold "
            f"{size_text(self.max_bytes)}, and what else it holds is in use or cannot be "
            "deleted; set a larger cache_size, or use --no-cache"
        )

    def _lock(self, item: Item, held: ExitStack) -> bool:
        if item.lock is None:
            return True
        return held.enter_context(self._locks.try_hold(item.lock))

    def _discard_idle_locks(self) -> None:
        """Delete the lock files of entries that are gone or never came to be."""
        for path in _children(self._dirs.locks):
            key = path.stem
            if key == _STORE_LOCK or os.path.exists(self._dirs.entry(key)):
                continue
            with self._locks.try_hold(key) as free:
                if free and not os.path.exists(self._dirs.entry(key)):
                    self._locks.discard(key)

    def _delete_all(self, items: Iterable[Item], notice: NoticeFn) -> set[Path]:
        """Delete what can be deleted; the paths of the rest. Their locks are held."""
        failed = set()
        for item in items:
            try:
                self.delete(item.path)
            except OSError as error:
                failed.add(item.path)
                reason = error.strerror or str(error)
                notice(Notice(f"cannot delete {item.path} from the cache: {reason}; skipped it"))
                continue
            if item.lock not in (None, RECORDS_LOCK):
                self._locks.discard(item.lock)
        return failed

    def _entry_item(self, path: Path) -> Item:
        key, rubbish = path.name, False
        for suffix in (NEW_SUFFIX, DELETED_SUFFIX):
            rubbish = rubbish or key.endswith(suffix)
            key = key.removesuffix(suffix)
        last_used_s = 0.0
        if not rubbish:
            with suppress(FileNotFoundError):
                last_used_s = path.stat().st_mtime
                last_used_s = (path / MANIFEST_NAME).stat().st_mtime
        inodes = _inodes(_children(path))
        return Item(path, "rubbish" if rubbish else "entry", key, last_used_s, inodes)

    def _pending_bytes(self, item: Item) -> int:
        """What the process that holds an entry has announced and not yet written."""
        if item.kind != "entry":
            return 0
        try:
            manifest = Manifest.load(item.path)
        except (Damaged, OtherVersion):
            return 0
        missing = manifest.expected_bytes - manifest.num_bytes
        if manifest.complete or missing <= 0:
            return 0
        with self._locks.try_hold(item.path.name) as free:
            return 0 if free else missing


def _share(item: Item, pinned: Collection[Inode]) -> float:
    shared = sum(size for inode, size in item.inodes.items() if inode in pinned)
    return shared / max(item.num_bytes, 1)


def _record_item(path: Path) -> Item:
    if path.name.startswith(TEMP_PREFIX):
        return Item(path, "rubbish", RECORDS_LOCK, 0.0, _inodes([path]))
    last_used_s = 0.0
    with suppress(FileNotFoundError):
        last_used_s = path.stat().st_mtime
    return Item(path, "record", None, last_used_s, _inodes([path]))


def _children(directory: Path) -> list[Path]:
    try:
        return [directory / name for name in sorted(os.listdir(directory))]
    except FileNotFoundError:  # not there yet, or deleted while we look
        return []


def _ours(directory: Path) -> list[Path]:
    return [
        path
        for path in _children(directory)
        if not path.name.startswith(".") or path.name.startswith(TEMP_PREFIX)
    ]


def _inodes(paths: Iterable[Path]) -> dict[Inode, int]:
    inodes = {}
    for path in paths:
        with suppress(FileNotFoundError):
            stat = path.lstat()
            inodes[stat.st_dev, stat.st_ino] = stat.st_size
    return inodes
