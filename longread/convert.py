"""From a source model's tensors to the converted ones: fused, cast, streamed to one file.

Owns the converted names and shapes and the file writer. Where rows come from (gguf_model.py,
hf_model.py) and where the result goes (weights.py) is not its business.

The file is written by hand in safetensors' format because the library wants every tensor in memory
at once: here slabs of rows go straight to their place, from several threads, so that the peak is
some tens of megabytes whatever the model's size.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from longread.errors import ModelError
from longread.model_config import ModelConfig

_SLAB_ELEMENTS = 1 << 20  # about a megabyte of temporaries a step: stays in the CPU's cache
_SLAB_ROWS = 16  # slabs have a multiple of this many rows, which the dequantiser likes
_MAX_THREADS = 8
_DATA_ALIGNMENT = 4096  # bytes: the data starts on a page of its own
_DTYPE_CODES = {
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.int8: "I8",
    torch.uint8: "U8",
}


class RowSource(Protocol):
    """A tensor that can be read in pieces, from several threads."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The whole tensor's shape: [rows, columns] or [length]."""

    def read_rows(self, start: int, stop: int) -> Tensor:
        """Return rows `start` to `stop` (elements of a vector) in any float dtype."""


@dataclass(frozen=True)
class SourceModel:
    """A model as a reader hands it over.

    `tensors` go by canonical names: embed_tokens, norm, lm_head, and layers.{i}.x with x in q, k,
    v, o (each may have x_bias), gate, up, down, input_norm, post_norm, q_norm, k_norm.
    `write_tokenizer` leaves tokenizer.json in a directory.
    """

    config: ModelConfig
    inv_freq: Tensor
    tensors: Mapping[str, RowSource]
    chat_template: str | None
    bos_token: str | None
    eos_token: str | None
    write_tokenizer: Callable[[Path], None]


