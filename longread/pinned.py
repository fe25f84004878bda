"""Files to a CUDA device through pinned memory: several threads read and hash while copies run.

Owns the threads, their streams and buffers. What the bytes mean is tensorfile.py's, what a damaged
file costs entry.py's.

From pageable memory the driver copies every byte once more, on one thread, and the caller waits for
it. Here each thread has two pinned buffers in turn: one is filled while the other is on its way.
The checksum of a file goes from its start to its end, so one thread reads one file; a thread reads
and verifies 5 to 8 GB/s, which is why several files are read at once.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from longread.atomic import FileStamp, open_verified
from longread.memory import free_bytes
from longread.tensorfile import ReadFiles, header_len, parse_header, read_each, tensors_of

NUM_THREADS = 8
_CHUNK_BYTES = 8 << 20  # of a buffer; two for each thread: pinning memory takes time as well
_PART_BYTES = 64 << 20  # of a weights file that one thread takes at a time
_MEMORY_SHARE = 4  # of the device's free memory, a quarter may hold files that are on their way


def file_reader(device: torch.device, num_threads: int = NUM_THREADS) -> ReadFiles:
    """How to read the files of a KV entry whose rows are to go to `device`."""
    if not _is_cuda(device):
        return read_each
    return partial(read_ahead, device=device, num_threads=num_threads)


def read_ahead(
    files: Sequence[tuple[Path, FileStamp]],
    *,
    device: torch.device,
    num_threads: int = NUM_THREADS,
    chunk_bytes: int = _CHUNK_BYTES,
) -> Generator[dict[str, Tensor], None, None]:
    """The verified tensors of each file in turn, on `device`, while the files behind are read.

    A file's tensors are given only when all its bytes were right; Damaged and StoreError are raised
    at its turn. Needs room on the device for one file a thread; where there is too little, or no
    memory can be pinned, the tensors are `read_each`'s, on the CPU.
    """
    largest = max((stamp.num_bytes for _, stamp in files), default=0)
    num_lanes = min(num_threads, len(files), _num_affordable(largest, device))
    with _crew(device, num_lanes, chunk_bytes) as crew:
        if not crew.lanes:
            yield from read_each(files)
            return
        waiting, idle = deque(files), deque(crew.lanes)
        running: deque[tuple[_Lane, Future[None], Tensor]] = deque()
        while waiting or running:
            while waiting and idle:
                (path, stamp), lane = waiting.popleft(), idle.popleft()
                data = torch.empty(stamp.num_bytes, dtype=torch.uint8, device=device)
                running.append((lane, crew.start(lane, _read_verified, path, stamp, data), data))
            lane, future, data = running.popleft()
            future.result()
            idle.append(lane)
            tensors = tensors_of(data)
            yield tensors
            del data, future, tensors  # what the caller has let go of is free for the next file


def load_tensors(
    path: Path,
    device: torch.device,
    *,
    num_threads: int = NUM_THREADS,
    chunk_bytes: int = _CHUNK_BYTES,
) -> dict[str, Tensor] | None:
    """Every tensor of a safetensors file on `device`, or None where no memory can be pinned.

    Nothing is verified: the caller has looked at the header. Raises OSError, ValueError.
    """
    num_lanes = min(num_threads, -(-path.stat().st_size // _PART_BYTES))
    with open(path, "rb", buffering=0) as file, _crew(device, num_lanes, chunk_bytes) as crew:
        if not crew.lanes:
            return None
        fd = file.fileno()
        spans = parse_header(os.pread(fd, header_len(os.pread(fd, 8, 0)), 8))
        tensors, parts = {}, []
        for name, span in spans.items():
            tensors[name] = torch.empty(span.shape, dtype=span.dtype, device=device)
            pieces = tensors[name].reshape(-1).view(torch.uint8).split(_PART_BYTES)
            parts += [(span.start + i * _PART_BYTES, piece) for i, piece in enumerate(pieces)]
        jobs = [
            crew.start(lane, _read_parts, fd, parts[i :: len(crew.lanes)])
            for i, lane in enumerate(crew.lanes)
        ]
        for job in jobs:
            job.result()
        return tensors


class _Stopped(Exception):
    """The crew is closing; nobody waits for the result."""


class _Lane:
    """A stream and two pinned buffers. On the CPU, for tests, copies are plain and done at once."""

    def __init__(self, device: torch.device, chunk_bytes: int, stopped: threading.Event) -> None:
        """Raises RuntimeError where the memory cannot be pinned."""
        on_gpu = _is_cuda(device)
        self._chunks = [
            torch.empty(chunk_bytes, dtype=torch.uint8, pin_memory=on_gpu) for _ in range(2)
        ]
        self._views = [memoryview(chunk.numpy().data) for chunk in self._chunks]
        self._stream = torch.cuda.Stream(device) if on_gpu else None
        # Blocking: a thread that waits for the link leaves its core to those that read.
        self._copied = [torch.cuda.Event(blocking=True) for _ in range(2)] if on_gpu else []
        self._stopped = stopped

    def follow(self) -> None:
        """Copy only after what the caller's stream has been given: it may still use the memory."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))

    def copy(self, fill: Callable[[memoryview], int], target: Tensor) -> None:
        """Let `fill` fill buffer after buffer and copy them to `target`; returns when all is there.

        target: [N] uint8 on the device. Raises what `fill` does, ValueError where it gives too few
        bytes; no copy is under way then.
        """
        chunk_bytes = len(self._views[0])
        with torch.inference_mode(), self._on_stream():
            try:
                for i, part in enumerate(target.split(chunk_bytes)):
                    if self._stopped.is_set():
                        raise _Stopped
                    slot, num_bytes = i % 2, part.numel()
                    self._wait(slot)
                    if fill(self._views[slot][:num_bytes]) != num_bytes:
                        raise ValueError("the file ends too early")
                    part.copy_(self._chunks[slot][:num_bytes], non_blocking=True)
                    if self._copied:
                        self._copied[slot].record()
            finally:
                self._wait(0)
                self._wait(1)

    def _on_stream(self) -> AbstractContextManager[object]:
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def _wait(self, slot: int) -> None:
        if self._copied:
            self._copied[slot].synchronize()


