"""`longread bench questions`: throughput of questions that are answered several at once."""

from __future__ import annotations

from typing import Annotated

import typer

from longread.commands import options
from longread.commands.measure import numbers


def bench_questions(
    ctx: typer.Context,
    document: Annotated[str, typer.Argument(metavar="DOCUMENT", help="A file.")],
    questions: Annotated[
        str | None,
        typer.Option("--questions", metavar="FILE", help="Asked in turn; else general ones."),
    ] = None,
    counts: Annotated[
        str, typer.Option("--at-once", metavar="N,N,...", help="Questions answered at once.")
    ] = "1,4,16,64",
    num_questions: Annotated[
        int, typer.Option("--count", metavar="N", min=1, help="Questions in all, each time.")
    ] = 64,
    model: options.Model = None,
    context: options.Context = None,
    policy: options.Policy = None,
    budget: options.Budget = None,
    vote: options.Vote = None,
    index: options.Index = None,
    reselect: options.Reselect = None,
    max_tokens: options.MaxTokens = None,
    device: options.Device = None,
    dtype: options.Dtype = None,
    quiet: options.Quiet = False,
    verbose: options.Verbose = False,
) -> None:
    """Time many questions on one document, with 1, 4, 16 and 64 of them answered at once."""
    import dataclasses
    import json

    from longread.bench import questions as bench
    from longread.commands.ask_listed import read_questions
    from longread.commands.run import Run, table_lines
    from longread.device import choose_device
    from longread.events import Opened
    from longread.render import opened_line

    run = Run.start(ctx)
    screen, settings = run.screen, run.settings
    at_once = numbers("--at-once", counts)
    texts = list(bench.ASKED)
    if questions is not None:
        texts = [question.text for question in read_questions(questions, [document])]
    warm_up = choose_device(settings.device).type == "cuda"
    session = run.services.make_session(settings)
    opened = screen.show(session.open([document]))
    assert isinstance(opened, Opened), "a session's open ends with Opened"
    screen.note(f"longread: {opened_line(opened)}")
    figures = []
    for figure in bench.run(session, at_once, texts, num_questions, warm_up=warm_up):
        screen.note(f"longread: {figure.at_once} at once: {figure.seconds:.1f} s")
        figures.append(figure)
    session.close()
    rows = [
        (
            str(figure.at_once),
            f"{figure.seconds:.1f}",
            f"{figure.tokens_per_s:,.1f}",
            f"{figure.questions_per_min:,.1f}",
            f"{figures[0].seconds / figure.seconds:.2f}x",
            f"{figure.same}/{figure.num_questions}",
        )
        for figure in figures
    ]
    head = ("at_once", "s", "tokens/s", "questions/min", "speed", "same")
    for line in table_lines(head, rows, "at_once s tokens/s questions/min speed same"):
        screen.print(line)
    record = {
        "model": settings.model,
        "document_tokens": sum(info.num_tokens for info in opened.documents),
        "policy": settings.policy,
        "budget": settings.budget,
        "max_tokens": settings.max_tokens,
        "figures": [
            dataclasses.asdict(figure)
            | {
                "tokens_per_s": figure.tokens_per_s,
                "questions_per_min": figure.questions_per_min,
            }
            for figure in figures
        ],
    }
    screen.print(json.dumps(record))
