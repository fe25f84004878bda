"""What works on this machine and what does not, with the remedy: the checks of `longread doctor`.

Each check looks and never raises; nothing is fetched, and no model is loaded.
"""

from __future__ import annotations

import importlib.metadata
import locale
import os
import platform
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from longread import __version__, catalog
from longread.config import Settings
from longread.memory import available_bytes
from longread.plain_text import count_text, size_text

OK, WARN, FAIL = "ok", "warn", "fail"

_SPARE_MEMORY_BYTES = 2_000_000_000  # beside the weights: the cache of a long document, and torch
_UNKNOWN_MODEL_BYTES = 3_100_000_000  # the default model's weights in bfloat16
_LITTLE_DISK_BYTES = 5_000_000_000
_NO_DISK_BYTES = 500_000_000


@dataclass(frozen=True)
class Check:
    """One line of the report; `remedy` is empty where nothing is wrong."""

    name: str
    status: str  # ok, warn or fail
    found: str
    remedy: str = ""


def checkup(settings: Settings) -> list[Check]:
    """Run every check, in the order of the report."""
    checks: list[Callable[[Settings], list[Check]]] = [
        _python,
        _torch,
        _weights,
        _memory,
        _directories,
        _disk,
        _models,
        _triton,
        _encoding,
    ]
    return [found for check in checks for found in check(settings)]


def _python(settings: Settings) -> list[Check]:
    return [Check("longread", OK, f"{__version__} on Python {platform.python_version()}")]


def _torch(settings: Settings) -> list[Check]:
    try:
        import torch
    except Exception as error:  # a broken install fails in many ways
        remedy = "reinstall it with `pip install --force-reinstall torch`"
        return [Check("torch", FAIL, f"cannot be imported: {error}", remedy)]
    checks = [Check("torch", OK, str(torch.__version__))]
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if num_gpus:
        name = torch.cuda.get_device_name(0)
        checks.append(Check("device", OK, f"{count_text(num_gpus, 'GPU')}, {name}"))
    elif settings.device.startswith("cuda"):
        remedy = "unset the device, or install a CUDA build of torch and its driver"
        checks.append(
            Check("device", FAIL, f"{settings.device} is set and torch sees none", remedy)
        )
    else:
        checks.append(Check("device", OK, "CPU"))
    num_threads = settings.threads or torch.get_num_threads()
    num_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
    if num_threads > num_cores:
        remedy = f"set threads to {num_cores}"
        found = f"{num_threads} for {count_text(num_cores, 'core')}"
        checks.append(Check("threads", WARN, found, remedy))
    else:
        checks.append(Check("threads", OK, f"{num_threads}"))
    return [*checks, _bfloat16(settings, on_gpu=num_gpus > 0)]


def _bfloat16(settings: Settings, *, on_gpu: bool) -> Check:
    import torch

    if on_gpu:
        if torch.cuda.is_bf16_supported(including_emulation=False):
            return Check("bfloat16", OK, "in the GPU's hardware")
        return Check("bfloat16", WARN, "the GPU emulates it", "try --dtype float32")
    capability = torch.backends.cpu.get_cpu_capability()
    try:
        ones = torch.ones(8, 8, dtype=torch.bfloat16)
        right = float((ones @ ones)[0, 0]) == 8.0
    except RuntimeError:
        right = False
    if not right:
        return Check("bfloat16", FAIL, "does not work on this CPU", "use --dtype float32")
    flags = _cpu_flags()
    if flags & {"avx512_bf16", "amx_bf16", "bf16"}:
        return Check("bfloat16", OK, f"in the CPU's hardware ({capability})")
    return Check("bfloat16", WARN, f"no instructions for it ({capability})", "it works, slower")


def _cpu_flags() -> set[str]:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return set()
    for line in lines:
        name, _, value = line.partition(":")
        if name.strip().lower() in ("flags", "features"):
            return set(value.split())
    return set()


