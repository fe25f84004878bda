"""Finds the entry that shares the longest prefix with a new one, to the exact token.

Whole blocks are compared by their chain hashes; inside the first block that differs, by token ids.
Donors are not locked: their blocks never change in place, so a link or an open file stays good
when a donor is evicted meanwhile, and checksums catch a block that was replaced.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from longread.atomic import Damaged, FileStamp, read_verified, write_atomic
from longread.errors import StoreError
from longread.manifest import TOKENS_NAME, Manifest, OtherVersion, block_name


@dataclass(frozen=True)
class SharedBlock:
    """The first `num_rows` of a donor block's `donor_rows` rows."""

    path: Path
    stamp: FileStamp
    block_idx: int
    num_rows: int
    donor_rows: int


def shared_blocks(
    entry_dirs: Iterable[Path], manifest: Manifest, token_ids: np.ndarray
) -> list[SharedBlock]:
    """The longest run of blocks, from the document's start, that another entry has on disk.

    entry_dirs: candidates; damaged ones and those of another base are passed over.
    All blocks but the last are whole; `num_rows` of the last may be less than this entry's block.
    """
    best: list[SharedBlock] = []
    best_len = 0
    for path in entry_dirs:
        try:
            donor = Manifest.load(path)
        except (Damaged, OtherVersion, StoreError):
            continue
        same_layout = donor.block_len == manifest.block_len and donor.row_dims == manifest.row_dims
        if donor.key == manifest.key or donor.base != manifest.base or not same_layout:
            continue
        num_shared = min(_common_len(path, donor, manifest, token_ids), donor.num_ready)
        if num_shared > best_len:
            best, best_len = _blocks(path, donor, num_shared), num_shared
    return best


def link_or_copy(shared: SharedBlock, entry_dir: Path, make_room: Callable[[int], None]) -> bool:
    """Give an entry a donor's whole block; False where the donor no longer has it.

    make_room: called with the bytes needed where the disk has no hard links. Raises StoreError.
    """
    target = entry_dir / block_name(shared.block_idx)
    try:
        os.link(shared.path, target)
        return True
    except FileNotFoundError:
        return False
    except OSError:  # a disk without hard links, or a file with too many of them
        make_room(shared.stamp.num_bytes)
    try:
        content = read_verified(shared.path, shared.stamp)
    except Damaged:
        return False
    write_atomic(target, [memoryview(content)])
    return True


def _common_len(path: Path, donor: Manifest, manifest: Manifest, token_ids: np.ndarray) -> int:
    num_blocks = 0
    for ours, theirs in zip(manifest.chain, donor.chain, strict=False):
        if ours != theirs:
            break
        num_blocks += 1
    start = num_blocks * manifest.block_len
    if start >= min(len(token_ids), donor.num_tokens):
        return min(start, len(token_ids))
    try:
        # Verified, since one wrong id here would hand out the rows of other tokens.
        donor_ids = np.frombuffer(read_verified(path / TOKENS_NAME, donor.tokens), dtype="<i4")
    except (Damaged, StoreError):
        return start
    end = min(len(token_ids), donor.num_tokens, start + manifest.block_len)
    different = np.flatnonzero(token_ids[start:end] != donor_ids[start:end])
    return start + int(different[0]) if len(different) else end


def _blocks(path: Path, donor: Manifest, num_shared: int) -> list[SharedBlock]:
    blocks = []
    for start in range(0, num_shared, donor.block_len):
        block_idx = start // donor.block_len
        donor_rows = min(donor.block_len, donor.num_tokens - start)
        num_rows = min(donor_rows, num_shared - start)
        stamp = donor.blocks[block_idx]
        file = path / block_name(block_idx)
        blocks.append(SharedBlock(file, stamp, block_idx, num_rows, donor_rows))
    return blocks
