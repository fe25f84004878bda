"""Files through pinned buffers: the same bytes in the same order, and nothing left behind."""

from __future__ import annotations

import gc
import os
import shutil
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
from kv_rows import BASE, BLOCK_LEN, ROW_DIMS, Notices, fill, ids, is_right, make_store, rows
from torch import Tensor

from longread import pinned
from longread.atomic import Damaged, FileStamp
from longread.cache import KVCache
from longread.errors import ModelError, StoreError
from longread.ingest import restore
from longread.manifest import BLOCK_LEN as REAL_BLOCK_LEN
from longread.store import Store
from longread.tensorfile import ReadFiles, read_each, write_tensors
from longread.weights import load_weights

CHUNKS = [1, 63, 64, 1000, 1 << 20]  # bytes of a buffer; a file of `files` has 300 to 2,000
N = 5 * BLOCK_LEN + 21


@pytest.fixture(autouse=True)
def nothing_left(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """No thread of ours and no open file of the tests outlives a test."""
    yield
    gc.collect()
    assert not [t.name for t in threading.enumerate() if t.name.startswith("longread-pinned")]
    opened = [path.resolve() for path in Path("/proc/self/fd").glob("*")]
    assert not [path for path in opened if path.is_relative_to(tmp_path_factory.getbasetemp())]


@pytest.fixture
def files(tmp_path: Path) -> tuple[list[tuple[Path, FileStamp]], list[dict[str, Tensor]]]:
    """Seven files of odd sizes and what is in them."""
    contents = []
    for i in range(7):
        contents.append(
            {
                "k": torch.randn(2, 5 + i, 3).to(torch.bfloat16),
                "sum": torch.randn(3 + 40 * i),
                "codes": torch.randint(-128, 128, (i, 7), dtype=torch.int8),
            }
        )
    paths = [tmp_path / f"{i}.safetensors" for i in range(7)]
    stamps = [write_tensors(path, content) for path, content in zip(paths, contents, strict=True)]
    return list(zip(paths, stamps, strict=True)), contents


def _reader(device: str, chunk_bytes: int = 100, num_threads: int = 3) -> ReadFiles:
    return partial(
        pinned.read_ahead,
        device=torch.device(device),
        chunk_bytes=chunk_bytes,
        num_threads=num_threads,
    )


def _same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    return found.keys() == expected.keys() and all(
        found[name].dtype == tensor.dtype and torch.equal(found[name].cpu(), tensor)
        for name, tensor in expected.items()
    )


def _flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-3] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("chunk_bytes", CHUNKS)
@pytest.mark.parametrize("num_threads", [1, 3, 20])
def test_files_come_whole_and_in_order(files, device: str, chunk_bytes: int, num_threads) -> None:
    listed, contents = files
    found = list(_reader(device, chunk_bytes, num_threads)(listed))
    assert len(found) == len(contents)
    assert all(_same(*pair) for pair in zip(found, contents, strict=True))
    assert all(tensor.device.type == device for tensor in found[-1].values())


def test_the_last_files_tensors_may_be_kept_and_changed(files, device: str) -> None:
    listed, contents = files
    kept = []
    for tensors in _reader(device)(listed):
        tensors["sum"] += 1
        kept.append(tensors)
    for tensors, content in zip(kept, contents, strict=True):
        assert torch.equal(tensors["sum"].cpu(), content["sum"] + 1)
        assert torch.equal(tensors["k"].cpu(), content["k"])


def test_no_files_are_no_work() -> None:
    assert list(_reader("cpu")([])) == []


@pytest.mark.parametrize("chunk_bytes", CHUNKS)
def test_damage_is_told_at_its_turn(files, device: str, chunk_bytes: int) -> None:
    listed, contents = files
    _flip(listed[4][0])
    reading = _reader(device, chunk_bytes)(listed)
    for i in range(4):
        assert _same(next(reading), contents[i])
    with pytest.raises(Damaged, match="does not match its checksum"):
        next(reading)


