"""`longread ask`: documents and a question in, the answer out."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Annotated

import typer

from longread.commands import options

if TYPE_CHECKING:
    from longread.events import Answer

NO_DOCUMENT = 'give a document and a question: longread ask book.pdf "Who is Captain Voss?"'


def ask(
    ctx: typer.Context,
    documents: Annotated[
        list[str] | None,
        typer.Argument(metavar="DOCUMENT", help="Files, or - for standard input."),
    ] = None,
    question: Annotated[
        str | None, typer.Argument(metavar="QUESTION", help="The last word, in quotes.")
    ] = None,
    questions: Annotated[
        str | None,
        typer.Option(
            "--questions",
            metavar="FILE",
            help="Answer each line of FILE by itself, as JSON lines; all words are documents.",
        ),
    ] = None,
    out: Annotated[
        str | None,
        typer.Option(
            "--out", metavar="FILE", help="With --questions: write there; answers there are kept."
        ),
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
    report: options.Report = None,
    as_json: options.Json = False,
    quiet: options.Quiet = False,
    verbose: options.Verbose = False,
) -> None:
    """Ask documents a question. A question that begins with - goes after --.

    The answer, or one JSON document, is all that goes to standard output; with --questions, one
    JSON document a line.
    """
    from longread.commands.ask_listed import ask_listed
    from longread.commands.run import Run
    from longread.errors import UsageError
    from longread.events import Answer
    from longread.render import opened_line
    from longread.report import report_path, write_report
    from longread.schema import answer_document

    words = [*(documents or []), *([] if question is None else [question])]
    if questions is not None:
        if report is not None:
            raise UsageError("--report shows one answer; give the question itself, not --questions")
        run = Run.start(ctx)
        names = {"pages": pages, "password": password, "name": session}
        ask_listed(run, words, questions, out, with_selected=show_selected, **names)
        return
    if out is not None:
        raise UsageError("--out is for many answers: give them with --questions FILE")
    sources, text = split_words(words)
    if not sources and session is None:
        raise UsageError(NO_DOCUMENT)
    run = Run.start(ctx)
    screen = run.screen
    conversation = run.converse(sources, pages=pages, password=password, name=session)
    target = None if report is None else report_path(report, conversation)
    opened = run.open(conversation)
    conversation.session.reading.follows_tokens = target is not None
    screen.note(f"longread: {opened_line(opened)}")
    answer = screen.show(conversation.ask(text), stream=not as_json)
    assert isinstance(answer, Answer), "a session's ask ends with an Answer"
    screen.ending(answer)
    if not as_json:
        screen.sources(answer)
    if show_selected:
        screen.selected(answer.selection, opened.documents, heads=run.verbose)
    if target is not None:
        screen.note(f"longread: {write_report(target, conversation)}")
    if run.verbose:
        screen.note(f"longread: {_timings_line(answer)}")
    conversation.keep()
    if as_json:
        run.print_json(answer_document(text, answer, with_selected=show_selected))
    conversation.session.close()
    if answer.finish_reason == "interrupted":
        raise typer.Exit(130)


def split_words(words: list[str]) -> tuple[list[str], str]:
    """Part the positional words into documents and the question; UsageError where one lacks."""
    from longread.errors import UsageError
    from longread.plain_text import clean, one_line

    if not words:
        raise UsageError(NO_DOCUMENT)
    question = words[-1]
    if question == "-" or os.path.exists(question):
        raise UsageError(
            f"the question is missing: {one_line(question)} is a document; put the question last, "
            "in quotes"
        )
    if not clean(question).strip():
        raise UsageError("the question is empty")
    return words[:-1], clean(question)


def _timings_line(answer: Answer) -> str:
    timings, usage = answer.timings, answer.usage
    return (
        f"open {timings.open_s:.2f} s (prefill {timings.prefill_s:.2f} s), "
        f"question {timings.question_s:.2f} s, "
        f"{usage.answer_tokens} answer tokens {timings.decode_s:.2f} s"
    )
