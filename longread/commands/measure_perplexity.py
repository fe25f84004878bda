"""`longread eval perplexity`: a text under each form of the weights."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from longread.commands.run import Run

NAME = "perplexity"


def measure(run: Run, forms: str, data: Path | None, length: int, num_pieces: int) -> None:
    """Print a table and a line of JSON. forms: names with commas; the others stand beside the
    first. data: a text file.
    """
    import json
    from dataclasses import replace

    from longread import textfile
    from longread.commands.run import table_lines
    from longread.errors import DocumentError, UsageError
    from longread.evaluate import perplexity
    from longread.model import Decoder
    from longread.packed import choose_weights
    from longread.tokenizer import Tokenizer
    from longread.weights import prepare

    settings, screen = run.settings, run.screen
    names = [name.strip() for name in forms.split(",")]
    if not set(names) <= {"bf16", "int8", "int4"}:
        raise UsageError(f"--weights is {forms!r}: give some of bf16, int8 and int4, with commas")
    if data is None or data.is_dir():
        raise UsageError("perplexity is measured on a text: give it with --data FILE")
    try:
        text, _ = textfile.decode(data.read_bytes(), str(data))
    except OSError as error:
        raise DocumentError(f"cannot read {data}: {error.strerror}") from error
    found = []
    try:
        model_dir = prepare(settings.model, settings.models_dir, screen.progress, screen.notice)
        token_ids = Tokenizer.load(model_dir).encode(text)
        if len(token_ids) < 2:
            raise UsageError(f"{data} holds no two tokens")
        texts = perplexity.pieces(token_ids, length, num_pieces)
        for name in names:
            wanted = replace(settings, weights=name)
            choose_weights(wanted, model_dir, screen.progress, screen.notice)
            decoder = Decoder.load(model_dir, settings.device, settings.dtype, weights=name)
            found.append(perplexity.measure(decoder, name, texts, screen.progress))
    finally:
        screen.stop_progress()
    rows, records = [], []
    for losses in found:
        share, spread = losses.beside(found[0])
        rows.append(
            (
                losses.form,
                f"{losses.perplexity:.4f}",
                "" if losses is found[0] else f"{share:+.3%} ± {spread:.3%}",
                f"{len(losses.losses):,}",
                f"{losses.seconds:.0f}",
            )
        )
        records.append(
            {
                "weights": losses.form,
                "perplexity": losses.perplexity,
                "difference": share,
                "standard_error": spread,
                "tokens": len(losses.losses),
                "seconds": round(losses.seconds, 1),
            }
        )
    head = ("weights", "perplexity", f"beside {names[0]}", "tokens", "s")
    for line in table_lines(head, rows, " ".join(("perplexity", head[2], "tokens", "s"))):
        screen.print(line)
    record = {"model": settings.model, "text": data.name, "length": length, "forms": records}
    screen.print(json.dumps(record))
