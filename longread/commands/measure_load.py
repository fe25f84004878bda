"""`longread bench load`: how fast rows and weights reach the device."""

from __future__ import annotations

from typing import Annotated

import typer

from longread.commands import options
from longread.commands.measure import Repeats


def bench_load(
    ctx: typer.Context,
    model: Annotated[
        str, typer.Option("--model", metavar="SHAPE", help="The rows' and weights' shape.")
    ] = "llama3-8b",
    gib: Annotated[
        float, typer.Option("--gib", metavar="N", min=1e-4, help="Size of the cache entry, GiB.")
    ] = 2.0,
    readers: Annotated[
        list[int] | None,
        typer.Option("--readers", metavar="N", min=1, help="On a GPU, time N threads as well."),
    ] = None,
    kv_only: Annotated[bool, typer.Option("--kv-only", help="Leave the weights out.")] = False,
    repeats: Repeats = 3,
    device: options.Device = None,
    dtype: options.Dtype = None,
    quiet: options.Quiet = False,
    verbose: options.Verbose = False,
) -> None:
    """Time the restore of a cache entry and the loading of weights beside the plain copy rate."""
    import dataclasses
    import json
    from statistics import median

    from longread.bench import load
    from longread.commands.run import Run, table_lines
    from longread.pinned import NUM_THREADS
    from longread.plain_text import size_text

    run = Run.start(ctx)
    settings = run.settings
    runs = load.run(
        model,
        settings.device,
        settings.dtype,
        int(gib * 2**30),
        repeats,
        readers=readers or (),
        with_weights=not kv_only,
    )
    rates: dict[str, list[float]] = {}
    for timed in runs:
        rates.setdefault(timed.what, []).append(timed.gb_per_s)
    medians = {what: median(mine) for what, mine in rates.items()}
    ratios = {what: medians[what] / medians[load.COPY] for what in medians}
    sizes = {timed.what: size_text(timed.num_bytes) for timed in runs}
    rows = [
        (what, sizes[what], f"{mine[0]:.1f}", f"{medians[what]:.1f}", f"{ratios[what]:.2f}")
        for what, mine in rates.items()
    ]
    head = ("transfer", "size", "first_gb/s", "median_gb/s", "of_copy")
    for line in table_lines(head, rows, "size first_gb/s median_gb/s of_copy"):
        run.screen.print(line)
    record = {
        "model": model,
        "readers": NUM_THREADS,
        "gb_per_s": medians,
        "ratio": ratios[load.RESTORE],
        "weights_ratio": ratios.get(load.WEIGHTS),
        "runs": [dataclasses.asdict(timed) for timed in runs],
    }
    run.screen.print(json.dumps(record))