class _Crew:
    """Threads with a lane each; without lanes where no memory can be pinned."""

    def __init__(self, lanes: list[_Lane], pool: ThreadPoolExecutor) -> None:
        self.lanes = lanes
        self._pool = pool

    def start(self, lane: _Lane, job: Callable[..., None], *args: object) -> Future[None]:
        """Run job(lane, *args) on a thread, after what the caller's stream was given so far."""
        lane.follow()
        return self._pool.submit(job, lane, *args)


@contextmanager
def _crew(device: torch.device, num_lanes: int, chunk_bytes: int) -> Iterator[_Crew]:
    """A crew of at most `num_lanes`; at the end of the block its threads have ended."""
    stopped = threading.Event()
    lanes: list[_Lane] = []
    try:
        while len(lanes) < num_lanes:
            lanes.append(_Lane(device, chunk_bytes, stopped))
    except RuntimeError:
        pass  # the system's limit on locked memory: fewer lanes, or none
    pool = ThreadPoolExecutor(max(1, len(lanes)), thread_name_prefix="longread-pinned")
    try:
        yield _Crew(lanes, pool)
    finally:
        stopped.set()
        pool.shutdown(cancel_futures=True)


def _read_verified(lane: _Lane, path: Path, stamp: FileStamp, target: Tensor) -> None:
    with open_verified(path, stamp) as file:
        lane.copy(file.fill, target)


def _read_parts(lane: _Lane, fd: int, parts: Sequence[tuple[int, Tensor]]) -> None:
    for start, target in parts:
        lane.copy(_Range(fd, start).fill, target)


class _Range:
    """A file's bytes from a position on."""

    def __init__(self, fd: int, position: int) -> None:
        self._fd = fd
        self._position = position

    def fill(self, view: memoryview) -> int:
        """Read the next bytes into `view`; returns how many, fewer only at the end. OSError."""
        filled = 0
        while filled < len(view):
            num_read = os.preadv(self._fd, [view[filled:]], self._position)
            if num_read == 0:
                break
            filled += num_read
            self._position += num_read
        return filled


def _num_affordable(num_bytes: int, device: torch.device) -> int:
    """How many files of `num_bytes` may be on their way at once."""
    if not _is_cuda(device):
        return NUM_THREADS
    return (free_bytes(device) or 0) // _MEMORY_SHARE // max(1, num_bytes)


def _is_cuda(device: torch.device) -> bool:
    return device.type == "cuda"
