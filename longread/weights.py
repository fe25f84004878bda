"""Converted models: made once from a GGUF file, a folder or the hub, and loaded without a copy.

Owns which source a name means, the directory's life (lock, temporary directory, rename) and
loading. The formats stand in gguf_model.py and hf_model.py, the file writer in convert.py.

A converted directory holds model.safetensors, config.json, tokenizer.json and chat.json. Tensors:
embed_tokens [V, C], norm [C], lm_head [V, C] (absent where tied), inv_freq [D/2] fp32, and for each
layer i, named layers.{i}.x: qkv [(H_q + 2 H_kv) D, C], o [C, H_q D], gate_up [2 I, C], down [C, I],
input_norm [C], post_norm [C], where the model has them qkv_bias, o_bias, q_norm [D], k_norm [D].
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from longread import catalog, hub, model_files
from longread.atomic import sync_dir
from longread.errors import ModelError
from longread.events import NoticeFn, Progress, ProgressFn
from longread.model_config import (
    ModelConfig,
    description_errors,
    is_converted_folder,
    load_config,
)

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from longread.convert import SourceModel

__all__ = ["ModelConfig", "load_config", "load_weights", "prepare"]

_WEIGHTS_FILE = "model.safetensors"
CONVERTER_VERSION = 1  # raise it when the same source would give other files
_SPARE_BYTES = 256 << 20  # tokenizer files and caches, and room to breathe
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def prepare(model: str, models_dir: Path, progress: ProgressFn, notice: NoticeFn) -> Path:
    """Return the converted directory of a model, fetched and converted where it is not there.

    model: a catalogue name, a .gguf file, a Hugging Face folder, a hub id (owner/name), the name of
    a converted model or its directory. Raises ModelError and StoreError.
    """
    if model in catalog.CATALOG:
        return _prepare_named(catalog.CATALOG[model], models_dir, progress, notice)
    path = _existing(model)
    if path is not None and path.is_dir():
        return _prepare_folder(path, path.name, models_dir, progress, notice)
    if path is not None:
        return _prepare_gguf(path, models_dir, progress, notice)
    for converted in model_files.list_converted(models_dir):
        if model in (converted.name, converted.path.name):
            return converted.path
    if _HUB_ID.fullmatch(model) and not model.endswith(".gguf"):
        folder = hub.download_model(model, progress)
        return _prepare_folder(folder, model, models_dir, progress, notice)
    raise ModelError(
        f"no model {model!r}: give one of {', '.join(catalog.CATALOG)}, a .gguf file, a folder "
        "with a Hugging Face model, or a hub id (owner/name)"
    )


def load_weights(path: Path, *, device: str, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return a converted model's tensors by name, in `dtype` on `device` (inv_freq stays fp32).

    On the CPU, and where `dtype` is the stored one, they are views of the mapped file: nothing is
    read until it is used, and processes share the memory. Raises ModelError where the file is
    missing, damaged, or not what config.json says.
    """
    import torch
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    from longread.convert import required_shapes
    from longread.pinned import load_tensors

    config = load_config(path)
    try:
        tensors = load_file(path / _WEIGHTS_FILE)
        for name, shape in required_shapes(config).items():
            if tuple(tensors[name].shape) != shape:
                raise ValueError(f"{name} has shape {list(tensors[name].shape)}")
        is_stored = all(t.dtype == dtype or name == "inv_freq" for name, t in tensors.items())
        if torch.device(device).type == "cuda" and is_stored:
            staged = load_tensors(path / _WEIGHTS_FILE, torch.device(device))
            if staged is not None:
                return staged
    except (OSError, SafetensorError, ValueError, KeyError) as error:
        raise ModelError(
            f"the weights in {path} are damaged ({error}); "
            f"run `longread models rm {config.name}` and try again"
        ) from error
    return {
        name: tensor.to(device) if name == "inv_freq" else tensor.to(device, dtype)
        for name, tensor in tensors.items()
    }


def _existing(model: str) -> Path | None:
    try:
        path = Path(model).expanduser().resolve()
        return path if model and path.exists() else None
    except (OSError, RuntimeError, ValueError):  # no such home, a name too long, a NUL in it
        return None


