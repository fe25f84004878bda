"""How fast rows and weights reach the device, beside the plain copy rate of the same machine.

The rows go through the real store: an entry of random rows is written to a temporary directory, its
files are brought into the page cache, and `ingest.restore` fills a KV cache from them, checksums
and all. The weights are a random model of the same shape, loaded by `load_weights`. What the
machine can do is measured in the same run: pinned memory to the GPU, or memory to memory.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from longread.bench.shapes import SHAPES, random_weights
from longread.cache import BLOCK_ROW_DIMS, KVCache
from longread.convert import OutputTensor, write_tensors
from longread.device import choose_device, choose_dtype
from longread.entry import Entry
from longread.errors import LongreadError, UsageError
from longread.ingest import restore
from longread.manifest import BLOCK_LEN
from longread.pinned import file_reader
from longread.store import Store
from longread.tensorfile import ReadFiles, read_each
from longread.weights import ModelConfig, load_weights

COPY, RESTORE, PLAIN = "copy", "restore", "restore, unpinned"
WEIGHTS, MAPPED = "weights", "weights, mapped"
_COPY_BYTES = 256 << 20  # of a buffer: more than a CPU's caches hold
_NUM_COPIES = 8
_PAGE_BYTES = 4096


@dataclass(frozen=True)
class Timed:
    """One transfer of `num_bytes` to the device, page cache warm, until all of it is there."""

    what: str
    num_bytes: int
    seconds: float

    @property
    def gb_per_s(self) -> float:
        """10^9 bytes a second."""
        return self.num_bytes / self.seconds / 1e9


@dataclass(frozen=True)
class _Kind:
    """Something to time: `work` is, what comes before and after it is not."""

    num_bytes: int
    work: Callable[[], None]
    before: Callable[[], None] = lambda: None
    after: Callable[[], None] = lambda: None  # raises LongreadError where the result is wrong


def run(
    model: str,
    device: str,
    dtype: str,
    kv_bytes: int,
    repeats: int = 3,
    *,
    readers: Sequence[int] = (),
    with_weights: bool = True,
) -> list[Timed]:
    """Time each kind in turn, `repeats` times, with no warm-up: the first runs pin the buffers.

    model: a name of shapes.SHAPES. kv_bytes: what the entry holds, less at most one row. On a GPU
    the rows are also restored without pinned buffers, and by each number of threads in `readers`.
    Raises LongreadError where rows or weights are not those that were written, UsageError for
    another model, StoreError for a full disk.
    """
    if model not in SHAPES:
        raise UsageError(f"no shape {model!r}; choose one of {', '.join(SHAPES)}")
    config, torch_device, torch_dtype = SHAPES[model], choose_device(device), choose_dtype(dtype)
    with tempfile.TemporaryDirectory(prefix="longread-bench-") as name:
        directory = Path(name)
        rows = _Rows(directory / "cache", config, torch_device, torch_dtype, kv_bytes)
        kinds = {
            COPY: _copies(torch_device),
            RESTORE: rows.restored_by(file_reader(torch_device)),
        }
        if torch_device.type == "cuda":
            kinds[PLAIN] = rows.restored_by(read_each)
            for num_threads in readers:
                read = file_reader(torch_device, num_threads)
                kinds[f"{RESTORE}, {num_threads} threads"] = rows.restored_by(read)
        if with_weights:
            kinds[WEIGHTS if torch_device.type == "cuda" else MAPPED] = _loaded_weights(
                directory, config, torch_device, torch_dtype
            )
        for path in directory.rglob("*.safetensors"):
            _warm(path)
        timed = []
        for _ in range(repeats):
            for what, kind in kinds.items():
                kind.before()
                _synchronize(torch_device)
                started = time.perf_counter()
                kind.work()
                _synchronize(torch_device)
                timed.append(Timed(what, kind.num_bytes, time.perf_counter() - started))
                kind.after()
    return timed


class _Rows:
    """An entry of random bits: block i holds those of one random block, all xor i."""

    def __init__(
        self,
        root: Path,
        config: ModelConfig,
        device: torch.device,
        dtype: torch.dtype,
        num_bytes: int,
    ) -> None:
        layers, heads = config.num_hidden_layers, config.num_key_value_heads
        head_dim = config.head_dim
        row_bytes = 2 * layers * heads * head_dim * dtype.itemsize
        num_rows = max(1, num_bytes // row_bytes)
        self._starts = range(0, num_rows, BLOCK_LEN)
        self._dtype = dtype
        self._cache = KVCache(layers, heads, head_dim, num_rows, device=device, dtype=dtype)
        block_shape = (layers, heads, min(BLOCK_LEN, num_rows), head_dim * dtype.itemsize // 2)
        generator = torch.Generator(device).manual_seed(0)
        self._bits = [
            torch.randint(
                -(2**15), 2**15, block_shape, dtype=torch.int16, device=device, generator=generator
            )
            for _ in "kv"
        ]
        moment_shape = (layers, heads, head_dim, head_dim)
        self._moment = torch.randn(moment_shape, device=device, generator=generator)
        self._store = Store(root, 1 << 62)
        self._token_ids = np.arange(num_rows, dtype=np.int32)
        self._num_bytes = self._write()

    def restored_by(self, read: ReadFiles) -> _Kind:
        """The entry opened and its rows loaded, its files read by `read`."""

        def work() -> None:
            with self._entry() as entry:
                restore(entry, self._cache, lambda event: None, read)

        return _Kind(self._num_bytes, work, self._clear, self._check)

    def _entry(self) -> AbstractContextManager[Entry]:
        base = Store.base_key({"bench": "load"})
        return self._store.entry(base, self._token_ids, row_dims=BLOCK_ROW_DIMS)

    def _write(self) -> int:
        with self._entry() as entry:
            entry.reserve(self._cache.num_bytes + len(self._starts) * self._moment.nbytes)
            for start in self._starts:
                end = min(start + BLOCK_LEN, len(self._token_ids))
                k, v = (bits.view(self._dtype) for bits in self._expected(start, end))
                entry.write_block(start, end, {"k": k, "v": v, "q_moment": self._moment})
            entry.finish()
            return entry.num_bytes

    def _expected(self, start: int, end: int) -> list[Tensor]:
        """K and V of the rows [start, end) as int16: NaNs would differ from themselves."""
        return [bits[:, :, : end - start] ^ (start // BLOCK_LEN) for bits in self._bits]

    def _clear(self) -> None:
        cache = self._cache
        cache.truncate(0)
        for tensor in (cache.k, cache.v, cache.q_moment, cache.block_moment):
            tensor.zero_()

    def _check(self) -> None:
        cache = self._cache
        moment = torch.zeros_like(self._moment)
        is_right = cache.length == len(self._token_ids)
        for start in self._starts:
            end = min(start + BLOCK_LEN, len(self._token_ids))
            moment += self._moment
            for slab, expected in zip((cache.k, cache.v), self._expected(start, end), strict=True):
                is_right &= torch.equal(slab[:, :, start:end].view(torch.int16), expected)
        is_right &= torch.equal(cache.q_moment, moment)
        is_right &= torch.equal(cache.block_moment, self._moment)
        if not is_right:
            raise LongreadError("the restored rows are not those written: nothing is reported")


def _copies(device: torch.device) -> _Kind:
    """The ceiling: one buffer again and again, pinned where it goes to a GPU."""
    on_gpu = device.type == "cuda"
    source = torch.ones(_COPY_BYTES, dtype=torch.uint8, pin_memory=on_gpu)
    target = torch.zeros(_COPY_BYTES, dtype=torch.uint8, device=device)

    def work() -> None:
        for _ in range(_NUM_COPIES):
            target.copy_(source, non_blocking=True)

    return _Kind(_NUM_COPIES * _COPY_BYTES, work)


@dataclass(frozen=True)
class _OnDevice:
    """A tensor as convert.py's writer wants to read it."""

    tensor: Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.tensor.shape)

    def read_rows(self, start: int, stop: int) -> Tensor:
        return self.tensor[start:stop].cpu()


