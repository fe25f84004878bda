"""`longread models`: the catalogue, and what of it is on disk."""

from __future__ import annotations

from typing import Annotated

import typer

from longread.commands import options

app = typer.Typer(help="Models: the catalogue and their files.", rich_markup_mode=None)


@app.command("ls")
def list_models(ctx: typer.Context, as_json: options.Json = False) -> None:
    """List the catalogue and every other model that is converted."""
    import dataclasses

    from longread import catalog, model_files
    from longread.commands.run import Run, table_lines
    from longread.plain_text import size_text

    run = Run.start(ctx)
    listings = catalog.list_models(run.settings.models_dir)
    if as_json:
        records = [
            {
                **dataclasses.asdict(listing),
                "weights": model_files.weight_forms(listing.path) if listing.path else [],
                "path": str(listing.path) if listing.path else None,
            }
            for listing in listings
        ]
        run.print_json({"version": 1, "models": records})
        return
    rows = []
    for listing in listings:
        on_disk = listing.gguf_bytes + listing.converted_bytes
        rows.append(
            (
                listing.name + (" (default)" if listing.name == run.settings.model else ""),
                size_text(listing.download_bytes) if listing.download_bytes else "-",
                size_text(on_disk) if on_disk else "-",
                "ready" if listing.path else "not here",
                "+".join(model_files.weight_forms(listing.path)) if listing.path else "-",
                f"{listing.window:,}" if listing.window else "-",
                listing.licence or "-",
            )
        )
    head = ("name", "download", "disk", "state", "weights", "window", "licence")
    for line in table_lines(head, rows, "download disk window"):
        run.screen.print(line)


@app.command("pull")
def pull_models(
    ctx: typer.Context,
    names: Annotated[
        list[str],
        typer.Argument(metavar="NAME", help="Catalogue names, hub ids, GGUF files or folders."),
    ],
    quiet: options.Quiet = False,
    verbose: options.Verbose = False,
) -> None:
    """Fetch, verify, convert and pack models ahead of their first use."""
    from longread import weights
    from longread.commands.run import Run
    from longread.packed import choose_weights

    run = Run.start(ctx)
    sinks = run.screen.progress, run.screen.notice
    for name in names:
        try:
            path = weights.prepare(name, run.settings.models_dir, *sinks)
            choose_weights(run.settings, path, *sinks)
        finally:
            run.screen.stop_progress()
        run.screen.note(f"longread: {name} is ready in {path}")


@app.command("rm")
def remove_models(
    ctx: typer.Context,
    names: Annotated[list[str], typer.Argument(metavar="NAME", help="As `models ls` shows.")],
) -> None:
    """Remove models' files, fetched and converted."""
    from longread import catalog
    from longread.commands.run import Run
    from longread.plain_text import size_text

    run = Run.start(ctx)
    for name in names:
        freed = catalog.remove_model(run.settings.models_dir, name)
        run.screen.note(f"longread: removed {name}, {size_text(freed)} freed")


@app.command("path")
def show_path(
    ctx: typer.Context,
    name: Annotated[
        str | None, typer.Argument(metavar="NAME", help="Of a converted model.")
    ] = None,
) -> None:
    """Print the models directory, or where one converted model lies."""
    from longread import catalog
    from longread.commands.run import Run
    from longread.errors import ModelError

    run = Run.start(ctx)
    if name is None:
        run.screen.print(str(run.settings.models_dir))
        return
    for listing in catalog.list_models(run.settings.models_dir):
        if listing.name == name and listing.path is not None:
            run.screen.print(str(listing.path))
            return
    raise ModelError(f"{name} is not converted here; `longread models pull {name}` does it")