@contextmanager
def _source_errors(path: Path) -> Iterator[None]:
    """Turn an OSError on the way into a ModelError; errors on the way out are StoreErrors."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        raise ModelError(
            f"cannot read {error.filename or path}: {reason}; check the file and its permissions"
        ) from error


def _prepare_named(
    source: catalog.ModelSource, models_dir: Path, progress: ProgressFn, notice: NoticeFn
) -> Path:
    identity = _identity({"gguf": source.sha256})
    if found := model_files.find_converted(models_dir, identity):
        return found
    path = catalog.fetch(source, models_dir, progress, notice)
    with ExitStack() as stack:
        work = _Work(_open_gguf(path, source.name, stack), progress, hash_bytes=0)
        return _convert(work, identity, models_dir, notice)


def _prepare_gguf(path: Path, models_dir: Path, progress: ProgressFn, notice: NoticeFn) -> Path:
    with _source_errors(path), ExitStack() as stack:
        if found := model_files.find_recorded(models_dir, path, [path]):
            return found
        source = _open_gguf(path, path.stem, stack)
        work = _Work(source, progress, hash_bytes=path.stat().st_size)
        sha256 = catalog.file_sha256(path, work.advance)
        work.rename(catalog.name_of(sha256) or source.config.name)
        identity = _identity({"gguf": sha256})
        target = _convert(work, identity, models_dir, notice)
        model_files.record(models_dir, path, [path], target)
        return target


def _prepare_folder(
    folder: Path, name: str, models_dir: Path, progress: ProgressFn, notice: NoticeFn
) -> Path:
    from longread.hf_model import read_folder, source_files

    if is_converted_folder(folder):
        return folder
    with _source_errors(folder), ExitStack() as stack:
        files = source_files(folder)
        if found := model_files.find_recorded(models_dir, folder, files):
            return found
        with description_errors(folder):
            source = read_folder(folder, name, stack)
        work = _Work(source, progress, hash_bytes=sum(file.stat().st_size for file in files))
        hashes = {file.name: catalog.file_sha256(file, work.advance) for file in files}
        target = _convert(work, _identity(hashes), models_dir, notice)
        model_files.record(models_dir, folder, files, target)
        return target


def _open_gguf(path: Path, name: str, stack: ExitStack) -> SourceModel:
    from longread.gguf_model import read_gguf
    from longread.gguf_reader import GGUFFile

    file = stack.enter_context(GGUFFile(path))
    with description_errors(path):
        return read_gguf(file, name)


class _Work:
    """A source, what converting it writes, and one running count of bytes hashed and written."""

    def __init__(self, source: SourceModel, progress: ProgressFn, hash_bytes: int) -> None:
        from longread.convert import plan

        self.source = source
        self.outputs = plan(source)
        self.num_bytes = sum(output.num_bytes for output in self.outputs)
        self._progress = progress
        self._total = hash_bytes + self.num_bytes
        self._done = 0

    def rename(self, name: str) -> None:
        """Call the model `name` from here on."""
        config = dataclasses.replace(self.source.config, name=name)
        self.source = dataclasses.replace(self.source, config=config)

    def advance(self, num_bytes: int) -> None:
        self._done += num_bytes
        self._progress(Progress("convert", self._done, self._total, "bytes"))


def _convert(work: _Work, identity: str, models_dir: Path, notice: NoticeFn) -> Path:
    """Make the converted directory, unless another process has; it gets its name when whole."""
    name = work.source.config.name
    target = model_files.converted_path(models_dir, name, identity)
    with (
        model_files.locked(target, notice, f"converting {name}"),
        model_files.disk_errors("write", target),
    ):
        if found := model_files.find_converted(models_dir, identity):
            return found
        model_files.require_free(target.parent, work.num_bytes + _SPARE_BYTES, f"converting {name}")
        temp = target.with_name(model_files.TEMP_PREFIX + target.name)
        shutil.rmtree(temp, ignore_errors=True)
        temp.mkdir()
        try:
            _write_files(work, identity, temp)
            os.rename(temp, target)
            sync_dir(target.parent)
        except BaseException:
            shutil.rmtree(temp, ignore_errors=True)
            raise
    return target


def _write_files(work: _Work, identity: str, directory: Path) -> None:
    from longread.convert import write_tensors
    from longread.prompt import derive_chat_format

    source = work.source
    source.write_tokenizer(directory)  # first: what is not supported fails before the long part
    chat = derive_chat_format(
        source.chat_template, bos_token=source.bos_token, eos_token=source.eos_token
    )
    (directory / "chat.json").write_text(json.dumps(chat, indent=2) + "\n", encoding="utf-8")
    config = dataclasses.replace(source.config, identity=identity)
    (directory / "config.json").write_text(config.to_json(), encoding="utf-8")
    write_tensors(directory / _WEIGHTS_FILE, work.outputs, work.advance)
    for path in directory.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())
    sync_dir(directory)


def _identity(hashes: Mapping[str, str]) -> str:
    lines = [f"longread converter {CONVERTER_VERSION}"]
    lines += [f"{name} {sha256}" for name, sha256 in sorted(hashes.items())]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()
