"""KV entries: writing, reading back, sharing prefixes, resuming, damage."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from kv_rows import (
    BASE,
    BLOCK_LEN,
    ROW_DIMS,
    Notices,
    fill,
    ids,
    is_right,
    make_store,
    read_ready,
    rows,
)
from safetensors.torch import load_file

from longread import entry as entry_module
from longread.store import Store

N = 5 * BLOCK_LEN + 17


@pytest.fixture(autouse=True)
def no_fsync(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a crash leaves is test_store_crash.py's; here fsync only takes time."""
    monkeypatch.setattr(os, "fsync", lambda fd: None)


def entry_dir(store: Store, key: str) -> Path:
    return store.root / "kv" / key


def ready(store: Store, token_ids: np.ndarray, notices: Notices | None = None) -> tuple[int, bool]:
    """(rows that read back right, complete) of what the store has for these tokens."""
    notice = notices if notices is not None else Notices()
    with store.entry(BASE, token_ids, row_dims=ROW_DIMS, notice=notice) as entry:
        num_ready = read_ready(entry, token_ids)
        return num_ready, entry.complete


@pytest.mark.parametrize("num_tokens", [1, 63, 64, 65, 1000])
def test_a_finished_entry_reads_back(tmp_path: Path, num_tokens: int) -> None:
    store = make_store(tmp_path)
    notices = Notices()
    fill(store, ids(num_tokens))
    assert ready(store, ids(num_tokens), notices) == (num_tokens, True)
    assert notices == []


def test_block_files_are_plain_safetensors_and_private(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    directory = entry_dir(store, fill(store, ids(N)))
    tensors = load_file(directory / "block-00001.safetensors")
    assert is_right(ids(N), BLOCK_LEN, 2 * BLOCK_LEN, tensors)
    for path in [store.root, *store.root.rglob("*")]:
        assert path.stat().st_mode & 0o777 == (0o700 if path.is_dir() else 0o600), path


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int8, torch.float8_e4m3fn]
)
def test_every_dtype_and_layout_survives(tmp_path: Path, dtype: torch.dtype) -> None:
    store = make_store(tmp_path)
    slab = torch.arange(2 * 3 * 40 * 5).reshape(2, 3, 40, 5).remainder(100).to(dtype)
    block = {"k": slab[:, :, 3:36], "odd": torch.ones(7, dtype=torch.uint8), "one": torch.tensor(2)}
    row_dims = {"k": 2, "odd": None, "one": None}
    with store.entry(BASE, ids(33), row_dims=row_dims) as entry:
        entry.write_block(0, 33, block)
    with store.entry(BASE, ids(33), row_dims=row_dims) as entry:
        (read,) = entry.read_blocks()
    for name, tensor in block.items():
        assert read.tensors[name].dtype == tensor.dtype
        assert torch.equal(read.tensors[name].float(), tensor.float())
    read.tensors["k"].zero_()  # the caller's own memory, not the file


