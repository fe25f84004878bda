"""The Hugging Face hub: is it there, and files from it. Owns nothing of what the files mean.

A machine without network must learn so within seconds, whatever its resolver or proxy does: the
first request runs in a thread of its own and is given up after `_TRY_S`.
"""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from longread.errors import ModelError
from longread.events import Progress, ProgressFn

if TYPE_CHECKING:
    from huggingface_hub.hf_api import ModelInfo

_TRY_S = 4.0
_DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EROFS)
_WANTED_NAMES = (
    "config.json",
    "generation_config.json",
    "model.safetensors.index.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
)


class HubUnreachable(ModelError):
    """There is no network, no answer in time, or the hub is switched off."""


def cached_file(repo: str, file: str) -> Path | None:
    """Return the file's path where another program has already fetched it from the hub."""
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(repo, file)
    return Path(found) if isinstance(found, str) else None


def download_file(repo: str, file: str, directory: Path, progress: ProgressFn) -> Path:
    """Fetch one file of a repository into `directory`; return its path.

    `progress` may be called from another thread. Raises ModelError, within five seconds where the
    hub cannot be reached.
    """
    from huggingface_hub import get_hf_file_metadata, hf_hub_download, hf_hub_url

    found = _first_try(repo, lambda: get_hf_file_metadata(hf_hub_url(repo, file), timeout=_TRY_S))
    bar = _bar_class(progress, int(found.size or 0))
    return Path(
        _translated(repo, lambda: hf_hub_download(repo, file, local_dir=directory, tqdm_class=bar))
    )


def download_model(repo: str, progress: ProgressFn) -> Path:
    """Fetch a model's safetensors, config and tokenizer into the hub's own cache.

    What is already there is not fetched again; without network a complete copy there is enough.
    Raises ModelError, within five seconds where the hub cannot be reached.
    """
    from huggingface_hub import HfApi, hf_hub_download

    try:
        info = _first_try(
            repo, lambda: HfApi().model_info(repo, files_metadata=True, timeout=_TRY_S)
        )
    except HubUnreachable as error:
        if cached := _cached_model(repo):
            return cached
        raise HubUnreachable(
            f"cannot fetch {repo}: {error}; check the network, or pass the path of a model folder "
            "or .gguf file with --model"
        ) from error
    files = _wanted_files(info)
    if "config.json" not in files or not any(name.endswith(".safetensors") for name in files):
        raise ModelError(
            f"{repo} has no config.json with safetensors weights; for a GGUF repository download "
            "the .gguf file and pass its path with --model"
        )
    bar = _bar_class(progress, sum(files.values()))

    def download(file: str) -> str:
        return hf_hub_download(repo, file, revision=info.sha, tqdm_class=bar)

    folders = [Path(_translated(repo, partial(download, file))).parent for file in files]
    return folders[0]


def _wanted_files(info: ModelInfo) -> dict[str, int]:
    """Return names and sizes of the top-level files that a conversion reads."""
    sizes = {file.rfilename: int(file.size or 0) for file in info.siblings or ()}
    sharded = "model.safetensors.index.json" in sizes
    wanted = {}
    for name, size in sorted(sizes.items()):
        # Some repositories also hold the weights in their maker's own layout (consolidated.*).
        weights = name.startswith("model-") if sharded else name == "model.safetensors"
        if name in _WANTED_NAMES or (name.endswith(".safetensors") and weights):
            wanted[name] = size
    return wanted


def _cached_model(repo: str) -> Path | None:
    config = cached_file(repo, "config.json")
    if config is None:
        return None
    has_weights = any(config.parent.glob("*.safetensors"))
    return config.parent if has_weights else None


def _first_try(repo: str, request: Callable[[], Any]) -> Any:
    """Return what `request` returns; ModelError where it fails or takes longer than `_TRY_S`."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        raise HubUnreachable("the Hugging Face hub is switched off by HF_HUB_OFFLINE")
    outcome: list[Any] = []
    failure: list[Exception] = []

    def work() -> None:
        try:
            outcome.append(request())
        except Exception as error:
            failure.append(error)

    # Not a pool: its threads are joined at exit, and a resolver can block for half a minute.
    thread = threading.Thread(target=work, name="longread-hub-try", daemon=True)
    thread.start()
    thread.join(_TRY_S)
    if failure:
        raise _model_error(repo, failure[0]) from failure[0]
    if not outcome:
        raise HubUnreachable("the Hugging Face hub is not reachable")
    return outcome[0]


def _translated(repo: str, request: Callable[[], Any]) -> Any:
    try:
        return request()
    except (
        Exception
    ) as error:  # the hub, its HTTP client and its storage client each have their own
        raise _model_error(repo, error) from error


def _model_error(repo: str, error: Exception) -> ModelError:
    from huggingface_hub import errors

    if isinstance(error, errors.GatedRepoError):
        return ModelError(
            f"{repo} is gated: accept its licence on the hub and log in with `hf auth login`"
        )
    if isinstance(error, (errors.RepositoryNotFoundError, errors.EntryNotFoundError)):
        if not isinstance(error, errors.LocalEntryNotFoundError):
            return ModelError(f"the Hugging Face hub has no {repo} that you may read")
    if isinstance(error, OSError) and error.errno in _DISK_ERRORS:
        return ModelError(f"cannot store {repo}: {error.strerror}; check the hub's cache directory")
    # Not the error's own text: it names hosts and addresses.
    return HubUnreachable("the Hugging Face hub is not reachable")


def _bar_class(progress: ProgressFn, total: int) -> Any:
    """A stand-in for tqdm that reports one running total over all files it is used for."""
    lock = threading.Lock()
    done = 0

    class Bar:
        def __init__(self, *_: object, total: float | None = None, initial: int = 0, **__: object):
            self.total = total
            self.n = 0
            self.update(initial)

        def __enter__(self) -> Bar:
            return self

        def __exit__(self, *_: object) -> None:
            pass

        def update(self, num_bytes: float | None = 1) -> None:
            nonlocal done
            with lock:
                done += int(num_bytes or 0)
                self.n += int(num_bytes or 0)
                progress(Progress("download", min(done, total), total, "bytes"))

        def ignore(self, *_: object, **__: object) -> None:
            pass

        # With `update_transfer` the hub's storage client uses one bar, not one for each direction.
        close = refresh = set_description = set_postfix_str = ignore
        update_transfer = set_transfer_postfix_str = ignore

    return Bar
