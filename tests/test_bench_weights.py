"""`bench weights`: its bytes, its figures, its refusal, its line of JSON."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import tiny
from longread_kernels import packed as ops
from typer.testing import CliRunner

from longread.bench import weights
from longread.cli import app
from longread.errors import LongreadError
from longread.model import Decoder
from longread.packed import make
from longread.policies import Dense

pytestmark = pytest.mark.skipif(
    ops.kernels_missing() is not None, reason="no packed kernels on this machine"
)


@pytest.fixture(scope="module")
def own_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("weights")
    return tiny.convert(tiny.save_hf_folder(root / "hf", "llama"), root)


def decoder_of(model_dir: Path, form: str) -> Decoder:
    if form != "bf16":
        make(model_dir, form, lambda progress: None, lambda notice: None)
    return Decoder.load(model_dir, "cpu", "bfloat16", weights=form)


def test_bytes_are_those_of_the_form(own_model: Path) -> None:
    found = {}
    for form in ("bf16", "int8", "int4"):
        figures = weights.measure(decoder_of(own_model, form), form, Dense(), 100, [1, 3], 2, 1e9)
        found[form] = figures.step_bytes
        assert figures.floor_ms == pytest.approx(figures.step_bytes / 1e6)
        assert set(figures.products_ms) == {1, 3} and figures.step_ms > 0
        assert figures.difference == 0 if form == "bf16" else 0.001 < figures.difference < 0.15
    hidden, rows = 96, 160 + 96 + 256
    layer_values = rows * hidden + 128 * hidden
    head_values = 400 * hidden
    assert found["bf16"] == 2 * (2 * layer_values + head_values)
    assert found["int8"] == (2 * layer_values + head_values) * 10 // 8
    assert found["int4"] == 2 * layer_values * 5 // 8 + head_values * 10 // 8
    assert weights.read_rate() > 1e8


def test_products_far_off_are_not_timed(own_model: Path) -> None:
    decoder = decoder_of(own_model, "int4")
    layer = decoder.network.layers[0]
    decoder.network.layers[0] = replace(layer, qkv=-layer.qkv)
    with pytest.raises(LongreadError, match="relative RMS: nothing is timed"):
        weights.measure(decoder, "int4", Dense(), 100, [1], 2, 1e9)


def test_the_command(own_model: Path) -> None:
    command = ["bench", "weights", "--model", str(own_model), "--rows", "100", "--repeats", "1"]
    result = CliRunner().invoke(app, [*command, "--tokens", "1,2"])
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert [line.split()[0] for line in lines[:4]] == ["weights", "bf16", "int8", "int4"]
    record = json.loads(lines[-1])
    assert [figure["form"] for figure in record["figures"]] == ["bf16", "int8", "int4"]
    assert set(record["figures"][0]["products_ms"]) == {"1", "2"}
    wrong = CliRunner().invoke(app, [*command, "--weights", "fp8"])
    assert wrong.exit_code != 0 and "bf16, int8 and int4" in str(wrong.exception) + wrong.output
