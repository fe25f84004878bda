"""Tensors in one safetensors file with a checksum: written in a stream, read back verified.

Owns the file format's header. The format is Hugging Face's, so any safetensors reader opens the
files; the library itself is not used because it neither hashes while it writes nor fsyncs, and it
reads a file again after the bytes were verified.
"""

from __future__ import annotations

import json
import mmap
from collections.abc import Iterator, Mapping
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
_ALIGNMENT = 8  # bytes; wide types come first, so that each tensor starts at a multiple of its item


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> FileStamp:
    """Write `tensors` (any device and stride) atomically to `path`. Raises StoreError."""
    return write_atomic(path, _file_chunks(tensors))


def read_tensors(path: Path, stamp: FileStamp) -> dict[str, Tensor]:
    """The tensors of a verified file, on the CPU, sharing one private buffer (writable).

    Raises Damaged where the file is not what `stamp` says; StoreError where it may not be opened.
    """
    buffer = read_verified(path, stamp)
    try:
        return _parse(buffer)
    except (ValueError, KeyError, TypeError, AttributeError, RuntimeError) as error:
        raise Damaged("is not a safetensors file") from error


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


def _parse(buffer: mmap.mmap) -> dict[str, Tensor]:
    import torch

    header_len = int.from_bytes(buffer[:8], "little")
    data_start = 8 + header_len
    header = json.loads(buffer[8:data_start])
    tensors = {}
    for name, fields in header.items():
        if name == "__metadata__":
            continue
        dtype: torch.dtype = getattr(torch, _DTYPE_NAMES[fields["dtype"]])
        start, end = fields["data_offsets"]
        shape = fields["shape"]
        count = (end - start) // dtype.itemsize
        if count == 0:
            tensors[name] = torch.empty(shape, dtype=dtype)
            continue
        flat = torch.frombuffer(buffer, dtype=dtype, count=count, offset=data_start + start)
        tensors[name] = flat.reshape(shape)
    return tensors