def test_a_file_that_is_no_tensor_file_is_damaged(tmp_path: Path, device: str) -> None:
    from longread.atomic import write_atomic

    for content in (b"x", b"\xff" * 40, (4).to_bytes(8, "little") + b"null"):
        stamp = write_atomic(tmp_path / "file", [content])
        with pytest.raises(Damaged, match="is not a safetensors file"):
            list(_reader(device)([(tmp_path / "file", stamp)]))


def test_a_reader_that_stops_early_leaves_nothing(files, device: str) -> None:
    reading = _reader(device)(files[0])
    next(reading)
    reading.close()


def test_an_error_in_a_thread_is_the_callers(files, device: str, monkeypatch) -> None:
    def fail(*_: object) -> None:
        raise StoreError("the disk is gone")

    listed, contents = files
    reading = _reader(device, num_threads=1)(listed)
    assert _same(next(reading), contents[0])
    monkeypatch.setattr(pinned, "open_verified", fail)
    with pytest.raises(StoreError, match="the disk is gone"):
        list(reading)


def test_a_copy_that_fails_in_the_middle_frees_its_lane(files, device: str, monkeypatch) -> None:
    calls = []
    real = pinned._Lane._wait

    def wait(self: pinned._Lane, slot: int) -> None:
        calls.append(slot)
        if len(calls) == 4:
            raise RuntimeError("the device fell off the bus")
        real(self, slot)

    monkeypatch.setattr(pinned._Lane, "_wait", wait)
    with pytest.raises(RuntimeError, match="fell off the bus"):
        list(_reader(device)(files[0]))


class _LateTensor(Tensor):
    """A target whose copies are done only when the event after them is waited for."""

    under_way: list[tuple[Tensor, Tensor]] = []

    def copy_(self, source: Tensor, non_blocking: bool = False) -> Tensor:
        assert non_blocking
        self.under_way.append((self.as_subclass(Tensor), source))
        return self


class _LateEvent:
    def __init__(self) -> None:
        self.copies: list[tuple[Tensor, Tensor]] = []

    def record(self) -> None:
        self.copies, _LateTensor.under_way[:] = _LateTensor.under_way[:], []

    def synchronize(self) -> None:
        for target, source in self.copies:
            target.copy_(source)
        self.copies = []


@pytest.mark.parametrize("chunk_bytes", [1, 64, 333, 500, 999, 1000])
def test_a_buffer_is_filled_anew_only_when_its_bytes_are_there(chunk_bytes: int) -> None:
    content = torch.randint(0, 256, (1000,), dtype=torch.uint8)
    target = torch.zeros_like(content)
    position = 0

    def fill(view: memoryview) -> int:
        nonlocal position
        view[:] = content[position : position + len(view)].numpy().data
        position += len(view)
        return len(view)

    lane = pinned._Lane(torch.device("cpu"), chunk_bytes, threading.Event())
    lane._copied = [_LateEvent(), _LateEvent()]
    lane.copy(fill, target.as_subclass(_LateTensor))
    assert torch.equal(target, content)


def test_closing_stops_a_thread_between_two_buffers(tmp_path: Path, device: str) -> None:
    target = torch.empty(1000, dtype=torch.uint8, device=device)
    filled = threading.Event()
    views = []

    def fill_slowly(view: memoryview) -> int:
        views.append(len(view))
        filled.set()
        assert stopped.wait(10)
        return len(view)

    stopped = threading.Event()
    with pinned._crew(torch.device(device), 1, 100) as crew:
        stopped = crew.lanes[0]._stopped
        job = crew.start(crew.lanes[0], pinned._Lane.copy, fill_slowly, target)
        assert filled.wait(10)
    assert views == [100]
    with pytest.raises(pinned._Stopped):
        job.result()


