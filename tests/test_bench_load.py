"""`bench load`: what it times, what it refuses to report, and the line of JSON at its end."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch

from longread.bench import load
from longread.bench.shapes import SHAPES
from longread.cache import KVCache
from longread.errors import LongreadError, UsageError

ROW_BYTES = 2 * 2 * 2 * 16 * 2  # K and V, layers, heads, head size, bf16


@pytest.fixture(autouse=True)
def tiny_shape(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    shape = dataclasses.replace(
        SHAPES["qwen2.5-1.5b"],
        num_hidden_layers=2,
        hidden_size=32,
        intermediate_size=48,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        vocab_size=100,
    )
    monkeypatch.setitem(load.SHAPES, "tiny", shape)
    monkeypatch.setattr(load, "_COPY_BYTES", 1 << 16)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_each_kind_is_timed_in_turn(device: str, dtype: str, tmp_path: Path) -> None:
    num_rows = 4096 + 333 if dtype == "bfloat16" else 100
    row_bytes = ROW_BYTES * (1 if dtype == "bfloat16" else 2)
    runs = load.run("tiny", device, dtype, num_rows * row_bytes + 5, repeats=2, readers=[2])
    kinds = [load.COPY, load.RESTORE, load.MAPPED]
    if device == "cuda":
        kinds[2:] = [load.PLAIN, "restore, 2 threads", load.WEIGHTS]
    assert [timed.what for timed in runs] == 2 * kinds
    assert runs[1].num_bytes == pytest.approx(num_rows * row_bytes, rel=0.5)
    assert runs[0].gb_per_s == runs[0].num_bytes / runs[0].seconds / 1e9
    assert list(tmp_path.iterdir()) == []


def test_rows_that_differ_are_not_reported(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real = KVCache.load_block

    def load_wrongly(self: KVCache, start: int, end: int, block: dict[str, torch.Tensor]) -> None:
        real(self, start, end, block)
        self.v[1, 1, end - 1, -1].view(torch.int32).bitwise_xor_(1)  # the float may be no number

    monkeypatch.setattr(KVCache, "load_block", load_wrongly)
    with pytest.raises(LongreadError, match="restored rows are not those written"):
        load.run("tiny", device, "float32", 100 * ROW_BYTES, 1)


def test_weights_that_differ_are_not_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    real = load.load_weights

    def load_wrongly(*args: object, **__: object) -> dict[str, torch.Tensor]:
        tensors = real(*args, device="cpu", dtype=torch.float32)
        return tensors | {"norm": tensors["norm"] + 1}

    monkeypatch.setattr(load, "load_weights", load_wrongly)
    with pytest.raises(LongreadError, match="loaded weights are not those written"):
        load.run("tiny", "cpu", "float32", 100 * ROW_BYTES, 1)


def test_an_unknown_shape_is_a_usage_error() -> None:
    with pytest.raises(UsageError, match="choose one of llama3-8b"):
        load.run("llama9", "cpu", "auto", 1 << 20, 1)


def test_the_last_line_is_json() -> None:
    command = [sys.executable, "-m", "longread", "bench", "load", "--device", "cpu", "--kv-only"]
    command += ["--model", "qwen2.5-1.5b", "--gib", "0.001", "--repeats", "1"]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    *table, last = result.stdout.splitlines()
    record = json.loads(last)
    assert table[0].split() == ["transfer", "size", "first_gb/s", "median_gb/s", "of_copy"]
    assert record["ratio"] == record["gb_per_s"]["restore"] / record["gb_per_s"]["copy"]
    assert record["weights_ratio"] is None and len(record["runs"]) == 2
