"""Perplexity of a text: its losses, the difference of two forms, the command."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from longread_kernels import packed as ops
from typer.testing import CliRunner

from longread.cli import app
from longread.evaluate.perplexity import Losses, measure, pieces
from longread.events import Progress
from longread.model import Decoder
from longread.policies import Dense


def test_losses_are_those_of_each_token_from_those_before_it(model_dir: Path) -> None:
    decoder = Decoder.load(model_dir, "cpu", "float32")
    text = torch.arange(3, 303)  # over two chunks
    seen: list[Progress] = []
    found = measure(decoder, "bf16", [text, text[:5]], seen.append)
    assert len(found.losses) == 299 + 4 and seen[-1].done == 305
    torch.testing.assert_close(found.losses[:4], found.losses[299:], rtol=1e-4, atol=1e-4)
    for place in (0, 126, 127, 128, 298):
        logits = decoder.extend(text[: place + 1], decoder.new_cache(400), Dense())
        expected = -torch.log_softmax(logits, 0)[text[place + 1]]
        assert float(found.losses[place]) == pytest.approx(float(expected), abs=1e-3)
    assert found.perplexity == pytest.approx(math.exp(float(found.losses.mean())))


def test_a_difference_is_taken_token_by_token() -> None:
    torch.manual_seed(0)
    losses = 3 + torch.randn(1000, dtype=torch.float64)
    share, error = Losses("b", losses + 0.01, 0.0).beside(Losses("a", losses, 0.0))
    assert share == pytest.approx(math.expm1(0.01)) and error == pytest.approx(0, abs=1e-9)
    _, error = Losses("b", losses.flip(0), 0.0).beside(Losses("a", losses, 0.0))
    assert error == pytest.approx(math.sqrt(2 / 1000), rel=0.1)


def test_pieces() -> None:
    assert [len(piece) for piece in pieces(range(10), 4, 9)] == [4, 4]
    assert [len(piece) for piece in pieces(range(10), 4, 1)] == [4]
    assert [len(piece) for piece in pieces(range(3), 4, 9)] == [3]


@pytest.mark.skipif(ops.kernels_missing() is not None, reason="no packed kernels here")
def test_the_command(model_dir: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text(
        "We the People of the United States, in Order to form a more perfect Union. " * 9
    )
    command = [
        "eval",
        "perplexity",
        "--model",
        str(model_dir),
        "--device",
        "cpu",
        "--lengths",
        "64",
    ]
    result = CliRunner().invoke(app, [*command, "--data", str(text), "--samples", "3"])
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert [line.split()[0] for line in lines[:4]] == ["weights", "bf16", "int8", "int4"]
    record = json.loads(lines[-1])
    assert [form["tokens"] for form in record["forms"]] == [189] * 3
    assert record["forms"][0]["difference"] == 0 < abs(record["forms"][2]["difference"])
    for wrong, message in (
        (["--data", str(tmp_path)], "--data FILE"),
        (["--data", str(tmp_path / "none")], "cannot read"),
        (["--data", str(text), "--weights", "fp8"], "bf16, int8 and int4"),
    ):
        result = CliRunner().invoke(app, [*command, *wrong])
        assert result.exit_code != 0 and message in str(result.exception) + result.output
