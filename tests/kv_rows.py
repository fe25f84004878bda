"""The campaigns' rows and a few habits of the store's tests, under one import."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np

from longread.entry import Entry
from longread.events import Notice
from longread.store import Store

SCRIPTS = Path(__file__).parents[1] / "scripts"
_spec = importlib.util.spec_from_file_location("campaign_rows", SCRIPTS / "campaign_rows.py")
assert _spec is not None and _spec.loader is not None
campaign_rows = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(campaign_rows)

ROW_DIMS, rows, is_right = campaign_rows.ROW_DIMS, campaign_rows.rows, campaign_rows.is_right
BASE = Store.base_key({"model": "test"})
BLOCK_LEN = 64


def ids(num_tokens: int, seed: int = 0) -> np.ndarray:
    """[num_tokens] random int32 token ids; the same seed gives the same beginning."""
    return np.random.default_rng(seed).integers(0, 50000, num_tokens, dtype=np.int32)


def make_store(tmp_path: Path, max_bytes: int = 1 << 30) -> Store:
    return Store(tmp_path / "cache", max_bytes, block_len=BLOCK_LEN)


def read_ready(entry: Entry, token_ids: np.ndarray) -> int:
    """Read all that is ready, check every row, and return how many there are."""
    end = 0
    for block in entry.read_blocks():
        assert block.start == end
        assert is_right(token_ids, block.start, block.end, block.tensors)
        end = block.end
    assert end == entry.num_ready
    return end


def fill(
    store: Store, token_ids: np.ndarray, *, blocks: int | None = None, base: str = BASE
) -> str:
    """Do what prefill does: read what is there, write the missing blocks, finish. Returns the key.

    blocks: stop before this block number, as an interrupted prefill does.
    """
    with store.entry(base, token_ids, row_dims=ROW_DIMS, names=["book.pdf"], model="tiny") as entry:
        read_ready(entry, token_ids)
        while entry.num_ready < entry.num_tokens:
            block_idx = entry.num_ready // BLOCK_LEN
            if block_idx == blocks:
                return entry.key
            start = block_idx * BLOCK_LEN
            end = min(start + BLOCK_LEN, entry.num_tokens)
            entry.write_block(start, end, rows(token_ids, start, end))
        entry.finish()
        return entry.key


class Notices(list[str]):
    """A NoticeFn that keeps the messages."""

    def __call__(self, notice: Notice) -> None:
        self.append(notice.message)
