"""`longread bench kernels` without its clock: what it compares before it times anything."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from triton_case import narrow_decoder

from longread.bench import kernels
from longread.errors import LongreadError
from longread.model import Decoder

NUM_ROWS = 300


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    return narrow_decoder(tmp_path_factory.mktemp("kernels"))


@pytest.fixture(autouse=True)
def no_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "graph_ms", lambda body, repeats: 1.0)
    monkeypatch.setattr(kernels, "_COPY_BYTES", 1 << 20)


def test_each_kernel_is_compared_and_timed(decoder: Decoder) -> None:
    figures = kernels.run(decoder, NUM_ROWS, 30, (1, 4), 1)
    assert len(figures) == 2 * 5 + 3
    assert all(figure.ms >= 0 and figure.floor_ms > 0 for figure in figures)
    config, floors = decoder.config, {figure.kernel: figure.floor_ms for figure in figures}
    head, down = floors["norm, head, batch 1"], floors["down, residual, batch 1"]
    size = config.num_hidden_layers * config.intermediate_size
    assert head / down == pytest.approx(config.vocab_size / size)


@pytest.mark.parametrize("name", ("linear.matvec", "reference_decode.attend_token_ref"))
def test_a_kernel_that_is_wrong_is_not_timed(
    decoder: Decoder, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = getattr(kernels, name.split(".")[0])
    real = getattr(module, name.split(".")[1])

    def wrong(*args: Tensor, **options: object) -> None:
        real(*args, **options)
        out = args[2] if name == "linear.matvec" else args[6]
        out *= 1.1

    with monkeypatch.context() as patched:
        patched.setattr(module, name.split(".")[1], wrong)
        with pytest.raises(LongreadError, match="differs from torch's by .* nothing is timed"):
            kernels.run(decoder, NUM_ROWS, 30, (1,), 1)


def test_rows_chosen_wrongly_are_not_timed(
    decoder: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def other_rows(*args: Tensor, **options: object) -> None:
        args[4].copy_(torch.arange(args[4].shape[1]) + 10)

    monkeypatch.setattr(kernels.reference_decode, "choose_rows_ref", other_rows)
    with pytest.raises(LongreadError, match="chosen rows differ: nothing is timed"):
        kernels.run(decoder, NUM_ROWS, 30, (1,), 1)
