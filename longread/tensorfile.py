"""Tensors in one safetensors file with a checksum: written in a stream, read back verified.

Owns the file format's header. The format is Hugging Face's, so any safetensors reader opens the
files; the library itself is not used because it neither hashes while it writes nor fsyncs, and it
reads a file again after the bytes were verified.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from longread.atomic import Damaged, FileStamp, read_verified, write_atomic

if TYPE_CHECKING:
    import torch
    from torch import Tensor

_DTYPE_NAMES = {
    "BF16": "bfloat16",
    "F16": "float16",
    "F32": "float32",
    "F64": "float64",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "U8": "uint8",
    "I8": "int8",
    "I32": "int32",
    "I64": "int64",
    "BOOL": "bool",
}
MAX_HEADER_BYTES = 100_000_000  # as the safetensors library has it
_ALIGNMENT = 8  # bytes; wide types come first, so that each tensor starts at a multiple of its item


ReadFiles = Callable[
    [Sequence[tuple[Path, FileStamp]]], Generator["dict[str, Tensor]", None, None]
]  # as read_each


@dataclass(frozen=True)
class Span:
    """A tensor's place in a file: bytes [start, end) from the file's beginning."""

    dtype: torch.dtype
    shape: list[int]
    start: int
    end: int


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> FileStamp:
    """Write `tensors` (any device and stride) atomically to `path`. Raises StoreError."""
    return write_atomic(path, _file_chunks(tensors))


def read_tensors(path: Path, stamp: FileStamp) -> dict[str, Tensor]:
    """The tensors of a verified file, on the CPU, sharing one private buffer (writable).

    Raises Damaged where the file is not what `stamp` says; StoreError where it may not be opened.
    """
    import torch

    buffer = read_verified(path, stamp)
    try:
        data = torch.frombuffer(buffer, dtype=torch.uint8)
    except ValueError as error:  # no bytes at all
        raise Damaged("is not a safetensors file") from error
    return tensors_of(data)


def read_each(files: Sequence[tuple[Path, FileStamp]]) -> Generator[dict[str, Tensor]]:
    """The tensors of each file in turn, read when it is asked for; raises as `read_tensors`."""
    for path, stamp in files:
        yield read_tensors(path, stamp)


def _file_chunks(tensors: Mapping[str, Tensor]) -> Iterator[bytes | memoryview]:
    import torch

    codes = {getattr(torch, name): code for code, name in _DTYPE_NAMES.items()}
    ordered = sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0]))
    header: dict[str, dict[str, object]] = {}
    offset = 0
    for name, tensor in ordered:
        assert tensor.dtype in codes, f"tensor {name} has dtype {tensor.dtype}"
        end = offset + tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": codes[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    yield len(text).to_bytes(8, "little")
    yield text
    for _, tensor in ordered:
        if tensor.numel():
            raw = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
            yield raw.numpy().data


def tensors_of(data: Tensor) -> dict[str, Tensor]:
    """The tensors of a file's bytes, as views of them. data: [N] uint8, any device.

    Raises Damaged where the bytes are not a safetensors file.
    """
    import torch

    # Outside the try: what goes wrong on a device says nothing about the file.
    first_bytes = _bytes(data[:8])
    try:
        num_bytes = header_len(first_bytes)
    except ValueError as error:
        raise Damaged("is not a safetensors file") from error
    header = _bytes(data[8 : 8 + num_bytes])
    try:
        tensors = {}
        for name, span in parse_header(header).items():
            part = data[span.start : span.end]
            if part.numel() == 0:
                tensors[name] = torch.empty(span.shape, dtype=span.dtype, device=data.device)
            else:
                tensors[name] = part.view(span.dtype).reshape(span.shape)
        return tensors
    except (ValueError, KeyError, TypeError, AttributeError, RuntimeError) as error:
        raise Damaged("is not a safetensors file") from error


def header_len(first_bytes: bytes) -> int:
    """Bytes of the JSON that follows. first_bytes: the file's first 8. Raises ValueError."""
    num_bytes = int.from_bytes(first_bytes, "little")
    if num_bytes > MAX_HEADER_BYTES:
        raise ValueError(f"a header of {num_bytes:,} bytes")
    return num_bytes


def parse_header(header: bytes) -> dict[str, Span]:
    """Where each tensor lies. header: the JSON that follows the file's first 8 bytes, its length.

    Raises ValueError, KeyError, TypeError or AttributeError where it is none.
    """
    import torch

    data_start = 8 + len(header)
    spans = {}
    for name, fields in json.loads(header).items():
        if name != "__metadata__":
            dtype: torch.dtype = getattr(torch, _DTYPE_NAMES[fields["dtype"]])
            start, end = fields["data_offsets"]
            spans[name] = Span(dtype, fields["shape"], data_start + start, data_start + end)
    return spans


def _bytes(data: Tensor) -> bytes:
    return data.cpu().numpy().tobytes()
