"""A converted model's matrices in 4 or 8 bits: which form is chosen, and its file.

Answers are decoded from them; documents and long questions are read with the bf16 weights, which
stay mapped beside them and take no memory that the system cannot have back. So the KV of a
document does not depend on the form, and neither does the key of its store entry.

The file lies in the converted directory as <form>-<layout>.safetensors and is made once, from
model.safetensors. A matrix that came with 4 bits keeps them in int4 (quantize.py); where some came
so, the others were worth more bits to whoever made the file, and get 8. Where none did, all are
rounded to 4 bits but the head. What has no shape for the product stays in bf16.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from itertools import compress
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from longread_kernels import packed as ops

from longread import model_files
from longread.atomic import sync_dir
from longread.config import Settings
from longread.convert import in_memory, required_shapes, write_tensors
from longread.device import choose_device, choose_dtype
from longread.errors import ModelError, StoreError
from longread.events import Notice, NoticeFn, Progress, ProgressFn
from longread.matrix import Int4Matrix, Int8Matrix, Matrix
from longread.model_config import ModelConfig, load_config
from longread.plain_text import size_text
from longread.quantize import eight_bit, four_bit, is_four_bit
from longread.weights import load_weights

if TYPE_CHECKING:
    from torch import Tensor

_VERSION = 1  # raise it when the same weights would give another file
WHOLE = "bf16"  # the weights as they were converted
_LAYER_MATRICES = ("qkv", "o", "gate_up", "down")
_HEAD = "lm_head"
_PARTS = ("codes", "low_codes")  # a matrix of 8 bits has both
_SLAB_ELEMENTS = 1 << 17  # half a megabyte in fp32: stays in a core's cache


def choose_weights(
    settings: Settings, model_dir: Path, progress: ProgressFn, notice: NoticeFn
) -> str:
    """The form that the settings ask for, or that `auto` takes; its file is there afterwards.

    Raises ModelError for a form that cannot be had on the device, StoreError where its file cannot
    be written.
    """
    wanted = settings.weights
    if wanted == WHOLE:
        return WHOLE
    problem = _problem(settings)
    if wanted == "auto":
        if problem or not _came_in_four_bits(model_dir):
            return WHOLE
        wanted = "int4"
        try:
            path = make(model_dir, wanted, progress, notice)
        except StoreError as error:
            notice(Notice(f"answers are computed with whole weights, which is slower: {error}"))
            return WHOLE
    elif problem:
        raise ModelError(f"{wanted} weights cannot be had: {problem}")
    else:
        path = make(model_dir, wanted, progress, notice)
    size = size_text(path.stat().st_size)
    notice(Notice(f"answers are computed with {wanted} weights ({size})", "info"))
    return wanted


def make(model_dir: Path, form: str, progress: ProgressFn, notice: NoticeFn) -> Path:
    """The file of a model's matrices in `form` (int8, int4), made where it is not there.

    Raises ModelError where the weights are damaged, StoreError where it cannot be written.
    """
    path = _path(model_dir, form)
    if path.is_file():
        return path
    with (
        model_files.locked(path, notice, f"packing the weights in {model_dir}"),
        model_files.disk_errors("write", path),
    ):
        if path.is_file():
            return path
        weights = load_weights(model_dir, device="cpu", dtype=torch.bfloat16)
        sources = _sources(load_config(model_dir))
        matrices = {name: weights[source] for name, source in sources.items()}
        num_values = sum(matrix.numel() for matrix in matrices.values())
        model_files.require_free(model_dir, num_values * 5 // 4, f"packing {model_dir.name}")
        done = 0

        def count(num_elements: int) -> None:
            nonlocal done
            done += num_elements
            progress(Progress("pack", 2 * done, 2 * num_values, "bytes"))

        temp = path.with_name(model_files.TEMP_PREFIX + path.name)
        try:
            with _workers() as pool:
                tensors = _pack(matrices, form, pool, count)
            write_tensors(temp, [in_memory(*item) for item in tensors.items()], lambda _: None)
            os.replace(temp, path)
        finally:
            temp.unlink(missing_ok=True)
        sync_dir(model_dir)
    return path


def load_packed(model_dir: Path, form: str) -> dict[str, Matrix]:
    """The matrices of a file that `make` made, mapped: layers.{i}.x and lm_head by name.

    Raises ModelError where the file is missing, damaged or not of this model.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    path = _path(model_dir, form)
    try:
        stored = load_file(path)
        config = load_config(model_dir)
        shapes = required_shapes(config)
        return {
            name: _form(stored, name, *shapes[source]) for name, source in _sources(config).items()
        }
    except (OSError, SafetensorError, ValueError, KeyError) as error:
        raise ModelError(
            f"the {form} weights in {path} are missing or damaged ({error}); "
            "remove that file: it is made again"
        ) from error


