"""`longread sessions`: list, show, export and remove saved conversations."""

from __future__ import annotations

from typing import Annotated

import typer

from longread.commands import options

app = typer.Typer(help="Saved conversations.", rich_markup_mode=None)

Name = Annotated[str, typer.Argument(metavar="NAME", help="Of the session.")]


@app.command("ls")
def list_sessions(ctx: typer.Context, as_json: options.Json = False) -> None:
    """List the saved sessions."""
    from pathlib import Path

    from longread import history
    from longread.commands.run import Run, table_lines
    from longread.errors import StoreError
    from longread.events import Notice

    run = Run.start(ctx)
    rows, records = [], []
    for name in history.list_names(run.settings.sessions_dir):
        try:
            saved = history.load(run.settings.sessions_dir, name)
        except StoreError as error:
            run.screen.notice(Notice(str(error)))
            continue
        documents = ", ".join(Path(source).name for source in saved.sources)
        rows.append((name, str(len(saved.turns)), saved.created, saved.model, documents))
        records.append(
            {
                "name": name,
                "created": saved.created,
                "model": saved.model,
                "sources": list(saved.sources),
                "pages": saved.pages,
                "num_turns": len(saved.turns),
            }
        )
    if as_json:
        run.print_json({"version": 1, "sessions": records})
    elif rows:
        for line in table_lines(("name", "turns", "created", "model", "documents"), rows, "turns"):
            run.screen.print(line)
    else:
        run.screen.note(f"longread: no sessions in {run.settings.sessions_dir}")


@app.command("show")
def show_session(ctx: typer.Context, name: Name, as_json: options.Json = False) -> None:
    """Print a session's questions, answers and sources."""
    _print(ctx, name, "json" if as_json else "md")


@app.command("export")
def export_session(
    ctx: typer.Context,
    name: Name,
    file: Annotated[
        str | None,
        typer.Argument(metavar="FILE", help="To write; without it the session is printed."),
    ] = None,
    format_name: Annotated[
        str | None,
        typer.Option(
            "--format", metavar="FORMAT", help="md or json; without it, as FILE ends, or md."
        ),
    ] = None,
) -> None:
    """Write a session with its sources and settings to a file, or print it."""
    from longread import history
    from longread.commands.run import Run
    from longread.errors import UsageError
    from longread.transcript import FORMATS, write_export

    if format_name is not None and format_name not in FORMATS:
        raise UsageError(f"--format {format_name!r}: choose one of {', '.join(FORMATS)}")
    if file is None:
        _print(ctx, name, format_name or "md")
        return
    run = Run.start(ctx)
    write_export(history.load(run.settings.sessions_dir, name), file, format_name)


@app.command("rm")
def remove_sessions(
    ctx: typer.Context,
    names: Annotated[list[str], typer.Argument(metavar="NAME", help="Of the sessions.")],
) -> None:
    """Remove saved sessions; the documents and their cache stay."""
    from longread import history
    from longread.commands.run import Run

    run = Run.start(ctx)
    for name in names:
        history.remove(run.settings.sessions_dir, name)
        run.screen.note(f"longread: removed session {name}")


def _print(ctx: typer.Context, name: str, format_name: str) -> None:
    from longread import history
    from longread.commands.run import Run
    from longread.transcript import export

    run = Run.start(ctx)
    run.screen.write(export(history.load(run.settings.sessions_dir, name), format_name))
