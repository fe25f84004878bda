"""`longread eval`: answer quality beside dense, what is stored of it, and what a policy keeps."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

import typer

from longread.commands import options

_DEFAULT_OUT = "eval-results"


def evaluate(
    ctx: typer.Context,
    what: Annotated[
        str | None,
        typer.Argument(
            metavar="TASKS",
            help="Names with commas, sources or perplexity; with --selection-only, a document.",
        ),
    ] = None,
    policies: Annotated[
        str | None,
        typer.Option(
            "--policies",
            metavar="NAMES",
            help="Such as dense,tokenselect,tokenselect:vote=none:window_size=0.",
        ),
    ] = None,
    budgets: Annotated[
        str | None, typer.Option("--budgets", metavar="BUDGETS", help="Such as 5%,10%,20%.")
    ] = None,
    lengths: Annotated[
        str,
        typer.Option("--lengths", metavar="TOKENS", help="Of prompt and answer, with commas."),
    ] = "4096",
    samples: Annotated[
        int, typer.Option("--samples", metavar="N", min=1, help="Of each task and length.")
    ] = 20,
    data: Annotated[
        Path | None,
        typer.Option("--data", metavar="FOLDER", help="Books and questions, or a text."),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            metavar="FOLDER",
            help=f"Where results are; those there are kept. [{_DEFAULT_OUT}]",
        ),
    ] = None,
    limit_seconds: Annotated[
        float | None,
        typer.Option("--limit-seconds", metavar="N", min=0.0, help="Begin no sample after these."),
    ] = None,
    reading: Annotated[
        str | None,
        typer.Option(
            "--reading",
            metavar="FIELDS",
            help="With --context select: budget=4096:vote=group.",
        ),
    ] = None,
    report: Annotated[
        list[Path] | None,
        typer.Option(
            "--report", metavar="FOLDER", help="Show stored results in Markdown; repeatable."
        ),
    ] = None,
    plots: Annotated[
        Path | None,
        typer.Option("--plots", metavar="FOLDER", help="With --report: write PNGs there."),
    ] = None,
    selection_only: Annotated[
        bool,
        typer.Option(
            "--selection-only", help="Measure the attention mass on the kept rows; no answers."
        ),
    ] = False,
    forms: Annotated[
        str,
        typer.Option("--weights", metavar="FORMS", help="Of perplexity, beside the first."),
    ] = "bf16,int8,int4",
    pages: options.Pages = None,
    password: options.Password = None,
    model: options.Model = None,
    context: options.Context = None,
    policy: options.Policy = None,
    budget: options.Budget = None,
    vote: options.Vote = None,
    min_votes: options.MinVotes = None,
    index: options.Index = None,
    index_dim: options.IndexDim = None,
    sink_size: options.SinkSize = None,
    window_size: options.WindowSize = None,
    butler: options.Butler = None,
    neighbours: options.Neighbours = None,
    seed: options.Seed = None,
    device: options.Device = None,
    dtype: options.Dtype = None,
    quiet: options.Quiet = False,
    verbose: options.Verbose = False,
) -> None:
    """Measure the answers of policies beside dense; the last line is JSON."""
    from longread.commands import evaluate_run, measure_perplexity, measure_sources
    from longread.commands.run import Run
    from longread.errors import UsageError

    run = Run.start(ctx)
    if plots is not None and not report:
        raise UsageError("--plots draws what --report shows: name a folder with --report")
    if not selection_only and (pages is not None or password is not None):
        raise UsageError("--pages and --password are for a document with --selection-only")
    if report:
        if what is not None:
            raise UsageError("--report shows what is stored: leave TASKS out")
        evaluate_run.report(run, report, plots)
        return
    measures_sources = measure_sources.NAME in [word.strip() for word in (what or "").split(",")]
    if reading is not None and (selection_only or measures_sources):
        raise UsageError("--reading says how documents are read for answers: leave it out here")
    if what is None:
        raise UsageError(
            "no task is named: `longread eval ruler --data FOLDER`, or see `longread eval --help`"
        )
    if selection_only:
        evaluate_run.selection_only(run, what, pages, password)
        return
    if what.strip() == measure_perplexity.NAME:
        measure_perplexity.measure(run, forms, data, _lengths(lengths)[0], samples)
        return
    if measures_sources:
        if what.strip() != measure_sources.NAME or policies or budgets:
            raise UsageError(
                "sources are measured by themselves, of one --policy at one --budget: leave other "
                "tasks, --policies and --budgets out"
            )
        measure_sources.measure(
            run,
            _lengths(lengths),
            samples,
            data,
            out or Path(_DEFAULT_OUT),
            limit_seconds,
        )
        return
    evaluate_run.answers(
        run,
        what,
        policies or f"dense,{run.settings.policy}",
        budgets or run.settings.budget,
        _lengths(lengths),
        samples,
        data,
        out or Path(_DEFAULT_OUT),
        limit_seconds,
        reading,
    )


def _lengths(text: str) -> tuple[int, ...]:
    from longread.errors import UsageError

    words = [word.strip() for word in text.split(",") if word.strip()]
    if not words or not all(re.fullmatch(r"[1-9][0-9]{1,8}", word) for word in words):
        raise UsageError(f"--lengths is {text!r}: give numbers of tokens, such as 4096,16384")
    return tuple(dict.fromkeys(map(int, words)))
