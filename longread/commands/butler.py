"""`longread butler`: trains the predictor of the policy `butler`, and shows what one is."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from longread.commands import options

if TYPE_CHECKING:
    from longread.commands.run import Run
    from longread.policies.predictor import Origin, Predictor

app = typer.Typer(help="The trained predictor of --policy butler.", rich_markup_mode=None)


@app.command("train")
def train_predictor(
    ctx: typer.Context,
    texts: Annotated[
        list[Path], typer.Argument(metavar="TEXTS...", help="Text files, or folders of them.")
    ],
    out: Annotated[Path, typer.Option("--out", metavar="FILE", help="Where the predictor goes.")],
    steps: Annotated[
        int, typer.Option("--steps", metavar="N", min=1, help="Texts, as many as it learns from.")
    ] = 2000,
    length: Annotated[
        int, typer.Option("--length", metavar="N", min=1, help="Tokens of each text.")
    ] = 8192,
    width: Annotated[
        int,
        typer.Option("--width", metavar="N", min=0, help="0: for 1 % of the model's parameters."),
    ] = 0,
    limit_seconds: Annotated[
        float,
        typer.Option("--limit-seconds", metavar="S", min=0.0, help="End by then; 0: no limit."),
    ] = 0.0,
    seed: Annotated[
        str | None, typer.Option("--seed", metavar="N", help="Of the texts and the first weights.")
    ] = None,
    model: options.Model = None,
    device: options.Device = None,
    dtype: options.Dtype = None,
    quiet: options.Quiet = False,
) -> None:
    """Train it on texts. The same command goes on with a training that was stopped."""
    from longread.atomic import write_atomic
    from longread.butler.train import Recipe, Trainer, read_texts
    from longread.commands.run import Run
    from longread.errors import UsageError
    from longread.model import Decoder
    from longread.policies.predictor import to_bytes
    from longread.tokenizer import Tokenizer
    from longread.weights import prepare

    run = Run.start(ctx)
    settings, screen = run.settings, run.screen
    if out.exists():
        raise UsageError(f"{out} is there already: remove it, or give another --out")
    found = read_texts(texts)
    try:
        model_dir = prepare(settings.model, settings.models_dir, screen.progress, screen.notice)
        decoder = Decoder.load(model_dir, settings.device, settings.dtype)
        recipe = Recipe(steps, length, seed=settings.seed, limit_s=limit_seconds, width=width)
        trainer = Trainer(decoder, Tokenizer.load(model_dir), found, recipe)
        checkpoint = out.with_name(out.name + ".checkpoint")
        trainer.run(checkpoint, screen.progress)
        origin = trainer.origin(", ".join(path.name for path in texts))
    finally:
        screen.stop_progress()
    write_atomic(out, [to_bytes(trainer.predictor, origin)], mode=0o644)
    checkpoint.unlink(missing_ok=True)
    _show(run, trainer.predictor, origin)


@app.command("info")
def show_predictor(
    ctx: typer.Context,
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A predictor.")],
    as_json: options.Json = False,
) -> None:
    """Show a predictor's model, training and recall."""
    from dataclasses import asdict

    from longread.commands.run import Run
    from longread.policies.predictor import load

    run = Run.start(ctx)
    predictor, origin = load(file)
    if as_json:
        shape = asdict(predictor.shape) | {"width": predictor.width}
        shape["parameters"] = predictor.num_parameters
        run.print_json({"version": 1, **asdict(origin), "shape": shape})
    else:
        _show(run, predictor, origin)


def _show(run: Run, predictor: Predictor, origin: Origin) -> None:
    from longread.commands.run import table_lines

    lines = (
        ("model", origin.model),
        ("weights", origin.identity),
        ("parameters", f"{predictor.num_parameters:,}"),
        ("width", str(predictor.width)),
        ("texts", origin.texts),
        ("seed", str(origin.seed)),
        ("trained", f"{origin.steps:,} steps, {origin.tokens:,} tokens, {origin.seconds:,.0f} s"),
    )
    for name, value in lines:
        run.screen.print(f"{name:<11} {value}")
    if not origin.recall:
        return
    run.screen.print()
    pairs = list(zip(origin.recall, origin.best, strict=True))
    rows = [(str(layer), f"{own:.3f}", f"{best:.3f}") for layer, (own, best) in enumerate(pairs)]
    recall, best = (sum(column) / len(pairs) for column in zip(*pairs, strict=True))
    rows.append(("mean", f"{recall:.3f}", f"{best:.3f}"))
    for line in table_lines(("layer", "recall", "best"), rows, "layer recall best"):
        run.screen.print(line)
