"""`longread inspect`: what the model would see of a document, without loading a model."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated

import typer

from longread.commands import options

if TYPE_CHECKING:
    from longread.commands.run import Run
    from longread.completeness import Completeness
    from longread.document import Document


def inspect(
    ctx: typer.Context,
    documents: Annotated[
        list[str], typer.Argument(metavar="DOCUMENT", help="Files, or - for standard input.")
    ],
    text: Annotated[
        bool, typer.Option("--text", help="Print the whole text, pages parted by form feeds.")
    ] = False,
    page: Annotated[
        str | None, typer.Option("--page", metavar="N", help="Print the text of one page.")
    ] = None,
    against: Annotated[
        str | None,
        typer.Option("--against", metavar="TEXT", help="Count the words of this text file found."),
    ] = None,
    pages: options.Pages = None,
    password: options.Password = None,
    model: options.Model = None,
    as_json: options.Json = False,
    quiet: options.Quiet = False,
    verbose: options.Verbose = False,
) -> None:
    """Show pages, tokens and warnings: what the model would see.

    For each page: the engine that read it, its length, the share of characters that look like text
    (quality), and what is particular about it. With --against, how much of a known text was read;
    with -v too, where in both the longest differences are.

    Tokens are counted where the model is on disk, or is named with --model.
    """
    from longread.commands.run import Run, password_asker, standard_input
    from longread.document import extract, read_source
    from longread.errors import UsageError
    from longread.events import Notice

    if page is not None:
        if pages is not None:
            raise UsageError("--page and --pages do not go together")
        if not page.isdecimal():
            raise UsageError(f"--page is {page!r}: give one number; --pages takes ranges")
    if documents.count("-") > 1:
        raise UsageError("standard input (-) can be read only once")
    if against is not None and (len(documents) != 1 or text or page is not None):
        raise UsageError("--against goes with one document and without --text and --page")
    run = Run.start(ctx)
    asker = password_asker(password, run.screen)
    read = []
    for source in documents:
        raw = read_source(source, stdin=standard_input())
        try:
            read.append(
                extract(raw, pages=page or pages, password=asker, progress=run.screen.progress)
            )
        finally:
            run.screen.stop_progress()
    if text or (page is not None and not as_json):
        _print_texts(run, read)
        for document in read:
            for warning in document.warnings:
                run.screen.notice(Notice(f"{document.name}: {warning}"))
        return
    if against is not None:
        _print_completeness(run, read[0], against, as_json=as_json)
        return
    count, window = _token_counter(run)
    if as_json:
        records = [_record(document, count, with_text=page is not None) for document in read]
        run.print_json({"version": 1, "model": run.settings.model, "documents": records})
        return
    for document in read:
        _print_summary(run, document, count, window)


def _print_completeness(run: Run, document: Document, against: str, *, as_json: bool) -> None:
    from longread.commands.run import table_lines
    from longread.completeness import compare
    from longread.document import document_text, read_source
    from longread.textfile import decode

    raw = read_source(against)
    expected, _ = decode(raw.data, raw.source)
    found = compare(document_text(document), expected)
    places = _places(found, document, expected)
    if as_json:
        record = dataclasses.asdict(found) | {
            "version": 1,
            "name": document.name,
            "against": raw.name,
            "found_share": found.found_share,
            "moved_share": found.moved_share,
            "extra_share": found.extra_share,
        }
        for difference, (page, line_number) in zip(record["differences"], places, strict=True):
            difference |= {"page": page, "line": line_number}
        run.print_json(record)
        return
    num_extra = found.num_read - found.num_found - found.num_moved
    rows: list[tuple[str, ...]] = [
        ("document", document.name, ""),
        ("against", raw.name, ""),
        ("words", f"{found.num_expected:,}", ""),
        ("found in order", f"{found.num_found:,}", f"{found.found_share:.2%}"),
        ("found elsewhere", f"{found.num_moved:,}", f"{found.moved_share:.2%}"),
        ("extra", f"{num_extra:,}", f"{found.extra_share:.2%}"),
    ]
    for line in table_lines(("what", "number", "share"), rows)[1:]:
        run.screen.print(line)
    if run.verbose:
        rows = [
            (found_.kind, f"{found_.num_words:,}", str(page or "-"), str(line or "-"), found_.text)
            for found_, (page, line) in zip(found.differences, places, strict=True)
        ]
        run.screen.print()
        head = ("kind", "words", "page", "line", "text")
        for row in table_lines(head, rows, "words page line"):
            run.screen.print(row)
        return
    for name, samples in (("missing", found.missing), ("extra", found.extra)):
        for sample in samples:
            run.screen.print(f"{name}: {sample}")


def _places(
    found: Completeness, document: Document, expected: str
) -> list[tuple[int | None, int | None]]:
    """Of each difference, the page where it begins and the line of the text compared with."""
    from bisect import bisect_right

    from longread.completeness import word_starts

    pages = word_starts([page.text for page in document.pages])
    lines = word_starts(expected.split("\n"))
    places = []
    for difference in found.differences:
        page = line = None
        if difference.read_idx is not None:
            place = bisect_right(pages, difference.read_idx) - 1
            page = document.pages[place].page_idx + 1
        if difference.expected_idx is not None:
            line = bisect_right(lines, difference.expected_idx)
        places.append((page, line))
    return places


CountFn = Callable[[str], int]


def _token_counter(run: Run) -> tuple[CountFn | None, int | None]:
    """Return how to count tokens and the model's window; None where no tokenizer is at hand."""
    from longread import catalog

    settings = run.settings
    listings = catalog.list_models(settings.models_dir)
    path = next((item.path for item in listings if item.name == settings.model), None)
    if path is None and run.origins["model"] != "--model":
        return None, None
    from longread import weights
    from longread.tokenizer import Tokenizer

    if path is None:
        try:
            path = weights.prepare(
                settings.model, settings.models_dir, run.screen.progress, run.screen.notice
            )
        finally:
            run.screen.stop_progress()
    tokenizer = Tokenizer.load(path)
    return lambda text: len(tokenizer.encode(text)), weights.load_config(path).window


