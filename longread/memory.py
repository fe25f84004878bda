"""How much memory is free, of the machine and of its devices."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def available_bytes() -> int | None:
    """Memory that programs can have without swapping, or all there is where only that is known."""
    try:
        for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return None


def free_bytes(device: torch.device) -> int | None:
    """Memory of a device that new tensors can have; None where it is not known."""
    if device.type != "cuda":
        return available_bytes()
    import torch

    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + cached
