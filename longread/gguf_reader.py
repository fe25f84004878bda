"""A GGUF file: metadata, and tensors as dequantised rows. Knows no model family.

The header is parsed here because gguf's own reader takes 7 s for a vocabulary of 152K tokens, and
maps the whole file; the dequantisers are gguf's. Format: GGUF 2 and 3, little-endian.
"""

from __future__ import annotations

import math
import mmap
import os
import struct
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import gguf
import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from longread.errors import ModelError

_SCALARS = {
    0: "<B",
    1: "<b",
    2: "<H",
    3: "<h",
    4: "<I",
    5: "<i",
    6: "<f",
    7: "<?",
    10: "<Q",
    11: "<q",
    12: "<d",
}
_STRING = 8
_ARRAY = 9
_MAX_DIMS = 4
# gguf dequantises 16 rows at a time with temporaries for each: fewer, longer rows are three times
# as fast. Blocks lie one after another, so the shape of the array is free.
_GROUP_ROWS = 16


@dataclass(frozen=True)
class GGUFTensor:
    """Where a tensor lies; shape as torch has it, rows first."""

    name: str
    shape: tuple[int, ...]
    quant_type: GGMLQuantizationType
    offset: int
    row_bytes: int

    @property
    def num_rows(self) -> int:
        """Rows of the tensor; a vector is one row."""
        return math.prod(self.shape[:-1])


class GGUFFile:
    """An open GGUF file. Reads are safe from several threads."""

    def __init__(self, path: Path) -> None:
        """Parse the header. Raises ModelError where the file is no GGUF, damaged or cut short."""
        self.path = path
        try:
            self._fd = os.open(path, os.O_RDONLY)
        except OSError as error:
            raise ModelError(f"cannot read {path}: {error.strerror}") from error
        self.metadata: dict[str, Any] = {}
        self.tensors: dict[str, GGUFTensor] = {}
        try:
            self._parse()
        except (struct.error, ValueError, TypeError, ArithmeticError, OSError) as error:
            self.close()
            # struct only finds that there are too few bytes, and says it in terms of buffers.
            reason = "it is cut short" if isinstance(error, struct.error) else str(error)
            raise ModelError(f"{path} is damaged or not a GGUF file ({reason})") from error
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> GGUFFile:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the file; tensors cannot be read afterwards."""
        os.close(self._fd)

    def raw_rows(self, tensor: GGUFTensor, start: int, stop: int) -> np.ndarray:
        """Return rows as they are stored: [stop - start, row_bytes] uint8."""
        rows = np.empty((stop - start, tensor.row_bytes), np.uint8)
        if (
            os.preadv(self._fd, [rows.data], tensor.offset + start * tensor.row_bytes)
            != rows.nbytes
        ):
            raise ModelError(f"{self.path} was cut short while it was read; fetch it again")
        return rows

    def _parse(self) -> None:
        if os.fstat(self._fd).st_size == 0:
            raise ValueError("it is empty")
        with mmap.mmap(self._fd, 0, access=mmap.ACCESS_READ) as data:
            if data[:4] != b"GGUF":
                raise ModelError(f"{self.path} is not a GGUF file")
            version, num_tensors, num_fields = struct.unpack_from("<IQQ", data, 4)
            if version not in (2, 3):
                raise ModelError(
                    f"{self.path} is GGUF version {version}; read are 2 and 3, little-endian"
                )
            position = 24
            for _ in range(num_fields):
                key, position = _read_string(data, position)
                (kind,) = struct.unpack_from("<I", data, position)
                self.metadata[key], position = _read_value(data, position + 4, kind)
            rows = []
            for _ in range(num_tensors):
                row, position = _read_tensor_row(data, position)
                rows.append(row)
            alignment = int(self.metadata.get("general.alignment", 32))
            data_start = position + -position % alignment
            for name, shape, type_id, offset in rows:
                self.tensors[name] = self._tensor(name, shape, type_id, data_start + offset)

    def _tensor(self, name: str, shape: tuple[int, ...], type_id: int, offset: int) -> GGUFTensor:
        try:
            quant_type = GGMLQuantizationType(type_id)
        except ValueError:
            raise ModelError(
                f"{self.path}: tensor {name} has the unknown quantisation {type_id}; "
                "a newer gguf package may know it"
            ) from None
        block_len, block_bytes = GGML_QUANT_SIZES[quant_type]
        if shape[-1] % block_len:
            raise ValueError(f"tensor {name} has rows of {shape[-1]}")
        tensor = GGUFTensor(name, shape, quant_type, offset, shape[-1] // block_len * block_bytes)
        if offset + tensor.num_rows * tensor.row_bytes > os.fstat(self._fd).st_size:
            raise ValueError(f"tensor {name} ends past the end of the file")
        return tensor


def dequantize(raw: np.ndarray, tensor: GGUFTensor) -> np.ndarray:
    """Return raw rows of `tensor` as fp32 [rows, columns]. Raises ModelError."""
    num_rows = raw.shape[0]
    groups = num_rows // _GROUP_ROWS
    if groups > 1 and num_rows % _GROUP_ROWS == 0:
        raw = raw.reshape(_GROUP_ROWS, -1)
    try:
        # A damaged or unused block may hold infinities; numpy's warnings about them help nobody.
        with np.errstate(all="ignore"):
            values = gguf.quants.dequantize(raw, tensor.quant_type)
    except NotImplementedError:
        raise ModelError(
            f"tensor {tensor.name} has quantisation {tensor.quant_type.name}, which cannot be read"
        ) from None
    return values.reshape(num_rows, tensor.shape[-1])


def _read_string(data: mmap.mmap, position: int) -> tuple[str, int]:
    (num_bytes,) = struct.unpack_from("<Q", data, position)
    position += 8
    if num_bytes > len(data) - position:
        raise ValueError("a text ends past the end of the file")
    return data[position : position + num_bytes].decode("utf-8", "replace"), position + num_bytes


def _read_value(data: mmap.mmap, position: int, kind: int) -> tuple[Any, int]:
    if kind == _STRING:
        return _read_string(data, position)
    if kind == _ARRAY:
        return _read_array(data, position)
    if kind not in _SCALARS:
        raise ValueError(f"unknown value type {kind}")
    code = _SCALARS[kind]
    return struct.unpack_from(code, data, position)[0], position + struct.calcsize(code)


def _read_array(data: mmap.mmap, position: int) -> tuple[list[Any], int]:
    kind, count = struct.unpack_from("<IQ", data, position)
    position += 12
    if kind in _SCALARS:
        code = _SCALARS[kind]
        num_bytes = count * struct.calcsize(code)
        if num_bytes > len(data) - position:
            raise ValueError("an array ends past the end of the file")
        values = np.frombuffer(data[position : position + num_bytes], code)
        return values.tolist(), position + num_bytes
    if kind != _STRING:
        raise ValueError(f"an array of value type {kind}")
    strings = []
    for _ in range(count):
        text, position = _read_string(data, position)
        strings.append(text)
    return strings, position


def _read_tensor_row(
    data: mmap.mmap, position: int
) -> tuple[tuple[str, tuple[int, ...], int, int], int]:
    name, position = _read_string(data, position)
    (num_dims,) = struct.unpack_from("<I", data, position)
    if not 1 <= num_dims <= _MAX_DIMS:
        raise ValueError(f"tensor {name} has {num_dims} dimensions")
    layout = f"<{num_dims}QIQ"
    *dims, type_id, offset = struct.unpack_from(layout, data, position + 4)
    shape = tuple(int(dim) for dim in reversed(dims))
    return (name, shape, type_id, offset), position + 4 + struct.calcsize(layout)
