"""What the tests of Triton kernels share: on a GPU where there is one, else Triton's interpreter.

The interpreter computes dots of bf16 wrongly, so there the kernels run on fp16.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import tiny
import torch
from torch import Tensor

from longread.model import Decoder
from longread.weights import load_config, load_weights

pytest.importorskip("triton")

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
DTYPE = torch.bfloat16 if ON_GPU else torch.float16
TOLERANCE = 1e-2  # relative RMS, of two-byte floats


def narrow_decoder(root: Path, family: str = "qwen2") -> Decoder:
    """A tiny model in fp16, which is finer than bf16, so that less hides in the rounding."""
    converted = tiny.convert(tiny.save_hf_folder(root / "hf", family), root / "models")
    weights = load_weights(converted, device=str(DEVICE), dtype=torch.float16)
    return Decoder(load_config(converted), weights, DEVICE, torch.float16)


def random(*shape: int, seed: int = 0, dtype: torch.dtype = DTYPE) -> Tensor:
    """Normal values on the kernels' device."""
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return values.to(DEVICE, dtype)


def wide(x: Tensor) -> Tensor:
    """A copy in float64 on the CPU, for the reference."""
    return x.to("cpu", torch.float64)


def assert_near(found: Tensor, expected: Tensor, tolerance: float = TOLERANCE) -> None:
    """Relative RMS error under `tolerance`; no number missing."""
    found, expected = wide(found), wide(expected)
    assert found.shape == expected.shape
    assert found.isfinite().all(), "output that is no number, or was not written"
    error = float((found - expected).norm() / expected.norm().clamp(min=1e-30))
    assert error < tolerance, f"relative RMS error {error:.2e}"


@pytest.fixture
def poison() -> Iterator[None]:
    """Fill every new tensor with NaN, so that output which is not written shows."""
    torch.use_deterministic_algorithms(True)  # fills uninitialised memory
    yield
    torch.use_deterministic_algorithms(False)
