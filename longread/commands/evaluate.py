"""`longread eval`: answer quality beside dense, what is stored of it, and what a policy keeps."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from longread.commands import options

if TYPE_CHECKING:
    from longread.commands.run import Run
    from longread.evaluate.grid import Request
    from longread.evaluate.pictures import DepthPicture
    from longread.evaluate.tables import Table

_DEFAULT_OUT = "eval-results"
_OPTIONS = (  # what changes the cells beside what the command has for itself
    *("seed", "dtype", "vote", "min_votes", "index", "index_dim"),
    *("sink_size", "window_size", "reselect"),
)


def evaluate(
    ctx: typer.Context,
    what: Annotated[
        str | None,
        typer.Argument(
            metavar="TASKS", help="Names with commas; with --selection-only, a document."
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
        typer.Option("--data", metavar="FOLDER", help="Books and questions that tasks need."),
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
    pages: options.Pages = None,
    password: options.Password = None,
    model: options.Model = None,
    policy: options.Policy = None,
    budget: options.Budget = None,
    vote: options.Vote = None,
    min_votes: options.MinVotes = None,
    index: options.Index = None,
    index_dim: options.IndexDim = None,
    sink_size: options.SinkSize = None,
    window_size: options.WindowSize = None,
    seed: options.Seed = None,
    device: options.Device = None,
    dtype: options.Dtype = None,
    quiet: options.Quiet = False,
    verbose: options.Verbose = False,
) -> None:
    """Measure the answers of policies beside dense; the last line is JSON."""
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
        _report(run, report, plots)
        return
    if what is None:
        raise UsageError(
            "no task is named: `longread eval ruler --data FOLDER`, or see `longread eval --help`"
        )
    if selection_only:
        _selection_only(run, what, pages, password)
        return
    _answers(
        run,
        what,
        policies or f"dense,{run.settings.policy}",
        budgets or run.settings.budget,
        _lengths(lengths),
        samples,
        data,
        out or Path(_DEFAULT_OUT),
        limit_seconds,
    )


def _answers(
    run: Run,
    names: str,
    policies: str,
    budgets: str,
    lengths: tuple[int, ...],
    num_samples: int,
    data: Path | None,
    out: Path,
    limit_s: float | None,
) -> None:
    import dataclasses
    import json

    from longread.evaluate import tables
    from longread.evaluate.cells import CellFolder
    from longread.evaluate.grid import Grid, Request
    from longread.evaluate.pictures import depth_pictures
    from longread.evaluate.task import Materials
    from longread.evaluate.tasks import make_tasks, task_names
    from longread.evaluate.variants import parse_variants
    from longread.model import Decoder
    from longread.prompt import ChatFormat
    from longread.tokenizer import Tokenizer
    from longread.weights import load_config, prepare

    settings, screen = run.settings, run.screen
    variants = tuple(parse_variants(policies, budgets, settings))
    chosen = task_names(name.strip() for name in names.split(",") if name.strip())
    try:
        model_dir = prepare(settings.model, settings.models_dir, screen.progress, screen.notice)
        tokenizer, chat = Tokenizer.load(model_dir), ChatFormat.load(model_dir)
        _check_lengths(lengths, load_config(model_dir).window)
        materials = Materials(lambda text: len(tokenizer.encode(text)), data, tokenizer.encode)
        tasks = make_tasks(chosen, materials)
        request = Request(tuple(tasks), lengths, variants, num_samples, settings.seed, limit_s)
        command = _command(run, names, policies, budgets, request, data)
        request = dataclasses.replace(request, command=command)
        decoder = Decoder.load(model_dir, settings.device, settings.dtype)
        cells = CellFolder(out)
        grid = Grid(decoder, tokenizer, chat, cells, screen.progress, screen.notice)
        outcome = grid.run(request)
    finally:
        screen.stop_progress()
    groups = tables.groups(outcome.cells)
    for group in groups:
        for table in tables.tables(group):
            _print(run, table)
    _show(run, depth_pictures(groups))
    record = {
        "command": request.command,
        "groups": [tables.summary(group) for group in groups],
        "samples_done": outcome.num_done,
        "samples_missing": outcome.num_missing,
        "seconds": outcome.times,
    }
    screen.print(json.dumps(record))


def _report(run: Run, folders: list[Path], plots: Path | None) -> None:
    from longread.evaluate import tables
    from longread.evaluate.cells import read_cells
    from longread.evaluate.pictures import depth_pictures
    from longread.evaluate.plots import write_plots

    groups = tables.groups(read_cells(folders))
    for group in groups:
        for table in tables.tables(group):
            run.screen.print(table.transposed().markdown())
        for line in tables.origins(group):
            run.screen.print(f"- {line}")
        run.screen.print()
    _show(run, depth_pictures(groups), fence="```")
    if plots is not None:
        for path in write_plots(groups, plots):
            run.screen.note(f"longread: wrote {path}")


def _show(run: Run, pictures: Sequence[DepthPicture], fence: str = "") -> None:
    """Pictures in colours on a terminal, and in plain characters anywhere else."""
    from longread.evaluate.pictures import coloured_lines, plain_lines

    for picture in pictures:
        if run.screen.out.isatty():
            from rich.console import Console

            console = Console(file=run.screen.out, highlight=False)
            for line in coloured_lines(picture):
                console.print(line, soft_wrap=True)
        else:
            for text in [fence, *plain_lines(picture), fence]:
                if text:
                    run.screen.print(text)
        run.screen.print()


def _selection_only(run: Run, document: str, pages: str | None, password: str | None) -> None:
    import json

    from longread.commands.run import password_asker, table_lines
    from longread.evaluate import selection

    try:
        figures = selection.run(
            run.settings,
            document,
            pages=pages,
            password=password_asker(password, run.screen),
            progress=run.screen.progress,
            notice=run.screen.notice,
        )
    finally:
        run.screen.stop_progress()
    rows = [(name, str(value)) for name, value in figures.items()]
    for line in table_lines(("measure", "value"), rows):
        run.screen.print(line)
    run.screen.print(json.dumps(figures))


def _print(run: Run, table: Table) -> None:
    from longread.commands.run import table_lines

    run.screen.print(table.title)
    for line in table_lines(table.head, table.rows):
        run.screen.print(line)
    run.screen.print()


def _lengths(text: str) -> tuple[int, ...]:
    from longread.errors import UsageError

    words = [word.strip() for word in text.split(",") if word.strip()]
    if not words or not all(re.fullmatch(r"[1-9][0-9]{1,8}", word) for word in words):
        raise UsageError(f"--lengths is {text!r}: give numbers of tokens, such as 4096,16384")
    return tuple(dict.fromkeys(map(int, words)))


def _check_lengths(lengths: tuple[int, ...], window: int) -> None:
    from longread.errors import UsageError

    if max(lengths) > window:
        raise UsageError(
            f"--lengths {max(lengths)} is over the window of the model, which is {window:,}"
        )


def _command(
    run: Run, names: str, policies: str, budgets: str, request: Request, data: Path | None
) -> str:
    """What gives the same cells, without this machine's folders."""
    import shlex

    from longread.config import option_value

    model = run.settings.model
    words = ["longread", "eval", names, "--policies", policies, "--budgets", budgets]
    words += ["--lengths", ",".join(map(str, request.lengths))]
    words += ["--samples", str(request.num_samples)]
    words += ["--model", Path(model).name if Path(model).exists() else model]
    for name in _OPTIONS:
        if run.origins[name] != "default":
            words += [f"--{name.replace('_', '-')}", str(option_value(run.settings, name))]
    words += ["--data", "FOLDER"] if data is not None else []
    return shlex.join(words)