@dataclass(frozen=True)
class OutputTensor:
    """One converted tensor: its parts lie one after another along the first dimension."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    parts: tuple[RowSource, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes in the file."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class _Whole:
    """A small tensor that is in memory."""

    tensor: Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.tensor.shape)

    def read_rows(self, start: int, stop: int) -> Tensor:
        return self.tensor[start:stop]


def in_memory(name: str, tensor: Tensor) -> OutputTensor:
    """A tensor as it is to be written."""
    return OutputTensor(name, tuple(tensor.shape), tensor.dtype, (_Whole(tensor),))


def _fused(config: ModelConfig) -> dict[str, tuple[tuple[str, ...], tuple[int, ...]]]:
    """Return a layer's converted tensors: name -> (parts, shape). A bias has its matrix's rows."""
    head_rows = config.num_attention_heads * config.head_dim
    kv_rows = config.num_key_value_heads * config.head_dim
    hidden = config.hidden_size
    shapes: dict[str, tuple[tuple[str, ...], tuple[int, ...]]] = {
        "qkv": (("q", "k", "v"), (head_rows + 2 * kv_rows, hidden)),
        "o": (("o",), (hidden, head_rows)),
        "gate_up": (("gate", "up"), (2 * config.intermediate_size, hidden)),
        "down": (("down",), (hidden, config.intermediate_size)),
        "input_norm": (("input_norm",), (hidden,)),
        "post_norm": (("post_norm",), (hidden,)),
    }
    if config.qk_norm:
        shapes["q_norm"] = (("q_norm",), (config.head_dim,))
        shapes["k_norm"] = (("k_norm",), (config.head_dim,))
    return shapes


def required_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return the names and shapes of every tensor but biases that a converted model has."""
    shapes: dict[str, tuple[int, ...]] = {
        "embed_tokens": (config.vocab_size, config.hidden_size),
        "norm": (config.hidden_size,),
        "inv_freq": (config.head_dim // 2,),
    }
    if not config.tie_word_embeddings:
        shapes["lm_head"] = shapes["embed_tokens"]
    for i in range(config.num_hidden_layers):
        shapes |= {f"layers.{i}.{name}": shape for name, (_, shape) in _fused(config).items()}
    return shapes


def plan(source: SourceModel) -> list[OutputTensor]:
    """Return the converted tensors in the order of the file.

    Raises ModelError where a tensor is missing, has another shape than the config says, or has no
    place in the decoder.
    """
    config = source.config
    dtype = {"bfloat16": torch.bfloat16, "float32": torch.float32}[config.torch_dtype]
    left = dict(source.tensors)

    def take(name: str, parts: tuple[str, ...], shape: tuple[int, ...]) -> OutputTensor:
        missing = [part for part in parts if part not in left]
        if missing:
            raise ModelError(f"{config.name} has no tensor {missing[0]}: the file is not complete")
        sources = tuple(left.pop(part) for part in parts)
        found = (sum(part.shape[0] for part in sources), *sources[0].shape[1:])
        if found != shape or any(part.shape[1:] != shape[1:] for part in sources):
            raise ModelError(
                f"{config.name}: {' + '.join(parts)} has shape {list(found)}, "
                f"the config says {list(shape)}"
            )
        return OutputTensor(name, shape, dtype, sources)

    embedding = (config.vocab_size, config.hidden_size)
    outputs = [take("embed_tokens", ("embed_tokens",), embedding)]
    for i in range(config.num_hidden_layers):
        prefix = f"layers.{i}."
        for name, (parts, shape) in _fused(config).items():
            outputs.append(take(prefix + name, tuple(prefix + part for part in parts), shape))
            biases = tuple(f"{prefix}{part}_bias" for part in parts)
            if any(bias in left for bias in biases):
                outputs.append(take(f"{prefix}{name}_bias", biases, shape[:1]))
    outputs.append(take("norm", ("norm",), (config.hidden_size,)))
    if config.tie_word_embeddings:
        left.pop("lm_head", None)
    else:
        outputs.append(take("lm_head", ("lm_head",), embedding))
    if left:
        raise ModelError(
            f"{config.name} holds {min(left)}, which no model of the {config.family} family has"
        )
    return [*outputs, in_memory("inv_freq", source.inv_freq.to(torch.float32))]


def write_tensors(path: Path, outputs: list[OutputTensor], count: Callable[[int], None]) -> None:
    """Write the converted tensors to `path` and flush them to disk.

    `count` is told, from this thread, how many bytes each slab took. Raises ModelError and OSError.
    """
    header, data_start, offsets = _header(outputs)
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    try:
        _write_at(fd, header, 0)
        num_threads = max(1, min(_MAX_THREADS, os.cpu_count() or 1))
        with ThreadPoolExecutor(num_threads, thread_name_prefix="longread-convert") as pool:
            running: set[Future[int]] = set()
            try:
                for job in _slabs(fd, outputs, offsets, data_start):
                    running.add(pool.submit(job))
                    if len(running) > 2 * num_threads:
                        done, running = wait(running, return_when=FIRST_COMPLETED)
                        for future in done:
                            count(future.result())
                for future in running:
                    count(future.result())
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise
        os.fsync(fd)
    finally:
        os.close(fd)


def _header(outputs: list[OutputTensor]) -> tuple[bytes, int, list[int]]:
    """Return the header's bytes, where the data starts, and each tensor's offset from there."""
    entries: dict[str, object] = {}
    offsets = []
    position = 0
    for output in outputs:
        offsets.append(position)
        entries[output.name] = {
            "dtype": _DTYPE_CODES[output.dtype],
            "shape": list(output.shape),
            "data_offsets": [position, position + output.num_bytes],
        }
        position += output.num_bytes
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % _DATA_ALIGNMENT)
    return len(text).to_bytes(8, "little") + text, len(text) + 8, offsets


def _slabs(
    fd: int, outputs: list[OutputTensor], offsets: list[int], data_start: int
) -> Iterator[Callable[[], int]]:
    for output, offset in zip(outputs, offsets, strict=True):
        row_bytes = math.prod(output.shape[1:]) * output.dtype.itemsize
        position = data_start + offset
        for part in output.parts:
            step = max(1, _SLAB_ELEMENTS // math.prod(part.shape[1:]))
            if step > _SLAB_ROWS:
                step -= step % _SLAB_ROWS
            for start in range(0, part.shape[0], step):
                stop = min(start + step, part.shape[0])
                yield _slab(fd, part, start, stop, output.dtype, position + start * row_bytes)
            position += part.shape[0] * row_bytes


def _slab(
    fd: int, part: RowSource, start: int, stop: int, dtype: torch.dtype, position: int
) -> Callable[[], int]:
    def work() -> int:
        # torch rounds to nearest, ties to even
        rows = part.read_rows(start, stop).to(dtype).contiguous()
        data = rows.reshape(-1).view(torch.uint8).numpy()
        _write_at(fd, data.data, position)
        return data.nbytes

    return work


def _write_at(fd: int, data: bytes | memoryview, position: int) -> None:
    view = memoryview(data)
    while view:
        written = os.pwrite(fd, view, position)
        view, position = view[written:], position + written