def _problem(settings: Settings) -> str | None:
    """Why packed weights cannot be had with these settings, or None."""
    if choose_device(settings.device).type != "cpu":
        return "they are for the CPU; leave --weights out, or use --device cpu"
    if choose_dtype(settings.dtype) != torch.bfloat16:
        return f"they compute in bfloat16; leave --dtype {settings.dtype} out"
    missing = ops.kernels_missing()
    return f"{missing}; use --weights bf16" if missing else None


def _path(model_dir: Path, form: str) -> Path:
    return model_dir / f"{form}-{ops.int4_layout()}-v{_VERSION}.safetensors"


def _came_in_four_bits(model_dir: Path) -> bool:
    """Whether it came with 4 bits: a mix that gives some layers' down more gives others' 4."""
    if load_config(model_dir).torch_dtype != "bfloat16":
        return False
    weights = load_weights(model_dir, device="cpu", dtype=torch.bfloat16)
    downs = (tensor for name, tensor in weights.items() if name.endswith(".down"))
    return any(is_four_bit(matrix, num_rows=16) for matrix in downs)


def _sources(config: ModelConfig) -> dict[str, str]:
    """By the name of a packed matrix, that of the tensor it is made of."""
    shapes = required_shapes(config)
    layers = range(config.num_hidden_layers)
    names = [f"layers.{i}.{name}" for i in layers for name in _LAYER_MATRICES]
    head = "embed_tokens" if config.tie_word_embeddings else _HEAD
    sources = dict(zip(names, names, strict=True)) | {_HEAD: head}
    return {name: source for name, source in sources.items() if ops.fits_int4(*shapes[source])}


@contextmanager
def _workers() -> Iterator[ThreadPoolExecutor]:
    """A thread a core, each with torch's operations to itself: slabs are too small to share."""
    num_threads = torch.get_num_threads()
    try:
        with ThreadPoolExecutor(
            num_threads, "longread-pack", torch.set_num_threads, initargs=(1,)
        ) as pool:
            try:
                yield pool
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise
    finally:
        torch.set_num_threads(num_threads)  # threads that start later take the last number set


def _pack(
    matrices: Mapping[str, Tensor],
    form: str,
    pool: ThreadPoolExecutor,
    count: Callable[[int], None],
) -> dict[str, Tensor]:
    """The file's tensors. count is told how many values each slab had."""
    came: set[str] = set()
    if form == "int4":
        came = set(compress(matrices, pool.map(is_four_bit, matrices.values())))
    narrow = came or (set(matrices) - {_HEAD} if form == "int4" else set())
    tensors: dict[str, Tensor] = {}
    for name, matrix in matrices.items():
        parts = _PARTS[:1] if name in narrow else _PARTS
        outputs = [_empty(matrix) for _ in parts]
        for part, (codes, scale_zero) in zip(parts, outputs, strict=True):
            tensors |= {f"{name}.{part}": codes, f"{name}.{part}_scale_zero": scale_zero}
        pack = partial(_pack_slab, matrix, outputs, bool(came))
        step = max(1, _SLAB_ELEMENTS // matrix.shape[1] // ops.SLAB_ROWS) * ops.SLAB_ROWS
        slabs = [slice(start, start + step) for start in range(0, matrix.shape[0], step)]
        for num_values in pool.map(pack, slabs):
            count(num_values)
    return tensors


def _empty(matrix: Tensor) -> tuple[Tensor, Tensor]:
    num_rows, num_columns = matrix.shape
    return (
        torch.empty((num_rows, num_columns // 2), dtype=torch.uint8),
        torch.empty((num_columns // ops.GROUP, num_rows, 2), dtype=torch.bfloat16),
    )


def _pack_slab(
    matrix: Tensor, outputs: list[tuple[Tensor, Tensor]], find_grid: bool, rows: slice
) -> int:
    wide = matrix[rows]
    narrow = len(outputs) == 1
    parts = [four_bit(wide, find_grid=find_grid)] if narrow else eight_bit(wide).halves()
    for part, (codes, scale_zero) in zip(parts, outputs, strict=True):
        codes[rows] = ops.pack_int4(part.codes)
        scale_zero[:, rows] = torch.stack((part.scale, part.zero), dim=2).transpose(0, 1)
    return wide.numel()


def _form(stored: Mapping[str, Tensor], name: str, num_rows: int, num_columns: int) -> Matrix:
    """Raises KeyError and ValueError where the file's tensors are not those of such a matrix."""

    def take(part: str, *shape: int) -> Tensor:
        tensor = stored[f"{name}.{part}"]
        if tuple(tensor.shape) != shape:
            raise ValueError(f"{name}.{part} has shape {list(tensor.shape)}")
        return tensor if tensor.data_ptr() % ops.ALIGNMENT == 0 else tensor.clone()

    num_groups = num_columns // ops.GROUP
    halves = [
        Int4Matrix(
            take(part, num_rows, num_columns // 2),
            take(f"{part}_scale_zero", num_groups, num_rows, 2),
        )
        for part in _PARTS
        if part == _PARTS[0] or f"{name}.{part}" in stored
    ]
    return halves[0] if len(halves) == 1 else Int8Matrix(halves[0], halves[1])
