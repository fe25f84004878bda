"""`longread chat` and `longread ingest`: documents opened, to be asked now or later."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from longread.commands import options


def chat(
    ctx: typer.Context,
    documents: Annotated[
        list[str] | None,
        typer.Argument(metavar="DOCUMENT", help="Files; none with --session of a saved one."),
    ] = None,
    session: options.SessionName = None,
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
    reselect: options.Reselect = None,
    butler: options.Butler = None,
    neighbours: options.Neighbours = None,
    max_tokens: options.MaxTokens = None,
    temperature: options.Temperature = None,
    top_p: options.TopP = None,
    seed: options.Seed = None,
    device: options.Device = None,
    dtype: options.Dtype = None,
    weights: options.Weights = None,
    kv_dtype: options.KvDtype = None,
    cache_dir: options.CacheDir = None,
    no_wait: options.NoWait = None,
    no_cache: options.NoCache = None,
    truncate: options.Truncate = None,
    show_selected: options.ShowSelected = False,
    quiet: options.Quiet = False,
    verbose: options.Verbose = False,
) -> None:
    """Ask follow-up questions; /help lists the commands. Without a terminal, reads lines."""
    from longread.commands.run import Run
    from longread.errors import UsageError
    from longread.line_input import plain_reader, terminal_reader
    from longread.render import opened_line
    from longread.repl import COMMANDS, Repl

    sources = documents or []
    if not sources and session is None:
        raise UsageError("give a document: longread chat book.pdf")
    if "-" in sources:
        raise UsageError("chat reads its questions from standard input; give the document's file")
    if sys.stdin is None:
        raise UsageError("chat reads its questions from standard input, which is closed")
    run = Run.start(ctx)
    conversation = run.converse(sources, pages=pages, password=password, name=session)
    run.screen.note(f"longread: {opened_line(run.open(conversation))}")
    interactive = sys.stdin.isatty() and sys.stdout.isatty()
    if interactive:
        reader = terminal_reader(run.settings.sessions_dir / "history", list(COMMANDS))
    else:
        reader = plain_reader(sys.stdin)
    repl = Repl(
        conversation,
        run.screen,
        reader,
        interactive=interactive,
        show_selected=show_selected,
        verbose=run.verbose,
    )
    exit_code = repl.run()
    conversation.session.close()
    raise typer.Exit(exit_code)


def ingest(
    ctx: typer.Context,
    documents: Annotated[
        list[str], typer.Argument(metavar="DOCUMENT", help="Files, or - for standard input.")
    ],
    pages: options.Pages = None,
    password: options.Password = None,
    model: options.Model = None,
    context: options.Context = None,
    policy: options.Policy = None,
    index: options.Index = None,
    index_dim: options.IndexDim = None,
    max_tokens: options.MaxTokens = None,
    device: options.Device = None,
    dtype: options.Dtype = None,
    weights: options.Weights = None,
    kv_dtype: options.KvDtype = None,
    cache_dir: options.CacheDir = None,
    no_wait: options.NoWait = None,
    truncate: options.Truncate = None,
    as_json: options.Json = False,
    quiet: options.Quiet = False,
    verbose: options.Verbose = False,
) -> None:
    """Read documents into the cache ahead of the first question."""
    import time

    from longread.commands.run import Run
    from longread.errors import UsageError
    from longread.render import opened_line
    from longread.schema import ingest_document

    run = Run.start(ctx)
    if run.settings.no_cache:
        raise UsageError("ingest only fills the cache, and no_cache is set; unset it")
    started_s = time.monotonic()
    conversation = run.converse(documents, pages=pages, password=password)
    opened = run.open(conversation)
    conversation.session.close()
    if as_json:
        run.print_json(ingest_document(opened, time.monotonic() - started_s))
    else:
        run.screen.print(opened_line(opened))
