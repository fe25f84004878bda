"""`longread bench decode` without its clock: what it compares before it times anything."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from triton_case import ON_GPU, narrow_decoder

from longread import decode_graph
from longread.bench import decode
from longread.decode_graph import StepGraph
from longread.errors import LongreadError, UsageError
from longread.model import Decoder
from longread.policies import TokenSelect

NUM_ROWS = 200


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    return narrow_decoder(tmp_path_factory.mktemp("decode"))


@pytest.fixture(autouse=True)
def no_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each body is run once; on the CPU there is no GPU memory to ask for."""

    def run_once(body: Callable[[], None], repeats: int) -> float:
        body()
        return 1.0

    monkeypatch.setattr(decode, "median_ms", run_once)
    monkeypatch.setattr(decode, "graph_ms", run_once)
    if not ON_GPU:
        monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: None)
        monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 1)


@pytest.mark.parametrize("batch", (1, 3))
def test_each_variant_is_compared_and_timed(decoder: Decoder, batch: int) -> None:
    policies = decode.variants(["100%", "40"], NUM_ROWS, "group", "int8", 2, butler=True)
    for policy in policies.values():
        if hasattr(policy, "window_size"):
            policy.window_size = 16
    figures = decode.run(decoder, NUM_ROWS, policies, 1, batch)
    assert [figure.variant for figure in figures] == list(policies)
    assert all(figure.step_ms > 0 and figure.batch == batch for figure in figures)
    assert not any(figure.mass_kept for figure in figures[:5])
    for selected, least in zip(figures[5:], (0.1, 0.0, 0.1, 0.0), strict=True):
        assert selected.mass_kept is not None and selected.best_mass is not None
        assert least < selected.mass_kept <= selected.best_mass < 1


@pytest.mark.parametrize("factor", (1.1, float("nan")))
@pytest.mark.parametrize("batch", (1, 3))
def test_a_step_that_differs_is_not_timed(
    decoder: Decoder, batch: int, factor: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = StepGraph.step_branches

    def last_branch_wrong(self: StepGraph, *args: object) -> Tensor:
        logits = real(self, *args).clone()  # type: ignore[arg-type]
        logits[-1] *= factor
        return logits

    monkeypatch.setattr(StepGraph, "step_branches", last_branch_wrong)
    with pytest.raises(LongreadError, match="the logits differ from torch's by"):
        decode.run(decoder, NUM_ROWS, decode.variants([], NUM_ROWS, "group", "int8", 1), 1, batch)


@pytest.mark.parametrize("rows", ("the same", "one twice", "a kept one"))
@pytest.mark.parametrize("batch", (1, 3))
def test_a_step_that_chooses_badly_is_not_timed(
    decoder: Decoder, batch: int, rows: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def choose_badly(*args: Tensor, **options: object) -> None:
        chosen = args[4]
        chosen.copy_(torch.arange(chosen.shape[-1]) + 10)
        if rows != "the same":
            chosen[..., 3] = chosen[..., 2] if rows == "one twice" else 1

    monkeypatch.setattr(decode_graph.topk, "choose_rows", choose_badly)
    policies = {"40": TokenSelect(budget=40, window_size=16)}
    with pytest.raises(LongreadError, match="chosen .*: nothing is timed"):
        decode.run(decoder, NUM_ROWS, policies, 1, batch)


def test_what_cannot_be_timed_is_refused(decoder: Decoder) -> None:
    with pytest.raises(UsageError, match="has no kernels to time"):
        decode.run(decoder, NUM_ROWS, decode.variants(["20%"], NUM_ROWS, "all", "int8", 1), 1)
    with pytest.raises(UsageError, match="rows cannot be timed"):
        decode.run(decoder, 20, decode.variants([], 20, "group", "int8", 1), 1)
