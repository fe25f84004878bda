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
    from longread import history
    from longread.commands.run import Run

    run = Run.start(ctx)
    saved = history.load(run.settings.sessions_dir, name)
    if as_json:
        run.screen.out.write(history.export_json(saved))
    else:
        run.screen.write(history.export_markdown(saved))


@app.command("export")
def export_session(
    ctx: typer.Context,
    name: Name,
    file: Annotated[
        str, typer.Argument(metavar="FILE", help="Markdown, or JSON where it ends in .json.")
    ],
) -> None:
    """Write a session to a file."""
    from longread import history
    from longread.commands.run import Run
    from longread.repl import write_export

    run = Run.start(ctx)
    write_export(history.load(run.settings.sessions_dir, name), file)


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