def test_an_interrupted_prefill_resumes_behind_its_last_block(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    fill(store, ids(N), blocks=3)
    assert ready(store, ids(N)) == (3 * BLOCK_LEN, False)
    fill(store, ids(N))
    assert ready(store, ids(N)) == (N, True)


def test_all_blocks_without_finish_are_all_ready_but_not_complete(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    with store.entry(BASE, ids(80), row_dims=ROW_DIMS) as entry:
        entry.write_block(0, 64, rows(ids(80), 0, 64))
        entry.write_block(64, 80, rows(ids(80), 64, 80))
    assert ready(store, ids(80)) == (80, False)


def test_an_entry_without_rows_disappears(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    with store.entry(BASE, ids(N), row_dims=ROW_DIMS) as entry:
        assert (entry.num_ready, entry.complete) == (0, False)
    assert store.list_entries() == []
    assert list(store.root.rglob("*.lock")) == []


def test_an_appended_document_shares_whole_blocks_by_link(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    old = ids(N)
    longer = np.concatenate([old, ids(200, seed=1)])
    old_key = fill(store, old)
    assert ready(store, longer) == (N, False)  # to the exact token inside the donor's last block
    key = fill(store, longer)
    assert ready(store, longer) == (N + 200, True)
    assert ready(store, old) == (N, True)
    for block_idx in range(5):
        name = f"block-{block_idx:05d}.safetensors"
        assert (entry_dir(store, old_key) / name).samefile(entry_dir(store, key) / name)
    listed = sum(entry.num_bytes for entry in store.list_entries())
    shared = 5 * (entry_dir(store, key) / "block-00000.safetensors").stat().st_size
    assert store.info().used_bytes == listed - shared


def test_a_shortened_document_needs_no_prefill(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    fill(store, ids(N))
    short = ids(N)[: 2 * BLOCK_LEN + 40]
    with store.entry(BASE, short, row_dims=ROW_DIMS) as entry:
        assert read_ready(entry, short) == len(short)
        entry.finish()
    store.remove(store.list_entries()[1].key)  # the donor
    assert ready(store, short) == (len(short), True)


@pytest.mark.parametrize("changed", [0, 1, 63, 64, 65, 100, 200, N - 1])
def test_reuse_ends_at_the_first_changed_token(tmp_path: Path, changed: int) -> None:
    store = make_store(tmp_path)
    fill(store, ids(N))
    other = ids(N)
    other[changed] += 1
    num_ready, complete = ready(store, other)
    in_block = changed % BLOCK_LEN
    assert num_ready == (changed if in_block >= BLOCK_LEN // 4 else changed - in_block)
    assert not complete
    fill(store, other)
    assert ready(store, other) == (N, True)
    assert ready(store, ids(N)) == (N, True)


def test_the_longest_prefix_wins_and_partial_donors_count_what_they_have(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    fill(store, ids(N), blocks=2)
    fill(store, np.concatenate([ids(150), ids(100, seed=2)]))
    longer = np.concatenate([ids(N), ids(10, seed=3)])
    assert ready(store, longer)[0] == 150
    fill(store, ids(N), blocks=4)
    assert ready(store, longer)[0] == 4 * BLOCK_LEN


def test_a_resumed_entry_takes_what_another_has_meanwhile(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    longer = np.concatenate([ids(N), ids(10, seed=3)])
    fill(store, longer, blocks=1)
    fill(store, ids(N))
    assert ready(store, longer)[0] == N


def test_nothing_is_shared_across_bases_or_layouts(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    longer = np.concatenate([ids(N), ids(10, seed=3)])
    fill(store, ids(N), base=Store.base_key({"model": "other"}))
    assert ready(store, longer)[0] == 0
    fill(store, ids(N))
    with store.entry(BASE, longer, row_dims={"k": 2}) as entry:
        assert entry.num_ready == 0
    with store.entry(BASE, ids(N), row_dims={"k": 2}) as entry:
        assert entry.num_ready == 0
    other_blocks = Store(store.root, 1 << 30, block_len=32)
    assert ready(other_blocks, longer)[0] == 0


def test_base_key_depends_on_every_part() -> None:
    assert Store.base_key({"a": 1, "b": [2]}) == Store.base_key({"b": [2], "a": 1})
    assert Store.base_key({"a": 1}) != Store.base_key({"a": 2})


def test_sharing_works_on_a_disk_without_hard_links(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(source: object, target: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    store = make_store(tmp_path)
    fill(store, ids(N))
    longer = np.concatenate([ids(N), ids(200, seed=1)])
    fill(store, longer)
    shutil.rmtree(entry_dir(store, store.list_entries()[1].key))
    assert ready(store, longer) == (N + 200, True)


def test_a_donor_that_vanishes_only_shortens_what_is_ready(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    key = fill(store, ids(N))
    longer = np.concatenate([ids(N), ids(200, seed=1)])
    with store.entry(BASE, longer, row_dims=ROW_DIMS) as entry:
        assert entry.num_ready == N
        shutil.rmtree(entry_dir(store, key))
        assert read_ready(entry, longer) == 5 * BLOCK_LEN


def test_a_damaged_token_list_lends_no_wrong_rows(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    key = fill(store, ids(N))
    other = ids(N)
    other[100:] = ids(N, seed=9)[100:]
    (entry_dir(store, key) / "tokens.i32").write_bytes(other.tobytes())
    assert ready(store, other)[0] == BLOCK_LEN  # by the chain alone
    notices = Notices()
    assert ready(store, ids(N), notices) == (N, True)
    assert len(notices) == 1 and "tokens.i32" in notices[0] and "written anew" in notices[0]


@pytest.mark.parametrize("how", ["flip", "truncate", "delete", "extend", "empty"])
def test_a_damaged_block_is_quarantined_and_only_it_is_redone(tmp_path: Path, how: str) -> None:
    store = make_store(tmp_path)
    key = fill(store, ids(N))
    path = entry_dir(store, key) / "block-00002.safetensors"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    if how == "delete":
        path.unlink()
    else:
        content = {"flip": content, "truncate": content[:-3], "empty": b""}.get(how, content + b"x")
        path.write_bytes(content)
    notices = Notices()
    with store.entry(BASE, ids(N), row_dims=ROW_DIMS, notice=notices) as entry:
        assert entry.complete
        assert read_ready(entry, ids(N)) == 2 * BLOCK_LEN
        assert not entry.complete
        assert len(notices) == 1
        assert "block-00002" in notices[0] and "64 tokens will be read again" in notices[0]
        entry.write_block(128, 192, rows(ids(N), 128, 192))
        assert entry.num_ready == N  # the blocks behind it were kept
        assert [block.start for block in entry.read_blocks(192)] == [192, 256, 320]
        entry.finish()
    assert ready(store, ids(N)) == (N, True)
    assert len(list((store.root / "quarantine").iterdir())) == (0 if how == "delete" else 1)


def test_damage_of_a_shared_block_is_found_in_both_entries(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    longer = np.concatenate([ids(N), ids(200, seed=1)])
    keys = fill(store, ids(N)), fill(store, longer)
    with (entry_dir(store, keys[0]) / "block-00001.safetensors").open("r+b") as file:
        file.seek(500)
        file.write(b"damage")
    for tokens in (ids(N), longer):
        assert ready(store, tokens) == (BLOCK_LEN, False)
        fill(store, tokens)
        assert ready(store, tokens) == (len(tokens), True)


def test_a_damaged_manifest_drops_the_entry_with_one_line(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    path = entry_dir(store, fill(store, ids(N))) / "manifest.json"
    path.write_text(path.read_text().replace('"model":"tiny"', '"model":"timy"'))
    assert store.list_entries()[0].state == "damaged"
    notices = Notices()
    assert ready(store, ids(N), notices) == (0, False)
    assert len(notices) == 1 and "manifest.json" in notices[0]
    fill(store, ids(N))
    assert ready(store, ids(N)) == (N, True)


def test_another_format_version_is_absent_but_kept(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    key = fill(store, ids(N))
    path = entry_dir(store, key) / "manifest.json"
    path.write_text(path.read_text().replace('"version":1', '"version":99'))
    assert store.list_entries()[0].state == "other version"
    notices = Notices()
    assert ready(store, ids(N), notices) == (0, False)
    fill(store, ids(N))
    assert ready(store, ids(N)) == (N, True)
    states = {entry.key: entry.state for entry in store.list_entries()}
    assert states == {key: "complete", f"{key}.v99": "other version"}
    assert notices == []


def test_extras_come_back_or_are_absent(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    key = fill(store, ids(N))
    index = {"codes": torch.arange(60, dtype=torch.int8), "scale": torch.rand(3)}
    with store.entry(BASE, ids(N), row_dims=ROW_DIMS) as entry:
        assert entry.read_extra("index-int8-32") is None
        entry.write_extra("index-int8-32", index)
    notices = Notices()
    with store.entry(BASE, ids(N), row_dims=ROW_DIMS, notice=notices) as entry:
        read = entry.read_extra("index-int8-32")
        assert read is not None and all(torch.equal(read[name], index[name]) for name in index)
        path = entry_dir(store, key) / "extra-index-int8-32.safetensors"
        path.write_bytes(path.read_bytes()[:-1])
        assert entry.read_extra("index-int8-32") is None
        assert len(notices) == 1 and "extra-index-int8-32" in notices[0]
        assert entry.complete
    assert ready(store, ids(N)) == (N, True)


def test_left_over_files_are_swept(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    key = fill(store, ids(N), blocks=2)
    directory = entry_dir(store, key)
    (directory / ".tmp-block-00002.safetensors").write_bytes(b"half")
    (directory / "block-00002.safetensors").write_bytes(b"renamed, not yet in the manifest")
    shutil.copytree(directory, directory.with_name(key + ".new"))
    shutil.copytree(directory, directory.with_name(key + ".del"))
    assert ready(store, ids(N)) == (2 * BLOCK_LEN, False)
    assert [path.name for path in directory.parent.iterdir()] == [key]
    assert sorted(path.name for path in directory.iterdir()) == [
        "block-00000.safetensors",
        "block-00001.safetensors",
        "manifest.json",
        "tokens.i32",
    ]


def test_wrong_blocks_are_a_programmers_error(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    with store.entry(BASE, ids(N), row_dims=ROW_DIMS) as entry:
        with pytest.raises(AssertionError, match="not a block"):
            entry.write_block(0, 63, rows(ids(N), 0, 63))
        with pytest.raises(AssertionError, match="63 rows|64 rows"):
            entry.write_block(0, 64, rows(ids(N), 0, 63))
        with pytest.raises(AssertionError, match="row_dims"):
            entry.write_block(0, 64, {"q": torch.zeros(1)})
        with pytest.raises(AssertionError, match="finish"):
            entry.finish()
    with pytest.raises(AssertionError, match="with"):
        entry.write_block(0, 64, rows(ids(N), 0, 64))


def test_a_share_too_small_to_pay_is_not_taken(tmp_path: Path) -> None:
    assert entry_module.MIN_SHARED_ROWS == 64
    store = Store(tmp_path / "cache", 1 << 30)  # blocks of 4096
    first, second = ids(300), ids(300)
    second[63:] = ids(300, seed=4)[63:]
    with store.entry(BASE, first, row_dims=ROW_DIMS) as entry:
        entry.write_block(0, 300, rows(first, 0, 300))
    assert ready(store, second)[0] == 0
    second[63] = first[63]
    assert ready(store, second)[0] == 64
