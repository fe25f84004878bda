"""What `bench prefill` refuses to report."""

from __future__ import annotations

from pathlib import Path

import pytest
import tiny
import torch
from longread_kernels import dispatch as ops
from longread_kernels import reference_gathered
from torch import Tensor

from longread.bench import prefill, selected
from longread.bench.shapes import SHAPES
from longread.errors import LongreadError
from longread.model import Decoder
from longread.past_window import Reading
from longread.weights import load_config, load_weights

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


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("bench")
    return tiny.convert(tiny.save_hf_folder(root / "hf", "qwen2"), root / "models")


@torch.inference_mode()
def test_what_is_timed_by_selection_reads_by_selection(
    converted: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    logits = {
        (contender, num_tokens): prefill._child(
            str(converted), "cpu", "float32", num_tokens, contender
        )
        for num_tokens in (100, 6000)
        for contender in ("longread", "select")
        if (contender, num_tokens) != ("longread", 6000)  # which the window does not hold
    }
    assert '"contender": "select", "num_tokens": 6000' in capsys.readouterr().out
    torch.testing.assert_close(logits["select", 100], logits["longread", 100], rtol=1e-3, atol=1e-3)
    assert logits["select", 6000].isfinite().all()


def test_ways_to_read_are_timed_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    def child(
        model: str, device: str, dtype: str, num_tokens: int, contender: str, out: Path
    ) -> tuple[prefill.PrefillRun, Tensor]:
        return prefill.PrefillRun(contender, num_tokens, 1.0, 1), REFERENCE

    monkeypatch.setattr(prefill, "_run_child", child)
    runs = prefill.run_contexts("model", "cpu", "bfloat16", 10, 2, ("dense", "select"))
    assert [run.contender for run in runs] == ["dense", "select", "select", "dense"]


FEW = Reading(sink_size=4, window_size=8, budget=30, chunk_tokens=24, num_voters=8)


@pytest.fixture
def checked(converted: Path, monkeypatch: pytest.MonkeyPatch) -> Decoder:
    """A decoder whose kernels the interpreter runs, on few rows."""
    pytest.importorskip("triton")
    monkeypatch.setattr(ops, "on_triton", lambda x: True)
    weights = load_weights(converted, device="cpu", dtype=torch.float16)
    config = load_config(converted)
    return Decoder(config, weights, torch.device("cpu"), torch.float16, past_window=Reading())


@pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels are compiled for the GPU")
def test_kernels_are_compared_before_they_are_timed(checked: Decoder) -> None:
    found = selected.check_kernels(checked, FEW, 90)
    assert len(found) == 7 and max(found.values()) < 0.01


@pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels are compiled for the GPU")
def test_a_wrong_kernel_is_not_timed(checked: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(*inputs: Tensor | float) -> Tensor:
        return reference_gathered.attend_listed_ref(*inputs) * 1.02  # type: ignore[arg-type]

    monkeypatch.setattr(ops, "attend_listed", wrong)
    with pytest.raises(LongreadError, match="attention of a chunk: .* nothing is timed"):
        selected.check_kernels(checked, FEW, 90)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", ("qwen2.5-0.5b", "llama3-8b", "qwen3-4b"))
def test_kernels_of_each_shape_on_a_gpu(shape: str) -> None:
    """In bf16, over as many rows as a chunk chooses from in earnest."""
    device = torch.device("cuda")
    config = SHAPES[shape]
    weights = {
        "embed_tokens": torch.empty(0),
        "norm": torch.empty(0),
        "inv_freq": 1.0 / 1e6 ** (torch.arange(0, config.head_dim, 2) / config.head_dim),
    }
    decoder = Decoder(config, weights, device, torch.bfloat16, past_window=Reading())
    assert len(selected.check_kernels(decoder, num_rows=131_072)) == 7
