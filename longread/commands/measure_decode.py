"""`longread bench decode`: what a decode step costs on a GPU."""

from __future__ import annotations

from typing import Annotated

import typer

from longread.commands import options
from longread.commands.measure import Repeats, model_or_shape


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
    import re

    from longread_kernels.dispatch import triton_missing

    from longread.bench.shapes import load_model
    from longread.commands.run import Run, table_lines
    from longread.device import choose_device, choose_dtype
    from longread.errors import ModelError, UsageError
    from longread.model import Decoder
    from longread.plain_text import size_text

    run = Run.start(ctx)
    settings = run.settings
    torch_device, torch_dtype = choose_device(settings.device), choose_dtype(settings.dtype)
    if torch_device.type != "cuda" or torch_dtype.itemsize != 2:
        raise ModelError("bench decode times the kernels, which need a GPU and bfloat16")
    if reason := triton_missing(torch_device.index or 0):
        raise ModelError(f"the kernels cannot run: {reason}")
    if not re.fullmatch(r"[0-9]{1,9}(,[0-9]{1,9})*", contexts):
        raise UsageError(f"--contexts takes numbers of rows, such as 8192,131072, not {contexts!r}")
    lengths = [int(length) for length in contexts.split(",")]
    from longread.bench import decode
    from longread.bench import peers as contenders

    config, tensors = load_model(model_or_shape(run), torch_device, torch_dtype)
    decoder = Decoder(config, tensors, torch_device, torch_dtype)
    figures = []
    with decoder.on_device():
        for num_rows in lengths:
            policies = decode.variants(
                budgets.split(","), num_rows, settings.vote, settings.index, reselect
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
