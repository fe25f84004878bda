"""`longread cache`: what is on disk, whether it is sound, and how to be rid of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from longread.commands import options

if TYPE_CHECKING:
    from longread.commands.run import Run
    from longread.store import Store

app = typer.Typer(help="Documents and their KV caches on disk.", rich_markup_mode=None)

SHORT_KEY_LEN = 12


def _store(run: Run) -> Store:
    from longread.store import Store

    return Store(run.settings.cache_dir, run.settings.cache_max_bytes)


@app.command("ls")
def list_entries(
    ctx: typer.Context, cache_dir: options.CacheDir = None, as_json: options.Json = False
) -> None:
    """List the entries, last used first."""
    import dataclasses

    from longread.commands.run import Run, date_text, table_lines
    from longread.plain_text import size_text

    run = Run.start(ctx)
    entries = _store(run).list_entries()
    if as_json:
        records = [dataclasses.asdict(entry) for entry in entries]
        run.print_json({"version": 1, "entries": records})
        return
    if not entries:
        run.screen.note(f"longread: nothing in {run.settings.cache_dir}")
        return
    rows = [
        (
            entry.key[:SHORT_KEY_LEN],
            f"{entry.num_ready:,}",
            size_text(entry.num_bytes),
            entry.state,
            date_text(entry.last_used_s),
            entry.model,
            ", ".join(entry.names),
        )
        for entry in entries
    ]
    head = ("key", "tokens", "size", "state", "used", "model", "documents")
    for line in table_lines(head, rows, "tokens size"):
        run.screen.print(line)


@app.command("info")
def show_info(
    ctx: typer.Context, cache_dir: options.CacheDir = None, as_json: options.Json = False
) -> None:
    """Print the totals, the cap and the free space."""
    import dataclasses

    from longread.commands.run import Run, table_lines
    from longread.plain_text import size_text

    run = Run.start(ctx)
    info = _store(run).info()
    if as_json:
        run.print_json({"version": 1, **dataclasses.asdict(info), "root": str(info.root)})
        return
    entries = f"{info.num_entries:,} ({info.num_partial} partial, {info.num_damaged} damaged)"
    rows = [
        ("directory", str(info.root)),
        ("used", size_text(info.used_bytes)),
        ("cap", f"{size_text(info.max_bytes)} (setting cache_size)"),
        ("free on disk", size_text(info.free_bytes)),
        ("entries", entries),
        ("document records", f"{info.num_records:,} ({size_text(info.record_bytes)})"),
        ("quarantine", size_text(info.quarantine_bytes)),
    ]
    for line in table_lines(("what", "value"), rows)[1:]:
        run.screen.print(line)


@app.command("verify")
def verify_entries(
    ctx: typer.Context,
    key: Annotated[
        str, typer.Argument(metavar="KEY", help="Beginning of an entry's key; all without.")
    ] = "",
    cache_dir: options.CacheDir = None,
    as_json: options.Json = False,
) -> None:
    """Check every byte; what is damaged is set aside and made anew when next used.

    Exits with 8 where something was damaged.
    """
    import dataclasses

    from longread.commands.run import Run
    from longread.errors import StoreError
    from longread.plain_text import size_text

    run = Run.start(ctx)
    results = []
    for result in _store(run).verify(key, notice=run.screen.notice):
        results.append(result)
        if not as_json:
            problems = f": {'; '.join(result.problems)}" if result.problems else ""
            size = size_text(result.num_bytes)
            short = result.key[:SHORT_KEY_LEN]
            run.screen.print(f"{short}  {result.kind}  {size}  {result.state}{problems}")
    if as_json:
        records = [dataclasses.asdict(result) for result in results]
        run.print_json({"version": 1, "results": records})
    if any(result.state == "damaged" for result in results):
        raise typer.Exit(StoreError.exit_code)


@app.command("rm")
def remove_entries(
    ctx: typer.Context,
    keys: Annotated[
        list[str], typer.Argument(metavar="KEY", help="Beginnings of the entries' keys.")
    ],
    cache_dir: options.CacheDir = None,
) -> None:
    """Remove entries, with the documents' text that only they need."""
    from longread.commands.run import Run
    from longread.plain_text import size_text

    run = Run.start(ctx)
    store = _store(run)
    for key in keys:
        result = store.remove(key, notice=run.screen.notice)
        run.screen.note(f"longread: removed {key}, {size_text(result.freed_bytes)} freed")


@app.command("prune")
def prune_entries(
    ctx: typer.Context,
    older_than: Annotated[
        str | None,
        typer.Option("--older-than", metavar="AGE", help="Not used for: 30d, 12h or 45m."),
    ] = None,
    size: Annotated[
        str | None,
        typer.Option("--size", metavar="SIZE", help="Least recently used, down to: 5GB, or 0."),
    ] = None,
    partial: Annotated[
        bool, typer.Option("--partial", help="Entries that are partial or damaged.")
    ] = False,
    cache_dir: options.CacheDir = None,
) -> None:
    """Remove left-overs of crashes, and what the options name; entries in use stay."""
    from longread.commands.run import Run
    from longread.plain_text import count_text, size_text

    max_bytes = None if size is None else _target_bytes(size)
    older_than_s = None if older_than is None else _age_s(older_than)
    run = Run.start(ctx)
    result = _store(run).prune(
        older_than_s=older_than_s, max_bytes=max_bytes, partial=partial, notice=run.screen.notice
    )
    skipped = f"; {result.num_skipped:,} in use were left" if result.num_skipped else ""
    removed = count_text(result.num_removed, "thing")
    run.screen.note(f"longread: removed {removed}, {size_text(result.freed_bytes)}{skipped}")


@app.command("path")
def show_path(ctx: typer.Context) -> None:
    """Print the cache directory."""
    from longread.commands.run import Run

    run = Run.start(ctx)
    run.screen.print(str(run.settings.cache_dir))


def _target_bytes(text: str) -> int:
    from longread import values
    from longread.errors import UsageError

    if text.strip() == "0":
        return 0
    try:
        return values.size(text)
    except ValueError as error:
        raise UsageError(f"--size is {text!r}: {error}") from None


def _age_s(text: str) -> float:
    import re

    from longread.errors import UsageError

    match = re.fullmatch(r"([0-9]{1,9})\s*([dhm])", text.strip())
    if not match:
        raise UsageError(f"--older-than is {text!r}: give days, hours or minutes (30d, 12h, 45m)")
    return float(match[1]) * {"d": 86400.0, "h": 3600.0, "m": 60.0}[match[2]]
