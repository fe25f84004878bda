"""`longread bench weights`: an answer's token on a CPU under each form of the weights."""

from __future__ import annotations

from typing import Annotated

import typer

from longread.commands import options
from longread.commands.measure import Repeats, model_or_shape, numbers


def bench_weights(
    ctx: typer.Context,
    forms: Annotated[
        str, typer.Option("--weights", metavar="FORMS", help="Side by side.")
    ] = "bf16,int8,int4",
    num_rows: Annotated[
        int, typer.Option("--rows", metavar="N", min=64, help="Rows in the cache.")
    ] = 10240,
    counts: Annotated[
        str, typer.Option("--tokens", metavar="N,N,...", help="At a time, for the products alone.")
    ] = "1,4,16,64",
    repeats: Repeats = 20,
    model: options.Model = None,
    policy: options.Policy = None,
    budget: options.Budget = None,
    vote: options.Vote = None,
    index: options.Index = None,
    quiet: options.Quiet = False,
    verbose: options.Verbose = False,
) -> None:
    """Time a decode step on a CPU under each form of the weights, over random rows."""
    import dataclasses
    import json
    from pathlib import Path

    from longread.bench import weights
    from longread.commands.run import Run, table_lines
    from longread.errors import UsageError
    from longread.model import Decoder
    from longread.packed import choose_weights
    from longread.plain_text import size_text
    from longread.policies import make_policy

    run = Run.start(ctx)
    screen = run.screen
    names, token_counts = forms.split(","), numbers("--tokens", counts)
    if not set(names) <= {"bf16", "int8", "int4"}:
        raise UsageError(f"--weights is {forms!r}: give some of bf16, int8 and int4, with commas")
    settings = dataclasses.replace(run.settings, device="cpu", dtype="bfloat16")
    model_dir = Path(model_or_shape(run))
    if not model_dir.is_dir():
        raise UsageError("forms are made from a model's files: name one with --model")
    rate = weights.read_rate()
    figures = []
    try:
        for name in names:
            chosen = dataclasses.replace(settings, weights=name)
            choose_weights(chosen, model_dir, screen.progress, screen.notice)
            decoder = Decoder.load(model_dir, "cpu", "bfloat16", weights=name)
            made = make_policy(settings, num_rows)
            job = (name, made, num_rows, token_counts, repeats, rate)
            figures.append(weights.measure(decoder, *job))
    finally:
        screen.stop_progress()
    rows = [
        (
            figure.form,
            size_text(figure.step_bytes),
            f"{figure.floor_ms:.1f}",
            f"{figure.step_ms:.1f}",
            f"{1e3 / figure.step_ms:.1f}",
            *(f"{figure.products_ms[count]:.1f}" for count in token_counts),
            f"{figure.difference:.2%}",
        )
        for figure in figures
    ]
    products = [f"products_{count}_ms" for count in token_counts]
    head = ("weights", "bytes", "floor_ms", "step_ms", "tokens/s", *products, "products_differ")
    for line in table_lines(head, rows, " ".join(head[1:])):
        screen.print(line)
    record = {
        "model": run.settings.model,
        "policy": settings.policy,
        "rows": num_rows,
        "read_gb_per_s": rate / 1e9,
        "figures": [dataclasses.asdict(figure) for figure in figures],
    }
    screen.print(json.dumps(record))
