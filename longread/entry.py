"""One KV entry that this process has locked: its blocks of rows and its extras.

Owns reading (verified before anything is handed out), damage (quarantine, a shorter `num_ready`),
writing (each block is a checkpoint in its final form) and borrowing the blocks of another entry.
Which entry, its lock and the room for it are store.py's.
"""

from __future__ import annotations

import os
from collections.abc import Generator, Mapping, Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from longread.atomic import (
    Damaged,
    FileStamp,
    check_file,
    disk_errors,
    sync_dir,
    write_atomic,
)
from longread.block import Block, first_rows, shape_problem
from longread.events import Notice, NoticeFn
from longread.manifest import MANIFEST_NAME, TOKENS_NAME, Manifest, block_name, extra_name
from longread.prefix import SharedBlock, link_or_copy
from longread.space import Space
from longread.tensorfile import ReadFiles, read_each, read_tensors, write_tensors

if TYPE_CHECKING:
    from torch import Tensor

MIN_SHARED_ROWS = 64  # of a block shared in part: fewer are read anew sooner than the donor's block
_USED_LATE = "an entry was used after its `with` block"


def mark_used(entry_dir: Path) -> None:
    """Note the time for the least-recently-used order, where the disk can."""
    with suppress(OSError):
        os.utime(entry_dir / MANIFEST_NAME)


