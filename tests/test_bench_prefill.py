"""What `bench prefill` refuses to report."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from longread.bench import prefill
from longread.errors import LongreadError

REFERENCE = torch.linspace(-3.0, 3.0, 1000)


def _off_by(share: float, seed: int) -> Tensor:
    """The reference with an error of a share of its RMS."""
    noise = torch.randn(1000, generator=torch.Generator().manual_seed(seed))
    return REFERENCE + noise * share * REFERENCE.pow(2).mean().sqrt()


def _run(monkeypatch: pytest.MonkeyPatch, logits: dict[str, Tensor]) -> tuple[list[str], float]:
    asked: list[str] = []

    def child(
        model: str, device: str, dtype: str, num_tokens: int, contender: str, out: Path
    ) -> tuple[prefill.PrefillRun, Tensor]:
        asked.append(f"{contender} {dtype}")
        found = REFERENCE if dtype == "float32" else logits[contender]
        return prefill.PrefillRun(contender, num_tokens, 1.0, 1), found

    monkeypatch.setattr(prefill, "_run_child", child)
    _, difference = prefill.run("model", "cpu", "bfloat16", 10, 1)
    return asked, difference


def test_logits_within_two_per_cent_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, difference = _run(
        monkeypatch, {"longread": _off_by(0.005, 1), "huggingface": _off_by(0.005, 2)}
    )
    assert 0.005 < difference < 0.02
    assert asked == ["longread bfloat16", "huggingface bfloat16"]


def test_a_model_that_differs_from_itself_is_judged_by_float32(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked, difference = _run(
        monkeypatch, {"longread": _off_by(0.03, 1), "huggingface": _off_by(0.03, 2)}
    )
    assert difference > 0.03 and asked[-1] == "huggingface float32"


def test_logits_farther_from_float32_than_hugging_faces_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(LongreadError, match="nothing is reported"):
        _run(monkeypatch, {"longread": _off_by(0.04, 1), "huggingface": _off_by(0.03, 2)})
