"""`longread bench kernels` without its clock: what it compares before it times anything."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import pytest
from torch import Tensor
from triton_case import narrow_decoder

from longread.bench import kernels
from longread.errors import LongreadError, UsageError
from longread.model import Decoder

NUM_ROWS = 400


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    return narrow_decoder(tmp_path_factory.mktemp("kernels"))


@pytest.fixture(autouse=True)
def no_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each body is run once, and torch's attention takes the backend that there is."""

    def run_once(body: Callable[[], None], repeats: int) -> float:
        body()
        return 1.0

    monkeypatch.setattr(kernels, "graph_ms", run_once)
    monkeypatch.setattr(kernels, "sdpa_kernel", lambda backend: nullcontext())
    monkeypatch.setattr(kernels, "_COPY_BYTES", 1 << 20)


def test_each_kernel_is_compared_and_timed(decoder: Decoder) -> None:
    figures = kernels.run(decoder, NUM_ROWS, 30, 1)
    assert len(figures) == 5 + 3
    assert all(figure.floor_ms > 0 for figure in figures)
    config, floors = decoder.config, {figure.kernel: figure.floor_ms for figure in figures}
    head, down = floors["norm, head"], floors["down, residual"]
    size = config.num_hidden_layers * config.intermediate_size
    assert head / down == pytest.approx(config.vocab_size / size)


@pytest.mark.parametrize("factor", (1.1, float("nan")))
@pytest.mark.parametrize("name", ("linear.matvec", "reference_decode.attend_token_ref"))
def test_a_kernel_that_is_wrong_is_not_timed(
    decoder: Decoder, name: str, factor: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = getattr(kernels, name.split(".")[0])
    real = getattr(module, name.split(".")[1])

    def wrong(*args: Tensor, **options: object) -> None:
        real(*args, **options)
        out = args[2] if name == "linear.matvec" else args[6]
        out *= factor

    with monkeypatch.context() as patched:
        patched.setattr(module, name.split(".")[1], wrong)
        with pytest.raises(LongreadError, match="differs from torch's by .* nothing is timed"):
            kernels.run(decoder, NUM_ROWS, 30, 1)


@pytest.mark.parametrize("num_chosen", (NUM_ROWS, NUM_ROWS + 1, 200))
def test_what_leaves_no_choice_is_refused(decoder: Decoder, num_chosen: int) -> None:
    with pytest.raises(UsageError, match="another --chosen"):
        kernels.run(decoder, NUM_ROWS, num_chosen, 1)