class Entry:
    """The rows of one token sequence on disk; `Store.entry` makes it and holds its lock."""

    def __init__(self, path: Path, manifest: Manifest, space: Space, notice: NoticeFn) -> None:
        self._path = path
        self._manifest = manifest
        self._space = space
        self._notice = notice
        self._tail: SharedBlock | None = None
        self._is_locked = True

    @property
    def key(self) -> str:
        return self._manifest.key

    @property
    def num_tokens(self) -> int:
        return self._manifest.num_tokens

    @property
    def block_len(self) -> int:
        """Rows of each block but the last."""
        return self._manifest.block_len

    @property
    def num_ready(self) -> int:
        """Tokens from the start whose rows `read_blocks` will give, unless one proves damaged."""
        num_ready = self._manifest.num_ready
        tail = self._tail
        if tail is not None and num_ready == tail.block_idx * self.block_len:
            return num_ready + tail.num_rows
        return num_ready

    @property
    def complete(self) -> bool:
        """Whether `finish` was called and nothing was found damaged since."""
        return self._manifest.complete

    @property
    def num_bytes(self) -> int:
        """Bytes of the entry's payload on disk, blocks shared with other entries included."""
        return self._manifest.num_bytes

    def reserve(self, num_bytes: int) -> None:
        """Announce that `num_bytes` more will be written and make room. Raises StoreError."""
        self._make_room(num_bytes)
        self._manifest.expected_bytes = self.num_bytes + num_bytes
        self._save()

    def read_blocks(
        self, start: int = 0, read: ReadFiles = read_each
    ) -> Generator[Block, None, None]:
        """Rows [start, num_ready), block by block, each verified before it is given.

        start: a multiple of the block length. The tensors are the caller's to keep or change; they
        are on the CPU, or where `read` puts them, which may read blocks ahead of the one given.
        A damaged block goes to quarantine with a Notice and ends the iteration, and `num_ready` is
        then where it began. Blocks behind it stay: when `write_block` has filled the gap,
        `num_ready` counts them again. The last block given may end inside a block (its `end` is
        `num_ready`): rows that another document's entry shares. `write_block` wants that block
        whole, so the caller goes on from these rows and adds its share to the summed tensors.
        """
        assert start % self.block_len == 0, f"{start} is inside a block"
        while start < self.num_ready:
            is_own = start // self.block_len in self._manifest.blocks
            start = yield from self._read_own(start, read) if is_own else self._read_tail()

    def write_block(self, start: int, end: int, tensors: Mapping[str, Tensor]) -> None:
        """Make rows [start, end) durable: a whole block, or the document's last, shorter one.

        tensors: any device; names as in the entry's row_dims. Replaces a block already there.
        Raises StoreError (disk full, not writable); the blocks before stay as they are.
        """
        block_idx = start // self.block_len
        assert (start, end) == self._bounds(block_idx), f"rows {start} to {end} are not a block"
        problem = shape_problem(tensors, self._manifest.row_dims, end - start)
        assert problem is None, problem
        stamp = self._write(block_name(block_idx), tensors)
        self._manifest.blocks[block_idx] = stamp
        self._save()

    def finish(self) -> None:
        """Mark the entry complete; every block must be there. Raises StoreError."""
        assert self._manifest.num_ready == self.num_tokens, "finish() before the last block"
        self._manifest.complete = True
        self._save()

    def write_extra(self, name: str, tensors: Mapping[str, Tensor]) -> None:
        """Keep by-products (an index) with the entry. name: letters, digits, `-`. StoreError."""
        assert name.replace("-", "").replace("_", "").isalnum(), f"bad extra name {name!r}"
        stamp = self._write(extra_name(name), tensors)
        self._manifest.extras[name] = stamp
        self._save()

    def read_extra(self, name: str) -> dict[str, Tensor] | None:
        """Verified by-products, or None where there are none or they were damaged (a Notice)."""
        stamp = self._manifest.extras.get(name)
        if stamp is None:
            return None
        try:
            return read_tensors(self._path / extra_name(name), stamp)
        except Damaged as error:
            self.drop_damaged(extra_name(name), error)
            return None

    def drop_damaged(self, file_name: str, error: Damaged) -> None:
        """Quarantine a payload file and write the manifest without it. Raises StoreError."""
        manifest = self._manifest
        consequence = "it will be made again"
        for name in [name for name in manifest.extras if extra_name(name) == file_name]:
            del manifest.extras[name]
        for block_idx in [number for number in manifest.blocks if block_name(number) == file_name]:
            del manifest.blocks[block_idx]
            manifest.complete = False
            start, end = self._bounds(block_idx)
            consequence = f"its {end - start} tokens will be read again"
        self._space.quarantine(self._path / file_name, self.key)
        self._save()
        message = f"cache entry {self.key[:12]}: {file_name} {error}; quarantined, {consequence}"
        self._notice(Notice(message))

    def refresh(self, token_ids: np.ndarray, names: Sequence[str], records: Sequence[str]) -> None:
        """Begin a use of the entry: sweep, repair the token ids, note the names, mark as used.

        Swept are temporary files, and blocks that a killed writer had not yet put in the manifest.
        """
        manifest = self._manifest
        known = {MANIFEST_NAME, *manifest.files()}
        with disk_errors("read", self._path):
            for name in os.listdir(self._path):
                if name not in known:
                    with suppress(OSError):
                        os.unlink(self._path / name)
        try:
            check_file(self._path / TOKENS_NAME, manifest.tokens)
        except Damaged as error:
            manifest.tokens = write_atomic(self._path / TOKENS_NAME, [token_ids.tobytes()])
            message = f"cache entry {self.key[:12]}: {TOKENS_NAME} {error}; written anew"
            self._notice(Notice(message))
        all_records = sorted({*manifest.records, *records})
        if (manifest.names, manifest.records) != (list(names), all_records):
            manifest.names, manifest.records = list(names), all_records
            self._save()
        mark_used(self._path)

    def borrow(self, blocks: Sequence[SharedBlock]) -> None:
        """Take over another entry's blocks: whole ones as hard links, the last one's rows later."""
        linked = False
        for shared in blocks[:1]:  # the donor was of use: it should not be the next to be evicted
            mark_used(shared.path.parent)
        for shared in blocks:
            if shared.block_idx in self._manifest.blocks:
                continue
            start, end = self._bounds(shared.block_idx)
            if shared.num_rows < end - start or shared.num_rows < shared.donor_rows:
                worth_it = shared.num_rows >= min(MIN_SHARED_ROWS, self.block_len // 4)
                self._tail = shared if worth_it else None
                break
            if not link_or_copy(shared, self._path, self._make_room):
                break
            self._manifest.blocks[shared.block_idx] = shared.stamp
            linked = True
        if linked:
            with disk_errors("write", self._path):
                sync_dir(self._path)
            self._save()

    def close(self) -> None:
        """The lock is about to go: nothing may be read or written after this."""
        self._is_locked = False

    def _make_room(self, num_bytes: int) -> None:
        self._space.reserve(num_bytes, own_key=self.key, notice=self._notice)

    def _write(self, name: str, tensors: Mapping[str, Tensor]) -> FileStamp:
        assert self._is_locked, _USED_LATE
        return write_tensors(self._path / name, tensors)

    def _save(self) -> None:
        assert self._is_locked, _USED_LATE
        self._manifest.save(self._path)

    def _read_own(self, start: int, read: ReadFiles) -> Generator[Block, None, int]:
        """Give the own blocks from `start` on; returns where they, or the undamaged ones, end."""
        stamps = self._manifest.blocks
        last = first = start // self.block_len
        while last in stamps:
            last += 1
        files = [(self._path / block_name(i), stamps[i]) for i in range(first, last)]
        with closing(read(files)) as tensors_of_blocks:
            for block_idx in range(first, last):
                assert self._is_locked, _USED_LATE
                start, end = self._bounds(block_idx)
                try:
                    tensors = self._checked(next(tensors_of_blocks), end - start)
                except Damaged as error:
                    self.drop_damaged(block_name(block_idx), error)
                    return start
                yield Block(start, end, tensors)
                start = end
        return start

    def _read_tail(self) -> Generator[Block, None, int]:
        assert self._is_locked, _USED_LATE
        shared = self._tail
        assert shared is not None
        start, end = self._bounds(shared.block_idx)
        try:
            tensors = self._checked(read_tensors(shared.path, shared.stamp), shared.donor_rows)
        except Damaged:  # evicted or damaged: its own entry will deal with it
            self._tail = None
            return start
        row_dims = self._manifest.row_dims
        tensors = first_rows(tensors, row_dims, shared.num_rows, shared.donor_rows)
        if shared.num_rows == end - start:
            num_bytes = sum(tensor.nbytes for tensor in tensors.values())
            self._make_room(num_bytes)
            self.write_block(start, end, tensors)
        yield Block(start, start + shared.num_rows, tensors)
        return start + shared.num_rows

    def _checked(self, tensors: dict[str, Tensor], num_rows: int) -> dict[str, Tensor]:
        problem = shape_problem(tensors, self._manifest.row_dims, num_rows)
        if problem is not None:
            raise Damaged(f"holds other tensors ({problem})")
        return tensors

    def _bounds(self, block_idx: int) -> tuple[int, int]:
        start = block_idx * self.block_len
        return start, min(start + self.block_len, self.num_tokens)
