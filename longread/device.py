"""The device and the dtype that settings name."""

from __future__ import annotations

import torch

from longread.errors import ModelError


def choose_device(device: str) -> torch.device:
    """`auto` is CUDA where there is a GPU; raises ModelError for a device that is not there."""
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        chosen = torch.device(device)
    except RuntimeError as error:
        raise ModelError(f"no such device: {device!r}; use auto, cpu or cuda") from error
    if chosen.type not in ("cpu", "cuda"):
        raise ModelError(f"device {device!r} is not supported; use auto, cpu or cuda")
    if chosen.type == "cuda" and not torch.cuda.is_available():
        raise ModelError("no CUDA GPU was found; use --device cpu, or see `longread doctor`")
    if chosen.type == "cuda" and (chosen.index or 0) >= torch.cuda.device_count():
        raise ModelError(
            f"there is no device {device}; this machine has {torch.cuda.device_count()} CUDA GPUs"
        )
    return chosen


def choose_dtype(dtype: str) -> torch.dtype:
    """`auto` is bfloat16; raises ModelError for anything but bfloat16 and float32."""
    dtypes = {"auto": torch.bfloat16, "bfloat16": torch.bfloat16, "float32": torch.float32}
    if dtype not in dtypes:
        raise ModelError(f"dtype must be one of {', '.join(dtypes)}, not {dtype!r}")
    return dtypes[dtype]
