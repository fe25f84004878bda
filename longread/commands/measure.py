"""`longread bench`: figures as a table, then one line of JSON."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from longread.commands import options

if TYPE_CHECKING:
    from longread.commands.run import Run

bench = typer.Typer(help="Speed, measured on this machine.", rich_markup_mode=None)

Repeats = Annotated[int, typer.Option("--repeats", metavar="N", min=1, help="Runs of each kind.")]


@bench.command("ask")
def bench_ask(
    ctx: typer.Context,
    document: Annotated[str, typer.Argument(metavar="DOCUMENT", help="A file.")],
    question: Annotated[str, typer.Argument(metavar="QUESTION", help="To be asked each time.")],
    repeats: Repeats = 3,
    model: options.Model = None,
    policy: options.Policy = None,
    budget: options.Budget = None,
    vote: options.Vote = None,
    index: options.Index = None,
    max_tokens: options.MaxTokens = None,
    device: options.Device = None,
    dtype: options.Dtype = None,
    weights: options.Weights = None,
    kv_dtype: options.KvDtype = None,
    verbose: options.Verbose = False,
) -> None:
    """Time `ask` from the start of its process: with an empty cache, then from the cache."""
    import dataclasses
    import json

    from longread.bench import ask
    from longread.commands.run import Run, table_lines
    from longread.config import OPTION_NAMES

    run = Run.start(ctx)
    flags = [
        word
        for name in OPTION_NAMES
        if (value := ctx.params.get(name)) is not None
        for word in (f"--{name.replace('_', '-')}", str(value))
    ]
    first, later = ask.run(document, question, flags, repeats)
    rows = [("first", f"{first.first_token_s:.2f}", f"{first.total_s:.2f}")]
    rows += [("from cache", f"{t.first_token_s:.2f}", f"{t.total_s:.2f}") for t in later]
    head = ("run", "first token, s", "total, s")
    for line in table_lines(head, rows):
        run.screen.print(line)
    best_s = min(times.first_token_s for times in later)
    record = {
        "first": dataclasses.asdict(first),
        "from_cache": [dataclasses.asdict(times) for times in later],
        "speedup": first.first_token_s / best_s,
    }
    run.screen.print(json.dumps(record))


@bench.command("prefill")
def bench_prefill(
    ctx: typer.Context,
    num_tokens: Annotated[
        int, typer.Option("--tokens", metavar="N", min=2, help="Length of the prompt.")
    ] = 4096,
    contexts: Annotated[
        str,
        typer.Option("--context", metavar="MODES", help="Such as select,dense: side by side."),
    ] = "",
    repeats: Repeats = 3,
    model: options.Model = None,
    device: options.Device = None,
    dtype: options.Dtype = None,
    quiet: options.Quiet = False,
    verbose: options.Verbose = False,
) -> None:
    """Time the prefill beside Hugging Face's, for the same model, dtype and machine."""
    import dataclasses
    import json
    from statistics import median

    from longread.bench import prefill
    from longread.commands.run import Run, table_lines
    from longread.errors import UsageError
    from longread.plain_text import size_text

    run = Run.start(ctx)
    settings = run.settings
    contenders = tuple(contexts.split(",")) if contexts else prefill.CONTENDERS
    if contexts and not set(contenders) <= set(prefill.CONTEXTS):
        raise UsageError(f"--context takes {' and '.join(prefill.CONTEXTS)}, not {contexts!r}")
    job = (model_or_shape(run), settings.device, settings.dtype, num_tokens, repeats)
    if contexts:
        runs, difference = prefill.run_contexts(*job, contenders), None
    else:
        runs, difference = prefill.run(*job)
    rows, rates = [], {}
    for contender in contenders:
        mine = [timed for timed in runs if timed.contender == contender]
        seconds = median(timed.prefill_s for timed in mine)
        rates[contender] = num_tokens / seconds
        peak = size_text(max(timed.peak_bytes for timed in mine))
        rows.append((contender, f"{seconds:.2f}", f"{rates[contender]:,.0f}", peak))
    for line in table_lines(("contender", "s", "tokens/s", "peak"), rows, "s tokens/s peak"):
        run.screen.print(line)
    record = {
        "model": settings.model,
        "num_tokens": num_tokens,
        "tokens_per_s": rates,
        "ratio": rates[contenders[0]] / rates[contenders[-1]],
        "logits_relative_rms": difference,
        "runs": [dataclasses.asdict(timed) for timed in runs],
    }
    run.screen.print(json.dumps(record))


@bench.command("pages")
def bench_pages(
    ctx: typer.Context,
    documents: Annotated[list[str], typer.Argument(metavar="DOCUMENT", help="Files.")],
    repeats: Repeats = 3,
    password: options.Password = None,
    quiet: options.Quiet = False,
    verbose: options.Verbose = False,
) -> None:
    """Time the reading of documents: pages a second, processes, and their peak memory together."""
    import dataclasses
    import json

    from longread.bench import pages
    from longread.commands.run import Run, password_asker, table_lines
    from longread.plain_text import size_text

    run = Run.start(ctx)
    asker = password_asker(password, run.screen)
    timed = [pages.run(source, repeats, password=asker) for source in documents]
    rows = [
        (
            times.name,
            f"{times.num_pages:,}",
            f"{times.pages_per_s:,.0f}",
            "-" if times.num_processes is None else str(times.num_processes),
            "-" if times.peak_bytes is None else size_text(times.peak_bytes),
        )
        for times in timed
    ]
    head = ("document", "pages", "pages/s", "processes", "peak")
    for line in table_lines(head, rows, "pages pages/s processes peak"):
        run.screen.print(line)
    records = [dataclasses.asdict(times) | {"pages_per_s": times.pages_per_s} for times in timed]
    run.screen.print(json.dumps({"documents": records}))


def model_or_shape(run: Run) -> str:
    """A shape's name as it stands, or the converted directory of the model."""
    from longread import weights
    from longread.bench.shapes import SHAPES

    settings = run.settings
    if settings.model in SHAPES:
        return settings.model
    try:
        path = weights.prepare(
            settings.model, settings.models_dir, run.screen.progress, run.screen.notice
        )
    finally:
        run.screen.stop_progress()
    return str(path)


def numbers(option: str, text: str) -> list[int]:
    """The whole numbers of an option such as 8192,131072. Raises UsageError."""
    import re

    from longread.errors import UsageError

    if not re.fullmatch(r"[1-9][0-9]{0,8}(,[1-9][0-9]{0,8})*", text):
        raise UsageError(f"{option} takes whole numbers, such as 8192,131072, not {text!r}")
    return [int(number) for number in text.split(",")]
