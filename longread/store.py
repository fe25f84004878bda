"""The cache directory: document records and KV entries, found by what they were made from.

Owns which entry is opened and under which lock, and the housekeeping that `longread cache` offers.
One entry is entry.py's, one record records.py's, room and eviction space.py's.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from longread.atomic import (
    Damaged,
    FileStamp,
    disk_errors,
    ignore,
    sync_dir,
    write_atomic,
)
from longread.entry import Entry
from longread.errors import StoreError
from longread.events import Notice, NoticeFn
from longread.inventory import (
    EntryInfo,
    StoreInfo,
    VerifyResult,
    entry_info,
    match_key,
    verify_entry,
)
from longread.locks import Locks
from longread.manifest import (
    BLOCK_LEN,
    MANIFEST_NAME,
    TOKENS_NAME,
    Manifest,
    OtherVersion,
    base_key,
    chain_hashes,
    entry_key,
)
from longread.prefix import shared_blocks
from longread.records import DocumentRecords
from longread.space import Item, PruneResult, Space, used_bytes
from longread.store_dirs import DELETED_SUFFIX, NEW_SUFFIX, StoreDirs


class Store:
    """Everything below one directory, at most `max_bytes` of it; created at the first write."""

    base_key = staticmethod(base_key)

    def __init__(self, root: Path, max_bytes: int, *, block_len: int = BLOCK_LEN) -> None:
        self._dirs = StoreDirs(root)
        self._locks = Locks(self._dirs.locks)
        self._space = Space(self._dirs, self._locks, max_bytes)
        self._records = DocumentRecords(self._dirs, self._locks, self._space)
        self._block_len = block_len

    @property
    def root(self) -> Path:
        return self._dirs.root

    @contextmanager
    def entry(
        self,
        base: str,
        token_ids: np.ndarray,
        *,
        row_dims: Mapping[str, int | None],
        wait: bool = True,
        notice: NoticeFn = ignore,
        names: Sequence[str] = (),
        model: str = "",
        records: Sequence[str] = (),
    ) -> Iterator[Entry]:
        """The entry of one token sequence, locked against other processes inside the block.

        base: from `base_key`, over all that rows depend on beside the tokens.
        token_ids: [N] int32, N > 0. row_dims: for each tensor of a block, the dimension that counts
        rows, or None for a sum over the block's rows. names, model: shown by `cache ls`; records:
        keys of the document records that go when the entry is removed by hand.
        The longest prefix that another entry of this base has is taken over, and an entry into
        which nothing was written disappears. Raises StoreError, at once if another process holds
        the entry and `wait` is False; with `wait` a Notice says so after a moment.
        """
        token_ids = np.ascontiguousarray(token_ids, dtype="<i4")
        assert token_ids.ndim == 1 and len(token_ids), "token_ids must be [N], N > 0"
        key = entry_key(base, token_ids, self._block_len, row_dims)
        self._dirs.prepare()
        with self._locks.hold(key, wait=wait, notice=notice):
            self._clean_up(key)
            manifest = self._existing(key, notice)
            if manifest is None:
                manifest = Manifest(
                    key=key,
                    base=base,
                    block_len=self._block_len,
                    num_tokens=len(token_ids),
                    tokens=FileStamp(0, ""),
                    chain=chain_hashes(base, token_ids, self._block_len),
                    row_dims=dict(row_dims),
                    created_s=time.time(),
                    names=[],
                    model=model,
                    records=[],
                )
                self._create(manifest, token_ids)
            entry = Entry(self._dirs.entry(key), manifest, self._space, notice)
            try:
                entry.refresh(token_ids, names, records)
                if entry.num_ready < entry.num_tokens:
                    others = self._dirs.entry_dirs()
                    entry.borrow(shared_blocks(others, manifest, token_ids))
                yield entry
            finally:
                entry.close()
                if not manifest.blocks and not manifest.extras:
                    self._forget(key)

    def load_record(self, key: str, *, notice: NoticeFn = ignore) -> dict | None:
        """A document record, tuples come back as lists; None where there is none. StoreError."""
        return self._records.load(key, notice)

    def save_record(self, key: str, record: dict, *, notice: NoticeFn = ignore) -> None:
        """Keep a record: JSON data in which numpy arrays may stand as values. Raises StoreError."""
        self._records.save(key, record, notice)

    def reserve(self, num_bytes: int, *, notice: NoticeFn = ignore) -> None:
        """Make room for `num_bytes` of something new (else `Entry.reserve`). Raises StoreError."""
        self._dirs.prepare()
        self._space.reserve(num_bytes, notice=notice)

    def list_entries(self) -> list[EntryInfo]:
        """Every KV entry, last used first; damaged ones too. Raises StoreError."""
        return [entry_info(item) for item in self._entry_items()]

    def find(self, prefix: str) -> EntryInfo:
        """The entry whose key starts with `prefix`. Raises UsageError for none or several."""
        items = {item.path.name: item for item in self._entry_items()}
        return entry_info(items[match_key(prefix, list(items))])

    def info(self) -> StoreInfo:
        """Totals, the cap, and what the disk has free. Raises StoreError."""
        items = self._space.items()
        states = [entry_info(item).state for item in items if item.kind == "entry"]
        records = [item for item in items if item.kind == "record"]
        existing = next(path for path in (self.root, *self.root.parents) if os.path.exists(path))
        with disk_errors("look at", existing):
            free_bytes = shutil.disk_usage(existing).free
        in_quarantine = [item for item in items if item.path.parent == self._dirs.quarantine]
        return StoreInfo(
            root=self.root,
            max_bytes=self._space.max_bytes,
            used_bytes=used_bytes(items),
            free_bytes=free_bytes,
            num_entries=len(states),
            num_partial=states.count("partial"),
            num_damaged=states.count("damaged"),
            num_records=len(records),
            record_bytes=used_bytes(records),
            quarantine_bytes=used_bytes(in_quarantine),
        )

    def verify(self, prefix: str = "", *, notice: NoticeFn = ignore) -> Iterator[VerifyResult]:
        """Check every byte of the entries that `prefix` names (all, and the records, where empty).

        Damaged files are quarantined, so that the next use makes them anew. Yields a result as each
        entry is done; one that another process holds is passed over as `in use`. Raises UsageError
        for a prefix without entry, StoreError.
        """
        items = {item.path.name: item for item in self._entry_items()}
        keys = [match_key(prefix, list(items))] if prefix else list(items)
        for key in keys:
            with self._locks.try_hold(key) as free:
                if free:
                    yield verify_entry(items[key], self._space, notice)
                else:
                    yield VerifyResult(key, "entry", items[key].num_bytes, "in use")
        if not prefix:
            for item in self._record_items():
                key = item.path.name
                problem = self._records.check(key, notice)
                state, problems = ("damaged", (problem,)) if problem else ("ok", ())
                yield VerifyResult(key, "record", item.num_bytes, state, problems)

    def remove(self, prefix: str, *, notice: NoticeFn = ignore) -> PruneResult:
        """Delete the entry or record whose key starts with `prefix`, and an entry's own records.

        Raises UsageError for no or several matches, StoreError where it is in use or undeletable.
        """
        entries = {item.path.name: item for item in self._entry_items()}
        records = {item.path.name: item for item in self._record_items()}
        key = match_key(prefix, [*entries, *records])
        doomed = [records[key]] if key in records else []
        if key in entries:
            doomed.append(entries[key])
            others = [self._record_keys(other) for other in entries if other != key]
            own = set(self._record_keys(key)).difference(*others)
            doomed += [records[name] for name in own if name in records]
        chosen = {item.path for item in doomed}
        result = self._space.prune(lambda item: item.path in chosen, None, notice)
        if result.num_skipped:
            raise StoreError(
                f"cache entry {key[:12]} is in use by another longread process or cannot be "
                f"deleted; close it, or look at {self.root}"
            )
        return result

    def prune(
        self,
        *,
        older_than_s: float | None = None,
        max_bytes: int | None = None,
        partial: bool = False,
        notice: NoticeFn = ignore,
    ) -> PruneResult:
        """Delete what was not used for `older_than_s` seconds, partial and damaged entries if
        `partial`, then the least recently used down to `max_bytes`; left-overs always.

        0 bytes empties the store. What is in use stays and is counted. Raises StoreError.
        """
        limit_s = time.time() - older_than_s if older_than_s is not None else 0.0

        def is_chosen(item: Item) -> bool:
            if older_than_s is not None and item.last_used_s < limit_s:
                return True
            if not partial or item.kind != "entry":
                return False
            return entry_info(item).state in ("partial", "damaged")

        return self._space.prune(is_chosen, max_bytes, notice)

    def _entry_items(self) -> list[Item]:
        return [item for item in reversed(self._space.items()) if item.kind == "entry"]

    def _record_items(self) -> list[Item]:
        return [item for item in self._space.items() if item.kind == "record"]

    def _record_keys(self, key: str) -> list[str]:
        try:
            return Manifest.load(self._dirs.entry(key)).records
        except (Damaged, OtherVersion):
            return []

    def _clean_up(self, key: str) -> None:
        """Delete what a killed writer or eviction left beside an entry whose lock we hold."""
        for suffix in (NEW_SUFFIX, DELETED_SUFFIX):
            self._delete(self._dirs.entry(key + suffix))

    def _existing(self, key: str, notice: NoticeFn) -> Manifest | None:
        """The entry's manifest; None where there is none that can be used, its place then free."""
        path = self._dirs.entry(key)
        if not os.path.exists(path):
            return None
        try:
            manifest = Manifest.load(path)
            if manifest.key != key:
                raise Damaged("belongs to another entry")
            return manifest
        except OtherVersion as other:  # the key covers the version, so only by hand
            aside = path.with_name(f"{key}.v{other}")
            if os.path.exists(aside):
                self._delete(aside)
            with disk_errors("set aside", path):
                os.rename(path, aside)
        except Damaged as error:
            self._space.quarantine(path / MANIFEST_NAME, key)
            self._delete(path)
            message = f"cache entry {key[:12]}: {MANIFEST_NAME} {error}; quarantined, "
            notice(Notice(message + "the document is read again"))
        return None

    def _create(self, manifest: Manifest, token_ids: np.ndarray) -> None:
        path = self._dirs.entry(manifest.key)
        staging = self._dirs.entry(manifest.key + NEW_SUFFIX)
        with disk_errors("write", path):
            staging.mkdir(mode=0o700)
            manifest.tokens = write_atomic(staging / TOKENS_NAME, [token_ids.tobytes()])
            manifest.save(staging)
            os.rename(staging, path)
            sync_dir(path.parent)

    def _forget(self, key: str) -> None:
        self._delete(self._dirs.entry(key))
        self._locks.discard(key)

    def _delete(self, path: Path) -> None:
        with disk_errors("delete", path):
            self._space.delete(path)