@pytest.mark.parametrize("num_pinned", [0, 1])
def test_memory_that_cannot_be_pinned_is_done_without(files, monkeypatch, num_pinned: int) -> None:
    real, made = pinned._Lane.__init__, []

    def refuse(self: pinned._Lane, *args: object) -> None:
        if len(made) == num_pinned:
            raise RuntimeError("CUDA error: out of memory")
        made.append(real(self, *args))

    monkeypatch.setattr(pinned._Lane, "__init__", refuse)
    listed, contents = files
    found = list(_reader("cpu")(listed))
    assert all(_same(*pair) for pair in zip(found, contents, strict=True)) and len(found) == 7
    made.clear()
    loaded = pinned.load_tensors(listed[3][0], torch.device("cpu"))
    if num_pinned == 0:
        assert loaded is None
    else:
        assert loaded is not None and _same(loaded, contents[3])


def test_without_room_on_the_device_rows_go_the_old_way(files, monkeypatch) -> None:
    monkeypatch.setattr(pinned, "_num_affordable", lambda num_bytes, device: 0)
    monkeypatch.setattr(pinned, "_read_verified", None)
    listed, contents = files
    found = list(_reader("cpu")(listed))
    assert all(_same(*pair) for pair in zip(found, contents, strict=True))


def test_the_cpu_reads_as_ever() -> None:
    assert pinned.file_reader(torch.device("cpu")) is read_each


@pytest.mark.parametrize("num_threads", [1, 4])
def test_a_damaged_block_is_quarantined_and_only_it_is_redone(
    tmp_path: Path, device: str, num_threads: int
) -> None:
    store, token_ids = make_store(tmp_path), ids(N)
    key = fill(store, token_ids)
    _flip(store.root / "kv" / key / "block-00002.safetensors")
    notices, read = Notices(), _reader(device, 777, num_threads)

    def read_from(start: int) -> list[int]:
        ends = []
        for block in entry.read_blocks(start, read):
            tensors = {name: tensor.cpu() for name, tensor in block.tensors.items()}
            assert is_right(token_ids, block.start, block.end, tensors)
            ends.append(block.end)
        return ends

    with store.entry(BASE, token_ids, row_dims=ROW_DIMS, notice=notices) as entry:
        assert read_from(0) == [64, 128]
        assert entry.num_ready == 128 and not entry.complete
        assert len(notices) == 1 and "block-00002" in notices[0]
        entry.write_block(128, 192, rows(token_ids, 128, 192))
        assert read_from(192) == [256, 320, N]
        entry.finish()
    assert len(list((store.root / "quarantine").iterdir())) == 1


def test_rows_of_a_longer_block_end_the_iteration(tmp_path: Path, device: str) -> None:
    store, token_ids = make_store(tmp_path), ids(N)
    fill(store, token_ids)
    shorter = token_ids[: 2 * BLOCK_LEN + 40]
    with store.entry(BASE, shorter, row_dims=ROW_DIMS) as entry:
        blocks = list(entry.read_blocks(0, _reader(device)))
    assert [(block.start, block.end) for block in blocks] == [(0, 64), (64, 128), (128, 168)]
    assert is_right(shorter, 128, 168, blocks[-1].tensors)


def test_a_used_entry_asserts_that_it_is_over(tmp_path: Path) -> None:
    store, token_ids = make_store(tmp_path), ids(N)
    fill(store, token_ids)
    with store.entry(BASE, token_ids, row_dims=ROW_DIMS) as entry:
        blocks = entry.read_blocks(0, _reader("cpu"))
        next(blocks)
    with pytest.raises(AssertionError, match="after its `with` block"):
        next(blocks)


def _cache(num_rows: int, device: str) -> KVCache:
    return KVCache(2, 2, 8, num_rows, device=torch.device(device), dtype=torch.bfloat16)


