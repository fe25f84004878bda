"""`longread eval --selection-only`: mass and recall of each layer and head, beside plain torch."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from longread.cli import main
from longread.config import Settings
from longread.errors import UsageError
from longread.evaluate import selection
from longread.evaluate.selection import NUM_QUERIES, Figures, measure
from longread.model import Decoder
from longread.policies import Dense, Policy, TokenSelect
from longread.trace import Trace

Capture = pytest.CaptureFixture[str]
CONSTITUTION = Path(__file__).parent.parent / "sample_docs/us_constitution.txt"
NUM_ROWS = 300


@dataclass
class _Rows(Policy):
    """Reads the same rows at each step; a set a KV head where there are several."""

    rows: tuple[tuple[int, ...], ...] = ()

    def select(self, layer_idx: int, q: Tensor, num_rows: int) -> Tensor | None:
        return torch.tensor(self.rows)


@pytest.fixture(scope="module")
def decoder(model_dir: Path) -> Decoder:
    return Decoder.load(model_dir, "cpu", "float32")


@pytest.fixture(scope="module")
def ids(decoder: Decoder) -> Tensor:
    generator = torch.Generator().manual_seed(5)
    return torch.randint(0, decoder.config.vocab_size, (NUM_ROWS,), generator=generator)


def _probs(decoder: Decoder, ids: Tensor) -> list[list[Tensor]]:
    """The attention of each step and layer, [H_q, rows], from a dense pass of the same tokens."""

    class Kept(Trace):
        def record(self, layer_idx: int, indices: Tensor | None, probs: Tensor) -> None:
            self.found.append(probs)

        found: list[Tensor]

    config = decoder.config
    shape = (config.num_hidden_layers, config.num_key_value_heads)
    cache = decoder.new_cache(NUM_ROWS)
    decoder.prefill(ids[:-NUM_QUERIES], cache)
    steps = []
    for token in ids[-NUM_QUERIES:]:
        trace = Kept(*shape, NUM_ROWS, device=torch.device("cpu"))
        trace.found = []
        decoder.decode(token[None], cache, Dense(), trace)
        steps.append(trace.found)
    return steps


@pytest.mark.parametrize(
    "rows",
    (
        (tuple(range(0, 200, 2)),),
        ((5, 17, 40, 260, -1), (0, 1, 2, 3, 4)),
        ((5, -1, 9), (200, 201, -1)),
    ),
)
def test_each_head_has_its_mass_and_its_recall(
    decoder: Decoder, ids: Tensor, rows: tuple[tuple[int, ...], ...]
) -> None:
    figures = measure(decoder, ids, lambda _: _Rows(rows))
    config = decoder.config
    shape = (config.num_hidden_layers, config.num_attention_heads)
    assert figures.mass.shape == figures.recall.shape == shape
    mass, recall = torch.zeros(shape).double(), torch.zeros(shape).double()
    for layers in _probs(decoder, ids):
        for layer, probs in enumerate(layers):
            for head, own in enumerate(probs):
                chosen = {row for row in rows[head * len(rows) // shape[1]] if row >= 0}
                best = set(own.topk(len(chosen)).indices.tolist())
                mass[layer, head] += float(own[sorted(chosen)].sum()) / NUM_QUERIES
                recall[layer, head] += len(best & chosen) / len(chosen) / NUM_QUERIES
    torch.testing.assert_close(figures.mass, mass, rtol=1e-3, atol=1e-5)
    torch.testing.assert_close(figures.recall, recall, rtol=0, atol=1e-3)
    assert figures.mass_kept == pytest.approx(float(mass.mean()), rel=1e-3)
    assert 0 < figures.mean_recall < 1


def test_reading_all_keeps_and_finds_all(decoder: Decoder, ids: Tensor) -> None:
    for policy in (Dense(), TokenSelect(budget=NUM_ROWS, window_size=8)):
        figures = measure(decoder, ids, lambda _, policy=policy: policy)
        torch.testing.assert_close(figures.mass, torch.ones_like(figures.mass))
        assert (figures.recall == 1).all() and figures.fraction_kept == 1


def test_exact_keys_find_more_of_the_best_rows_than_chance(decoder: Decoder, ids: Tensor) -> None:
    def make(rows: int) -> TokenSelect:
        return TokenSelect(budget=30, sink_size=0, window_size=0, index="exact", vote="none")

    figures = measure(decoder, ids, make)
    # Each head's own best rows, beside those of the question that are always read.
    assert figures.mean_recall > 0.5 > figures.fraction_kept


def test_a_layer_has_its_mean_and_its_worst_head() -> None:
    mass = torch.tensor([[0.9, 0.7, 0.8], [1.0, 1.0, 0.25]])
    recall = torch.tensor([[0.5, 0.6, 0.4], [1.0, 0.0, 0.5]])
    figures = Figures(mass, recall, 0.2, 100)
    head, rows = figures.table()
    assert head == ("layer", "mass kept", "worst head", "recall", "worst head")
    assert rows == [
        ("0", "0.800", "0.700 (1)", "0.500", "0.400 (2)"),
        ("1", "0.750", "0.250 (2)", "0.500", "0.000 (1)"),
    ]
    record = figures.record()
    assert record["layers"] == [
        {"mass_kept": [0.9, 0.7, 0.8], "recall": [0.5, 0.6, 0.4]},
        {"mass_kept": [1.0, 1.0, 0.25], "recall": [1.0, 0.0, 0.5]},
    ]
    assert record["recall"] == pytest.approx(0.5)


def test_the_command_shows_layers_and_tells_every_head(
    capsys: Capture, model_dir: Path, decoder: Decoder
) -> None:
    words = ["eval", "--selection-only", str(CONSTITUTION), "--pages", "1", "--budget", "5%"]
    words += ["--model", str(model_dir), "--dtype", "float32", "--window-size", "16"]
    assert main(words) == 0
    *lines, last = capsys.readouterr()[0].splitlines()
    record = json.loads(last)
    config = decoder.config
    layers = lines[lines.index("") + 2 :]
    assert len(layers) == len(record["layers"]) == config.num_hidden_layers
    for number, (line, layer) in enumerate(zip(layers, record["layers"], strict=True)):
        mass, recall = layer["mass_kept"], layer["recall"]
        assert len(mass) == len(recall) == config.num_attention_heads
        own = line.split()
        assert (own[0], own[1]) == (str(number), f"{sum(mass) / len(mass):.3f}")
        assert own[2:4] == [f"{min(mass):.3f}", f"({mass.index(min(mass))})"]
        assert own[4] == f"{sum(recall) / len(recall):.3f}"
    every = [value for layer in record["layers"] for value in layer["mass_kept"]]
    assert sum(every) / len(every) == pytest.approx(record["mass_kept"], abs=1e-5)


def test_what_is_not_read_densely_is_refused(settings: Settings) -> None:
    def unused(event: object) -> None:
        raise AssertionError(event)

    with pytest.raises(UsageError, match="read densely: leave --context select out"):
        selection.run(
            replace(settings, context="select"),
            "none.txt",
            pages=None,
            password=None,
            progress=unused,
            notice=unused,
        )
