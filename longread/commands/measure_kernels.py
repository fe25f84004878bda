"""`longread bench kernels`: each kernel of the decode step beside the library's way."""

from __future__ import annotations

from typing import Annotated

import typer

from longread.commands import options
from longread.commands.measure import Repeats


def bench_kernels(
    ctx: typer.Context,
    num_rows: Annotated[
        int, typer.Option("--rows", metavar="N", min=1, help="Rows in the cache.")
    ] = 131072,
    num_chosen: Annotated[
        int, typer.Option("--chosen", metavar="N", min=1, help="Rows to choose.")
    ] = 2048,
    repeats: Repeats = 20,
    model: options.Model = None,
    device: options.Device = None,
    dtype: options.Dtype = None,
    quiet: options.Quiet = False,
    verbose: options.Verbose = False,
) -> None:
    """Time the decode step's kernels on a GPU, all layers, beside torch's libraries."""
    import dataclasses
    import json

    from longread.bench import kernels
    from longread.commands.measure_decode import decoder_on_gpu
    from longread.commands.run import Run, table_lines

    run = Run.start(ctx)
    decoder = decoder_on_gpu(run)
    with decoder.on_device():
        figures = kernels.run(decoder, num_rows, num_chosen, repeats)
    rows = [
        (
            figure.kernel,
            f"{figure.ms:.3f}",
            "" if figure.library_ms is None else f"{figure.library_ms:.3f}",
            f"{figure.floor_ms:.3f}",
        )
        for figure in figures
    ]
    head = ("kernel, all layers", "ms", "library_ms", "floor_ms")
    for line in table_lines(head, rows, "ms library_ms floor_ms"):
        run.screen.print(line)
    record = {
        "model": run.settings.model,
        "figures": [dataclasses.asdict(figure) for figure in figures],
    }
    run.screen.print(json.dumps(record))
