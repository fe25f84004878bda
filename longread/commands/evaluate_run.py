"""What `longread eval` does when its options are read: a run, a report, or one measurement."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from longread.commands.run import Run
    from longread.evaluate.grid import Request
    from longread.evaluate.pictures import DepthPicture
    from longread.evaluate.tables import Table

_OPTIONS = (  # what changes the cells beside what the command has for itself
    *("seed", "dtype", "context", "vote", "min_votes", "index", "index_dim"),
    *("sink_size", "window_size", "reselect", "butler", "neighbours"),
)


def answers(
    run: Run,
    names: str,
    policies: str,
    budgets: str,
    lengths: tuple[int, ...],
    num_samples: int,
    data: Path | None,
    out: Path,
    limit_s: float | None,
    reading: str | None,
) -> None:
    import dataclasses
    import json

    from longread.context import Way
    from longread.evaluate import tables
    from longread.evaluate.cells import CellFolder
    from longread.evaluate.contexts import name_of, run_contexts, ways_to_read
    from longread.evaluate.grid import Grid, Request
    from longread.evaluate.groups import groups
    from longread.evaluate.pictures import depth_pictures
    from longread.evaluate.task import Materials
    from longread.evaluate.tasks import make_tasks, task_names
    from longread.evaluate.variants import parse_reading, parse_variants
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
        config = load_config(model_dir)
        how = None if reading is None else parse_reading(reading)
        ways = ways_to_read(settings.context, lengths, config, how)
        materials = Materials(lambda text: len(tokenizer.encode(text)), data, tokenizer.encode)
        tasks = make_tasks(chosen, materials)
        request = Request(tuple(tasks), lengths, variants, num_samples, settings.seed, limit_s)
        command = _command(run, names, policies, budgets, request, data, reading)
        request = dataclasses.replace(request, command=command)
        cells = CellFolder(out)

        def make_grid(way: Way) -> Grid:
            decoder = Decoder.load(
                *(model_dir, settings.device, settings.dtype),
                past_window=way.reading,
                stretch=way.stretch,
            )
            return Grid(
                *(decoder, tokenizer, chat, cells, screen.progress, screen.notice),
                context=name_of(way),
            )

        outcome = run_contexts(request, ways, config.window, make_grid, screen.notice)
    finally:
        screen.stop_progress()
    found = groups(outcome.cells)
    for group in found:
        for table in tables.tables(group):
            _print(run, table)
    _show(run, depth_pictures(found))
    record = {
        "command": request.command,
        "groups": [tables.summary(group) for group in found],
        "samples_done": outcome.num_done,
        "samples_missing": outcome.num_missing,
        "seconds": outcome.times,
    }
    screen.print(json.dumps(record))


def report(run: Run, folders: list[Path], plots: Path | None) -> None:
    from longread.evaluate import tables
    from longread.evaluate.cells import read_cells
    from longread.evaluate.groups import groups
    from longread.evaluate.pictures import depth_pictures
    from longread.evaluate.plots import write_plots

    found = groups(read_cells(folders))
    for group in found:
        for table in tables.tables(group):
            run.screen.print(table.transposed().markdown())
        for line in tables.origins(group):
            run.screen.print(f"- {line}")
        run.screen.print()
    _show(run, depth_pictures(found), fence="```")
    if plots is not None:
        for path in write_plots(found, plots):
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


def selection_only(run: Run, document: str, pages: str | None, password: str | None) -> None:
    import json

    from longread.commands.run import password_asker, table_lines
    from longread.evaluate import selection

    try:
        measured, figures = selection.run(
            run.settings,
            document,
            pages=pages,
            password=password_asker(password, run.screen),
            progress=run.screen.progress,
            notice=run.screen.notice,
        )
    finally:
        run.screen.stop_progress()
    record = measured | figures.record()
    rows = [(name, str(value)) for name, value in record.items() if name != "layers"]
    for line in table_lines(("measure", "value"), rows):
        run.screen.print(line)
    run.screen.print()
    for line in table_lines(*figures.table()):
        run.screen.print(line)
    run.screen.print(json.dumps(record))


def _print(run: Run, table: Table) -> None:
    from longread.commands.run import table_lines

    run.screen.print(table.title)
    for line in table_lines(table.head, table.rows):
        run.screen.print(line)
    run.screen.print()


def _command(
    run: Run,
    names: str,
    policies: str,
    budgets: str,
    request: Request,
    data: Path | None,
    reading: str | None,
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
    words += ["--reading", reading] if reading is not None else []
    words += ["--data", "FOLDER"] if data is not None else []
    return shlex.join(words)