@pytest.mark.parametrize("kv_dtype", ["bf16", "int8"])
def test_a_restored_cache_is_the_one_that_was_stored(
    tmp_path: Path, device: str, kv_dtype: str
) -> None:
    num_rows = 2 * REAL_BLOCK_LEN + 77
    source = _cache(num_rows, device)
    dims = {"k": 2, "v": 2, "k_scale": 2, "v_scale": 2, "q_moment": None}
    store, token_ids, done = Store(tmp_path / "cache", 1 << 30), ids(num_rows), []
    with store.entry(BASE, token_ids, row_dims=dims) as entry:
        for slab in (source.k, source.v):
            slab.normal_()
        for start in range(0, num_rows, REAL_BLOCK_LEN):
            end = min(start + REAL_BLOCK_LEN, num_rows)
            source.block_moment.zero_()
            for layer_idx in range(2):
                source.add_moment(layer_idx, torch.randn(2, 8, 8, device=device))
            entry.write_block(start, end, source.export_block(start, end, kv_dtype))
        entry.finish()
    for read in (None, _reader(device, 999)):
        restored = _cache(num_rows, device)
        with store.entry(BASE, token_ids, row_dims=dims) as entry:
            assert restore(entry, restored, done.append, read) == num_rows
        assert torch.equal(restored.k, source.k) and torch.equal(restored.v, source.v)
        assert torch.equal(restored.q_moment, source.q_moment)
        assert torch.equal(restored.block_moment, source.block_moment)
    assert [event.done for event in done] == [4096, 8192, num_rows] * 2


def test_a_cache_that_refuses_a_block_ends_the_threads(tmp_path: Path, monkeypatch) -> None:
    store, token_ids = make_store(tmp_path), ids(N)
    fill(store, token_ids)
    cache = _cache(100, "cpu")  # too few rows for the second block
    with store.entry(BASE, token_ids, row_dims=ROW_DIMS) as entry:
        with pytest.raises(RuntimeError):
            restore(entry, cache, lambda event: None, _reader("cpu"))
        assert cache.length == 64 and entry.num_ready == N


@pytest.mark.parametrize("part_bytes", [7 * 64, 1 << 20])
@pytest.mark.parametrize("chunk_bytes", [64, 1000, 1 << 20])
def test_weights_are_those_of_the_file(
    model_dir: Path, device: str, monkeypatch, part_bytes: int, chunk_bytes: int
) -> None:
    monkeypatch.setattr(pinned, "_PART_BYTES", part_bytes)
    expected = load_weights(model_dir, device="cpu", dtype=torch.float32)
    path = model_dir / "model.safetensors"
    found = pinned.load_tensors(path, torch.device(device), num_threads=5, chunk_bytes=chunk_bytes)
    assert found is not None and _same(found, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_on_the_gpu_are_those_of_the_cpu(model_dir: Path, dtype: torch.dtype) -> None:
    expected = load_weights(model_dir, device="cpu", dtype=dtype)
    found = load_weights(model_dir, device="cuda", dtype=dtype)
    assert _same(found, expected) and found["norm"].is_cuda


@pytest.mark.gpu
def test_pinned_memory_goes_through_streams_of_its_own(files) -> None:
    with pinned._crew(torch.device("cuda"), 2, 1000) as crew:
        assert len(crew.lanes) == 2
        for lane in crew.lanes:
            assert all(chunk.is_pinned() for chunk in lane._chunks)
            assert lane._stream != torch.cuda.current_stream()


def test_a_weights_file_cut_while_it_is_read_is_an_error(model_dir: Path, tmp_path: Path) -> None:
    path = Path(shutil.copy(model_dir / "model.safetensors", tmp_path))
    os.truncate(path, path.stat().st_size - 100)
    with pytest.raises(ValueError, match="ends too early"):
        pinned.load_tensors(path, torch.device("cpu"))


@pytest.mark.gpu
def test_damaged_weights_are_a_model_error_on_the_gpu(model_dir: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(model_dir, tmp_path / "copy"))
    path = copy / "model.safetensors"
    os.truncate(path, path.stat().st_size - 100)
    with pytest.raises(ModelError, match="are damaged"):
        load_weights(copy, device="cuda", dtype=torch.float32)