def _print_texts(run: Run, documents: list[Document]) -> None:
    from longread.plain_text import clean

    for number, document in enumerate(documents):
        if number:
            run.screen.out.write("\f")
        # The form feeds are ours; those of a document would part pages that are not there.
        run.screen.out.write("\f".join(clean(page.text) for page in document.pages))
    run.screen.out.write("\n")


def _print_summary(run: Run, document: Document, count: CountFn | None, window: int | None) -> None:
    from longread.commands.run import table_lines
    from longread.document import document_text

    print_line = run.screen.print
    number = f"{document.num_pages_total:,}"
    if len(document.pages) != document.num_pages_total:
        number = f"{len(document.pages):,} of {number}"
    tokens = f"not counted; `longread models pull {run.settings.model}` makes it possible"
    if count is not None and window is not None:
        num_tokens = count(document_text(document))
        fits = "" if num_tokens < window else "; read by selection, or see --pages"
        tokens = f"{num_tokens:,} ({run.settings.model} takes {window:,} in all{fits})"
    rows = [
        ("document", document.name),
        ("kind", f"{document.kind}, read by {document.engine}"),
        ("sha256", document.sha256),
        ("pages", number),
        ("tokens", tokens),
        *(("warning", warning) for warning in document.warnings),
    ]
    for line in table_lines(("what", "value"), rows)[1:]:
        print_line(line)
    print_line()
    page_rows = [
        (
            str(page.page_idx + 1),
            page.label or "-",
            f"{len(page.text):,}",
            f"{len(page.text.split()):,}",
            f"{count(page.text):,}" if count is not None else "-",
            page.engine or "-",
            f"{page.quality:.0%}",
            page.note,
        )
        for page in document.pages
    ]
    head = ("page", "label", "characters", "words", "tokens", "engine", "quality", "note")
    for line in table_lines(head, page_rows, "page characters words tokens quality"):
        print_line(line.rstrip())
    print_line()


def _record(document: Document, count: CountFn | None, *, with_text: bool) -> dict[str, object]:
    from longread.document import document_text

    pages: list[dict[str, object]] = []
    for page in document.pages:
        record: dict[str, object] = {
            "page": page.page_idx + 1,
            "page_label": page.label,
            "num_chars": len(page.text),
            "num_words": len(page.text.split()),
            "num_tokens": count(page.text) if count is not None else None,
            "engine": page.engine,
            "quality": round(page.quality, 4),
            "note": page.note or None,
        }
        if with_text:
            record["text"] = page.text
        pages.append(record)
    return {
        "name": document.name,
        "kind": document.kind,
        "engine": document.engine,
        "sha256": document.sha256,
        "num_pages_total": document.num_pages_total,
        "num_tokens": count(document_text(document)) if count is not None else None,
        "warnings": list(document.warnings),
        "pages": pages,
    }
