"""The store as a whole: cap and eviction, locks, housekeeping, directories, disk errors."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
import threading
import time
from collections import namedtuple
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from kv_rows import BASE, BLOCK_LEN, ROW_DIMS, Notices, fill, ids, make_store, read_ready, rows

from longread import space
from longread.errors import StoreError, UsageError
from longread.plain_text import size_text
from longread.store import Store

N = 4 * BLOCK_LEN


@pytest.fixture(autouse=True)
def no_fsync(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a crash leaves is test_store_crash.py's; here fsync only takes time."""
    monkeypatch.setattr(os, "fsync", lambda fd: None)


def entry_bytes(tmp_path: Path) -> int:
    """Bytes that one entry of N tokens takes."""
    store = Store(tmp_path / "measure", 1 << 30, block_len=BLOCK_LEN)
    fill(store, ids(N))
    return store.info().used_bytes


def age(store: Store, key: str, age_s: float) -> None:
    moment = time.time() - age_s
    os.utime(store.root / "kv" / key / "manifest.json", (moment, moment))


def keys(store: Store) -> set[str]:
    return {entry.key for entry in store.list_entries()}


@contextmanager
def other_process_holds(store: Store, key: str) -> Iterator[None]:
    """Another process that holds the entry's lock until the block ends."""
    code = (
        "import sys; from filelock import FileLock\n"
        "with FileLock(sys.argv[1]): print('held', flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", code, str(store.root / "locks" / f"{key}.lock")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdin is not None
        assert process.stdout.readline() == b"held\n"
        try:
            yield
        finally:
            process.stdin.close()
            process.wait()


def test_looking_at_a_store_that_is_not_there_creates_nothing(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    assert store.list_entries() == [] and list(store.verify()) == []
    assert store.info().used_bytes == 0 and store.info().free_bytes > 0
    assert store.prune(max_bytes=0).num_removed == 0
    assert store.load_record("ab12") is None
    with pytest.raises(UsageError):
        store.remove("ab")
    assert not store.root.exists()


def test_listing_needs_no_torch(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    key = fill(store, ids(N))
    code = (
        "import sys; from pathlib import Path; from longread.store import Store\n"
        "store = Store(Path(sys.argv[1]), 1); print(store.list_entries()[0].key)\n"
        "list(store.verify()); store.info(); assert 'torch' not in sys.modules"
    )
    command = [sys.executable, "-c", code, str(store.root)]
    result = subprocess.run(command, check=True, capture_output=True, text=True)
    assert result.stdout.strip() == key


def test_listing_shows_what_people_need(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    whole, part = fill(store, ids(N)), fill(store, ids(N, seed=1), blocks=2)
    age(store, whole, 60)
    first, second = store.list_entries()
    assert (first.key, first.state, first.num_ready) == (part, "partial", 2 * BLOCK_LEN)
    assert (second.key, second.state, second.num_ready) == (whole, "complete", N)
    assert (second.names, second.model, second.num_tokens) == (("book.pdf",), "tiny", N)
    assert second.num_bytes > first.num_bytes > 0
    assert time.time() - second.last_used_s == pytest.approx(60, abs=20)
    (store.root / "kv" / whole / "block-00001.safetensors").unlink()
    (store.root / "kv" / part / "manifest.json").write_text("{")
    assert {entry.state for entry in store.list_entries()} == {"damaged"}
    assert (store.info().num_entries, store.info().num_damaged) == (2, 2)


def test_the_new_name_of_a_document_is_noted(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    key = fill(store, ids(N))
    with store.entry(BASE, ids(N), row_dims=ROW_DIMS, names=["renamed.pdf"]) as entry:
        assert entry.complete
    assert store.find(key[:8]).names == ("renamed.pdf",)


def test_find_wants_one_match(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    made = [fill(store, ids(1, seed=seed)) for seed in range(17)]  # two share a first digit
    assert store.find(made[3]).key == made[3]
    first_digits = [key[0] for key in made]
    ambiguous = next(digit for digit in first_digits if first_digits.count(digit) > 1)
    for prefix in (ambiguous, "zz", ""):
        with pytest.raises(UsageError):
            store.find(prefix)


def test_using_an_entry_protects_it_from_eviction(tmp_path: Path) -> None:
    size = entry_bytes(tmp_path)
    store = make_store(tmp_path, max_bytes=int(3.5 * size))
    made = [fill(store, ids(N, seed=seed)) for seed in range(3)]
    for position, key in enumerate(made):
        age(store, key, 100 - position)
    fill(store, ids(N))  # a use
    notices = Notices()
    store.reserve(size, notice=notices)
    assert keys(store) == {made[0], made[2]}
    assert len(notices) == 1 and "1 old entry removed" in notices[0]


def test_eviction_stops_when_there_is_room(tmp_path: Path) -> None:
    size = entry_bytes(tmp_path)
    store = make_store(tmp_path, max_bytes=int(3.5 * size))
    made = [fill(store, ids(N, seed=seed)) for seed in range(3)]
    for position, key in enumerate(made):
        age(store, key, 100 - position)
    store.reserve(int(2.2 * size))
    assert keys(store) == {made[2]}
    store.reserve(int(2.2 * size))
    assert keys(store) == {made[2]}


def test_times_that_have_not_come_do_not_keep_an_entry(tmp_path: Path) -> None:
    size = entry_bytes(tmp_path)
    store = make_store(tmp_path, max_bytes=int(3.5 * size))
    made = [fill(store, ids(N, seed=seed)) for seed in range(3)]
    age(store, made[0], -20 * 365 * 86400)  # while the clock was wrong
    age(store, made[1], -10 * 365 * 86400)
    age(store, made[2], 100)
    store.reserve(size)
    assert keys(store) == {made[0], made[2]}
    fill(store, ids(N, seed=3))
    store.reserve(size)
    assert made[0] not in keys(store) and made[2] in keys(store)
    assert store.prune(older_than_s=86400).num_removed == 0


def test_the_cap_holds_while_entries_are_written(tmp_path: Path) -> None:
    size = entry_bytes(tmp_path)
    store = make_store(tmp_path, max_bytes=int(2.5 * size))
    for seed in range(6):
        with store.entry(BASE, ids(N, seed=seed), row_dims=ROW_DIMS) as entry:
            entry.reserve(size)
            for start in range(0, N, BLOCK_LEN):
                entry.write_block(start, start + BLOCK_LEN, rows(ids(N, seed), start, start + 64))
                assert store.info().used_bytes <= 2.5 * size
            entry.finish()
    assert len(keys(store)) == 2


def test_more_than_the_cap_is_refused_before_anything_is_evicted(tmp_path: Path) -> None:
    size = entry_bytes(tmp_path)
    store = make_store(tmp_path, max_bytes=2 * size)
    made = fill(store, ids(N))
    with store.entry(BASE, ids(N, seed=1), row_dims=ROW_DIMS) as entry:
        with pytest.raises(StoreError, match="cache_size.*--no-cache") as raised:
            entry.reserve(3 * size)
    assert size_text(2 * size) in str(raised.value)
    assert keys(store) == {made}


def test_a_locked_entry_is_never_evicted(tmp_path: Path) -> None:
    size = entry_bytes(tmp_path)
    store = make_store(tmp_path, max_bytes=int(2.5 * size))
    made = [fill(store, ids(N, seed=seed)) for seed in range(2)]
    age(store, made[0], 100)
    with other_process_holds(store, made[0]):
        store.reserve(size)
        assert keys(store) == {made[0]}
        with pytest.raises(StoreError, match="in use"):
            store.reserve(2 * size)
        assert store.prune(max_bytes=0).num_skipped == 1
        with pytest.raises(StoreError, match="in use"):
            store.remove(made[0])
        assert [result.state for result in store.verify()] == ["in use"]
        assert keys(store) == {made[0]}


def test_what_another_process_has_announced_counts(tmp_path: Path) -> None:
    size = entry_bytes(tmp_path)
    store = make_store(tmp_path, max_bytes=int(2.5 * size))
    with store.entry(BASE, ids(N), row_dims=ROW_DIMS) as entry:
        entry.reserve(size)
        with pytest.raises(StoreError, match="in use"):
            store.reserve(2 * size)
        store.reserve(size)


def test_an_undeletable_entry_is_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    size = entry_bytes(tmp_path)
    store = make_store(tmp_path, max_bytes=int(2.5 * size))
    made = [fill(store, ids(N, seed=seed)) for seed in range(2)]
    age(store, made[0], 100)
    rename = os.rename

    def stubborn(source: Path, target: Path) -> None:
        if made[0] in str(source):
            raise PermissionError(errno.EPERM, "Operation not permitted")
        rename(source, target)

    monkeypatch.setattr(os, "rename", stubborn)
    notices = Notices()
    store.reserve(size, notice=notices)
    assert keys(store) == {made[0]}
    assert any("cannot delete" in notice and made[0] in notice for notice in notices)
    with pytest.raises(StoreError, match="deleted"):
        store.reserve(2 * size)
    with pytest.raises(StoreError, match="deleted"):
        store.remove(made[0])
    assert store.prune(max_bytes=0).num_skipped == 1


def test_shared_blocks_count_once_and_their_donor_goes_last(tmp_path: Path) -> None:
    size = entry_bytes(tmp_path)
    store = make_store(tmp_path, max_bytes=int(3.3 * size))
    donor = fill(store, ids(N))
    other = fill(store, ids(N, seed=1))
    longer = np.concatenate([ids(N), ids(BLOCK_LEN, seed=2)])
    age(store, other, 50)
    with store.entry(BASE, longer, row_dims=ROW_DIMS) as entry:
        assert store.info().used_bytes < 2.3 * size
        age(store, donor, 100)  # older than `other`, but deleting it frees next to nothing
        entry.reserve(2 * size)
        assert keys(store) == {donor, entry.key}
        entry.write_block(N, N + BLOCK_LEN, rows(longer, N, N + BLOCK_LEN))


DiskUsage = namedtuple("DiskUsage", "total used free")


def test_the_disk_must_have_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    size = entry_bytes(tmp_path)
    store = make_store(tmp_path)
    made = [fill(store, ids(N, seed=seed)) for seed in range(3)]
    for position, key in enumerate(made):
        age(store, key, 100 - position)

    def almost_full(path: Path) -> DiskUsage:
        return DiskUsage(1 << 40, 0, space.FREE_MARGIN_BYTES + size)

    monkeypatch.setattr(shutil, "disk_usage", almost_full)
    with pytest.raises(StoreError, match="free"):
        store.reserve(5 * size)
    assert keys(store) == set(made)  # evicting them all would not have been enough
    store.reserve(int(1.5 * size))
    assert keys(store) == set(made[1:])


def test_waiting_for_another_process_is_visible(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    key = fill(store, ids(N))
    notices = Notices()
    seen = threading.Event()

    def read() -> None:
        with store.entry(BASE, ids(N), row_dims=ROW_DIMS, notice=notices) as entry:
            assert read_ready(entry, ids(N)) == N
        seen.set()

    with other_process_holds(store, key):
        reader = threading.Thread(target=read)
        reader.start()
        deadline = time.monotonic() + 10
        while not notices and time.monotonic() < deadline:
            time.sleep(0.01)
        assert not seen.is_set()
        assert len(notices) == 1 and "waiting for another longread process" in notices[0]
        with pytest.raises(StoreError, match="--no-wait"):
            with store.entry(BASE, ids(N), row_dims=ROW_DIMS, wait=False):
                pass
    reader.join(10)
    assert seen.is_set()


def test_another_document_does_not_wait(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    key = fill(store, ids(N))
    with other_process_holds(store, key):
        with store.entry(BASE, ids(N, seed=1), row_dims=ROW_DIMS, wait=False) as entry:
            assert entry.num_ready == 0


def test_remove_takes_the_entry_its_records_and_its_lock(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    for record in ("aa11", "bb22", "cc33"):
        store.save_record(record, {"text": record})
    with store.entry(BASE, ids(N), row_dims=ROW_DIMS, records=["aa11", "bb22"]) as entry:
        entry.write_block(0, 64, rows(ids(N), 0, 64))
        key = entry.key
    other = np.concatenate([ids(N), ids(5, seed=1)])
    with store.entry(BASE, other, row_dims=ROW_DIMS, records=["bb22"]) as entry:
        kept = entry.key
    result = store.remove(key[:10])
    assert result.num_removed == 2 and result.freed_bytes > 0
    assert keys(store) == {kept}
    assert store.load_record("aa11") is None
    assert store.load_record("bb22") == {"text": "bb22"}
    assert not (store.root / "locks" / f"{key}.lock").exists()
    store.remove("cc33")
    assert store.load_record("cc33") is None


def test_prune_by_age_size_and_state(tmp_path: Path) -> None:
    size = entry_bytes(tmp_path)
    store = make_store(tmp_path)
    made = [fill(store, ids(N, seed=seed)) for seed in range(4)]
    part = fill(store, ids(N, seed=9), blocks=1)
    for position, key in enumerate(made):
        age(store, key, 1000 - position)
    age(store, made[0], 5000)
    result = store.prune(older_than_s=2000)
    assert (result.num_removed, keys(store)) == (1, {*made[1:], part})
    assert result.freed_bytes == pytest.approx(size, abs=20)
    store.prune(partial=True)
    assert keys(store) == set(made[1:])
    store.prune(max_bytes=2 * size + 100)  # manifests differ by the digits of their times
    assert keys(store) == set(made[2:])
    (store.root / "locks" / "of_an_entry_that_never_came_to_be.lock").touch()
    store.prune(max_bytes=0)
    assert store.info().used_bytes == 0
    assert [path.name for path in (store.root / "locks").iterdir()] == ["store.lock"]


def test_records_count_and_are_evicted_like_entries(tmp_path: Path) -> None:
    store = make_store(tmp_path, max_bytes=100_000)
    for number in range(4):
        store.save_record(f"{number:04}", {"text": "x" * 30_000})
        os.utime(store.root / "documents" / f"{number:04}", (number + 1, number + 1))
    assert store.info().used_bytes <= 100_000
    assert [store.load_record(f"{number:04}") is None for number in range(4)] == [
        True,
        False,
        False,
        False,
    ]


def test_an_entry_of_another_format_is_set_aside_and_again(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    for _ in range(2):
        key = fill(store, ids(N))
        path = store.root / "kv" / key / "manifest.json"
        text = path.read_text()
        path.write_text(text.replace('"version":1', '"version":0'))
        assert path.read_text() != text
        with store.entry(BASE, ids(N), row_dims=ROW_DIMS) as entry:
            assert entry.num_ready == 0
    assert [path.name for path in (store.root / "kv").iterdir()] == [f"{key}.v0"]
    assert store.prune(max_bytes=0).num_removed == 1
    assert list((store.root / "kv").iterdir()) == []


def test_verify_finds_every_damaged_file(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    sound, hurt, lost = (fill(store, ids(N, seed=seed)) for seed in range(3))
    store.save_record("aa11", {"text": "sound"})
    store.save_record("bb22", {"text": "hurt"})
    for path in (
        store.root / "kv" / hurt / "block-00001.safetensors",
        store.root / "kv" / hurt / "block-00003.safetensors",
        store.root / "kv" / lost / "manifest.json",
        store.root / "documents" / "bb22",
    ):
        content = bytearray(path.read_bytes())
        content[-20] ^= 1
        path.write_bytes(content)
    notices = Notices()
    results = {result.key: result for result in store.verify(notice=notices)}
    assert {key for key, result in results.items() if result.state == "ok"} == {sound, "aa11"}
    assert [problem.split()[0] for problem in results[hurt].problems] == [
        "block-00001.safetensors",
        "block-00003.safetensors",
    ]
    assert results[lost].state == results["bb22"].state == "damaged"
    assert len(notices) == 4
    assert {result.state for result in store.verify()} == {"ok"}
    assert store.find(hurt).state == "partial"
    assert store.info().quarantine_bytes > 0
    fill(store, ids(N, seed=1))
    assert [result.key for result in store.verify(hurt[:9])] == [hurt]


def test_what_others_left_in_the_cache_is_passed_over(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    key = fill(store, ids(N))
    store.save_record("r", {"pages": [1]})
    used = store.info().used_bytes
    strays = [store.root / part / name for part in ("kv", "documents") for name in (".DS_Store",)]
    strays += [store.root / "kv" / "file", store.root / "locks" / ".DS_Store"]
    for path in strays:
        path.write_bytes(b"x")
    (store.root / "documents" / "folder").mkdir()
    assert keys(store) == {key}
    assert store.info().used_bytes == used
    assert [result.state for result in store.verify()] == ["ok", "ok"]
    assert store.prune().num_removed == 0
    assert fill(store, ids(N, seed=1)) != key
    store.prune(max_bytes=0)
    assert keys(store) == set()
    assert all(path.exists() for path in strays)


def test_the_quarantine_stays_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = make_store(tmp_path)
    key = fill(store, ids(N))
    path = store.root / "kv" / key / "block-00000.safetensors"
    monkeypatch.setattr(space, "QUARANTINE_MAX_BYTES", int(1.5 * path.stat().st_size))
    for seed in range(5):
        path = store.root / "kv" / fill(store, ids(N, seed=seed)) / "block-00000.safetensors"
        path.write_bytes(bytes(path.stat().st_size))
    list(store.verify())
    assert 0 < store.info().quarantine_bytes <= space.QUARANTINE_MAX_BYTES
    store.prune()
    assert store.info().quarantine_bytes == 0


def test_wide_directories_are_tightened(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    key = fill(store, ids(N))
    for path in (store.root, store.root / "kv", store.root / "documents"):
        path.chmod(0o755)
    fill(store, ids(N))
    for path in (store.root, store.root / "kv", store.root / "documents"):
        assert path.stat().st_mode & 0o777 == 0o700
    store.root.chmod(0o755)
    (store.root / "someone_elses").touch()
    fill(store, ids(N))
    assert store.root.stat().st_mode & 0o777 == 0o755  # not ours alone
    assert store.find(key).state == "complete"


def test_a_root_that_cannot_be_a_directory(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    for root in (tmp_path / "file", tmp_path / "file" / "below"):
        store = Store(root, 1 << 30)
        with pytest.raises(StoreError, match="--no-cache"):
            fill(store, ids(N))
        with pytest.raises(StoreError, match="--no-cache"):
            store.save_record("aa", {})


def test_a_directory_that_may_not_be_written(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    key = fill(store, ids(N))
    user = os.geteuid()
    if user == 0:
        os.seteuid(65534)
    else:
        store.root.chmod(0)
    try:
        calls = (
            lambda: fill(store, ids(N)),
            lambda: store.save_record("aa", {}),
            lambda: store.load_record("aa"),
            lambda: store.list_entries(),
            lambda: store.remove(key),
            lambda: list(store.verify()),
        )
        for call in calls:
            with pytest.raises(StoreError, match="LONGREAD_CACHE_DIR"):
                call()
    finally:
        os.seteuid(user)
        store.root.chmod(0o700)


@pytest.mark.parametrize("call", ["write", "fsync", "replace"])
def test_a_full_disk_keeps_what_was_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    def full(*arguments: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    store = make_store(tmp_path)
    with pytest.raises(StoreError, match="No space left.*cache prune.*--no-cache"):
        with store.entry(BASE, ids(N), row_dims=ROW_DIMS) as entry:
            entry.write_block(0, 64, rows(ids(N), 0, 64))
            monkeypatch.setattr(os, call, full)
            entry.write_block(64, 128, rows(ids(N), 64, 128))
    monkeypatch.undo()
    assert not any(path.name.startswith(".tmp") for path in store.root.rglob("*"))
    with store.entry(BASE, ids(N), row_dims=ROW_DIMS) as entry:
        assert read_ready(entry, ids(N)) == 64
