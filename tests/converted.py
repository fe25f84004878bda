"""Converting in tests: run it, load the result, and fuse tensors a second way to compare."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from longread.events import Notice, Progress
from longread.weights import load_weights, prepare


class Log:
    def __init__(self) -> None:
        self.progress: list[Progress] = []
        self.notices: list[str] = []

    def take(self, event: Progress | Notice) -> None:
        if isinstance(event, Progress):
            self.progress.append(event)
        else:
            self.notices.append(event.message)


def run(source: Path | str, models_dir: Path, log: Log | None = None) -> Path:
    log = log or Log()
    return prepare(str(source), models_dir, log.take, log.take)


def stored(path: Path, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    return load_weights(path, device="cpu", dtype=dtype)


def fused(parts: dict[str, Tensor], num_layers: int) -> dict[str, Tensor]:
    """The converter's tensors from unfused ones, written out a second way."""
    joined: dict[str, tuple[str, ...]] = {
        "qkv": ("q", "k", "v"),
        "qkv_bias": ("q_bias", "k_bias", "v_bias"),
        "gate_up": ("gate", "up"),
    }
    result = {name: parts[name] for name in parts if "layers." not in name}
    for i in range(num_layers):
        prefix = f"layers.{i}."
        layer = {k.removeprefix(prefix): v for k, v in parts.items() if k.startswith(prefix)}
        for name, members in joined.items():
            if members[0] in layer:
                layer[name] = torch.cat([layer.pop(member) for member in members])
        result |= {prefix + name: tensor for name, tensor in layer.items()}
    return result


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() - {"inv_freq"} == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name
