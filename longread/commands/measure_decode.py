"""`longread bench decode`: what a decode step costs on a GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from longread.commands import options
from longread.commands.measure import Repeats, model_or_shape, numbers

if TYPE_CHECKING:
    from longread.commands.run import Run
    from longread.model import Decoder


def bench_decode(
    ctx: typer.Context,
    contexts: Annotated[
        str, typer.Option("--contexts", metavar="N,N,...", help="Rows in the cache.")
    ] = "8192,32768,131072",
    budgets: Annotated[
        str, typer.Option("--budgets", metavar="B,B,...", help="Budgets beside dense.")
    ] = "2048,20%",
    reselect: Annotated[
        int, typer.Option("--reselect", metavar="N", min=1, help="Also choose every N tokens.")
    ] = 4,
    butler: Annotated[
        bool, typer.Option("--butler", help="Let a predictor choose as well.")
    ] = False,
    batch: Annotated[
        int, typer.Option("--batch", metavar="N", min=1, help="Questions answered in one step.")
    ] = 1,
    peers: Annotated[
        bool, typer.Option("--peers", help="Time Hugging Face and the libraries' attention too.")
    ] = False,
    repeats: Repeats = 20,
    model: options.Model = None,
    vote: options.Vote = None,
    index: options.Index = None,
    device: options.Device = None,
    dtype: options.Dtype = None,
    quiet: options.Quiet = False,
    verbose: options.Verbose = False,
) -> None:
    """Time a decode step on a GPU: dense and selected, random rows, a model or a shape by name."""
    import dataclasses
    import json

    from longread.bench import decode
    from longread.bench import peers as contenders
    from longread.commands.run import Run, table_lines
    from longread.errors import UsageError
    from longread.plain_text import size_text

    run = Run.start(ctx)
    settings = run.settings
    lengths = numbers("--contexts", contexts)
    if peers and batch > 1:
        raise UsageError("--peers answer one question at a time: leave --batch out")
    decoder = decoder_on_gpu(run)
    figures = []
    with decoder.on_device():
        for num_rows in lengths:
            policies = decode.variants(
                budgets.split(","), num_rows, settings.vote, settings.index, reselect, butler
            )
            figures += decode.run(decoder, num_rows, policies, repeats, batch)
            if peers:
                figures += contenders.run(decoder, num_rows, repeats)

    def shown(value: float | None, form: str) -> str:
        return format(value, form) if value else ""

    rows = [
        (
            f"{figure.num_rows:,}",
            figure.variant,
            shown(figure.step_ms, ".3f"),
            shown(figure.attention_ms, ".3f"),
            shown(figure.mass_kept, ".3f"),
            shown(figure.best_mass, ".3f"),
            size_text(figure.gpu_bytes) if figure.gpu_bytes else "",
        )
        for figure in figures
    ]
    head = ("rows", "variant", "step_ms", "attention_ms", "mass", "best_mass", "gpu_memory")
    for line in table_lines(head, rows, "rows step_ms attention_ms mass best_mass gpu_memory"):
        run.screen.print(line)
    record = {
        "model": settings.model,
        "vote": settings.vote,
        "index": settings.index,
        "batch": batch,
        "figures": [dataclasses.asdict(figure) for figure in figures],
    }
    run.screen.print(json.dumps(record))


def decoder_on_gpu(run: Run) -> Decoder:
    """The model or shape of the settings, on a GPU that can run the kernels. Raises ModelError."""
    from longread_kernels.dispatch import triton_missing

    from longread.bench.shapes import load_model
    from longread.device import choose_device, choose_dtype
    from longread.errors import ModelError
    from longread.model import Decoder

    settings = run.settings
    device, dtype = choose_device(settings.device), choose_dtype(settings.dtype)
    if device.type != "cuda" or dtype.itemsize != 2:
        raise ModelError("this times the kernels, which need a GPU and bfloat16")
    if reason := triton_missing(device.index or 0):
        raise ModelError(f"the kernels cannot run: {reason}")
    config, tensors = load_model(model_or_shape(run), device, dtype)
    return Decoder(config, tensors, device, dtype)