def _loaded_weights(
    directory: Path, config: ModelConfig, device: torch.device, dtype: torch.dtype
) -> _Kind:
    """A random model on disk, loaded; on the CPU nothing moves, but every page is touched."""
    expected = random_weights(config, device, dtype)
    outputs = [
        OutputTensor(name, tuple(tensor.shape), tensor.dtype, (_OnDevice(tensor),))
        for name, tensor in expected.items()
    ]
    model_dir = directory / "model"
    model_dir.mkdir()
    (model_dir / "config.json").write_text(config.to_json(), encoding="utf-8")
    write_tensors(model_dir / "model.safetensors", outputs, lambda num_bytes: None)
    found: dict[str, Tensor] = {}

    def work() -> None:
        found.update(load_weights(model_dir, device=str(device), dtype=dtype))
        if device.type == "cpu":
            for tensor in found.values():
                tensor.reshape(-1).view(torch.uint8)[::_PAGE_BYTES].sum()

    def check() -> None:
        is_right = found.keys() == expected.keys() and all(
            torch.equal(found[name], tensor) for name, tensor in expected.items()
        )
        found.clear()
        if not is_right:
            raise LongreadError("the loaded weights are not those written: nothing is reported")

    return _Kind(sum(tensor.nbytes for tensor in expected.values()), work, after=check)


def _warm(path: Path) -> None:
    """Bring a file into the page cache."""
    with path.open("rb", buffering=0) as file:
        while file.read(1 << 24):
            pass


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