def _weights(settings: Settings) -> list[Check]:
    from longread_kernels.packed import kernels_missing

    reason = kernels_missing()
    found = f"bf16 alone on the CPU: {reason}" if reason else "bf16, int8 and int4 on the CPU"
    return [Check("weights", OK, found)]


def _memory(settings: Settings) -> list[Check]:
    available = available_bytes()
    if available is None:
        return [Check("memory", OK, "not known on this system")]
    model_bytes = _converted_bytes(settings) or _UNKNOWN_MODEL_BYTES
    needed = model_bytes + _SPARE_MEMORY_BYTES
    found = f"{size_text(available)} available"
    if available < needed:
        remedy = f"{settings.model} wants about {size_text(needed)}; close programs or use a "
        return [Check("memory", WARN, found, remedy + "smaller model")]
    return [Check("memory", OK, found)]


def _converted_bytes(settings: Settings) -> int:
    try:
        listings = catalog.list_models(settings.models_dir)
    except OSError:
        return 0
    return sum(item.converted_bytes for item in listings if item.name == settings.model)


def _directories(settings: Settings) -> list[Check]:
    named = {
        "cache_dir": settings.cache_dir,
        "models_dir": settings.models_dir,
        "sessions_dir": settings.sessions_dir,
    }
    checks = []
    for name, path in named.items():
        try:
            # A directory that is not there yet is made in the nearest one that is.
            with tempfile.TemporaryFile(dir=_existing(path)):
                pass
        except OSError as error:
            remedy = f"set LONGREAD_{name.upper()} to a directory you can write to"
            found = f"{path}: {error.strerror or error}"
            checks.append(Check(name, FAIL, found, remedy))
        else:
            checks.append(Check(name, OK, f"{path}, writable"))
    return checks


def _existing(path: Path) -> Path:
    return next((parent for parent in (path, *path.parents) if os.path.exists(parent)), Path("/"))


def _disk(settings: Settings) -> list[Check]:
    try:
        free = shutil.disk_usage(_existing(settings.cache_dir)).free
    except OSError as error:
        return [Check("disk", WARN, f"cannot be looked at: {error.strerror or error}")]
    found = f"{size_text(free)} free for the cache, cap {size_text(settings.cache_max_bytes)}"
    remedy = "free some, or set LONGREAD_CACHE_DIR to another disk"
    if free < _NO_DISK_BYTES:
        return [Check("disk", FAIL, found, remedy)]
    if free < _LITTLE_DISK_BYTES:
        return [Check("disk", WARN, found, remedy)]
    return [Check("disk", OK, found)]


def _models(settings: Settings) -> list[Check]:
    try:
        listings = catalog.list_models(settings.models_dir)
    except OSError as error:
        return [Check("models", WARN, f"cannot be listed: {error.strerror or error}")]
    ready = [item.name for item in listings if item.path is not None]
    found = f"ready: {', '.join(ready) or 'none'}"
    if settings.model in catalog.CATALOG and settings.model not in ready:
        remedy = f"the first question fetches {settings.model}; or `longread models pull` does"
        return [Check("models", WARN, found, remedy)]
    return [Check("models", OK, found)]


def _triton(settings: Settings) -> list[Check]:
    import torch
    from longread_kernels.dispatch import triton_missing

    if torch.cuda.is_available() and (reason := triton_missing()):
        remedy = "until it is remedied a GPU answers through torch's own operations, which is slow"
        return [Check("triton", WARN, reason, remedy)]
    try:
        version = importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        return [Check("triton", OK, "not installed; torch's own operations are used")]
    return [Check("triton", OK, version)]


def _encoding(settings: Settings) -> list[Check]:
    encoding = locale.getencoding()
    if encoding.lower().replace("-", "") == "utf8":
        return [Check("terminal", OK, "UTF-8")]
    remedy = "output is UTF-8 all the same; set LANG to a UTF-8 locale such as C.UTF-8"
    return [Check("terminal", WARN, f"the locale's encoding is {encoding}", remedy)]
