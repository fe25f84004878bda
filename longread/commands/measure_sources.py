"""`longread eval sources`: whether the passages that answers are cited by are the right ones."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from longread.commands.run import Run

NAME = "sources"


def measure(
    run: Run,
    lengths: tuple[int, ...],
    num_samples: int,
    data: Path | None,
    out: Path,
    limit_s: float | None,
) -> None:
    """Ask the books, rank passages in every way, print tables and last a JSON line."""
    import json
    import time

    from longread.commands.run import table_lines
    from longread.errors import UsageError
    from longread.evaluate import source_results
    from longread.evaluate.books_qa import BooksQA
    from longread.evaluate.runner import Prompts
    from longread.evaluate.sources import SourceRunner, samples
    from longread.evaluate.task import ANSWER_ROOM, Materials
    from longread.evaluate.variants import parse_variants
    from longread.events import Progress
    from longread.model import Decoder
    from longread.prompt import ChatFormat
    from longread.tokenizer import Tokenizer
    from longread.weights import prepare

    started = time.perf_counter()
    settings, screen = run.settings, run.screen
    if settings.context in ("select", "yarn"):
        raise UsageError(
            f"eval sources reads densely: leave --context {settings.context} out, and give lengths "
            "within the model's window"
        )
    (variant,) = parse_variants(settings.policy, settings.budget, settings)
    model_dir = prepare(settings.model, settings.models_dir, screen.progress, screen.notice)
    tokenizer, chat = Tokenizer.load(model_dir), ChatFormat.load(model_dir)
    task = BooksQA(Materials(lambda text: len(tokenizer.encode(text)), data, tokenizer.encode))
    decoder = Decoder.load(model_dir, settings.device, settings.dtype)
    config = decoder.config
    if max(lengths) > config.window:
        raise UsageError(
            f"--lengths {max(lengths)} is over the window of the model, which is {config.window:,}"
        )
    runner = SourceRunner(decoder, tokenizer, chat, variant)
    overhead = Prompts(tokenizer, chat).overhead + ANSWER_ROOM
    record = {}
    num_missing = 0
    for length in lengths:
        key = {
            "model": config.name,
            "model_identity": config.identity,
            "prompt_identity": chat.identity,
            "dtype": str(decoder.dtype).removeprefix("torch."),
            "length": length,
            "seed": settings.seed,
            "policy": variant.name,
            "fields": [list(field) for field in variant.fields],
        }
        stored = source_results.SourceFile(out, key)
        num_wanted = min(num_samples, task.num_samples(length - overhead))
        if not num_wanted:
            raise UsageError(
                f"no excerpt of {length:,} tokens holds a passage: give a larger length"
            )
        for place, sample in enumerate(samples(task, length - overhead, num_wanted, settings.seed)):
            if sample.number not in stored.samples:
                if limit_s is not None and time.perf_counter() - started > limit_s:
                    num_missing += 1
                    continue
                stored.add(sample.number, runner.ask(sample))
            screen.progress(Progress(f"sources at {length:,}", place + 1, num_wanted, "samples"))
        screen.stop_progress()
        numbers = sorted(number for number in stored.samples if number < num_wanted)
        found = [one for number in numbers for one in stored.samples[number]]
        title = f"{config.name} at {length:,} tokens, {variant.name}, seed {settings.seed}"
        tables = (
            source_results.place_table(title, found),
            source_results.support_table(title, found, length),
        )
        for table in tables:
            screen.print(table.title)
            for line in table_lines(table.head, table.rows, " ".join(table.head[1:])):
                screen.print(line)
            screen.print()
        record[length] = source_results.summary(found, length)
    screen.print(
        json.dumps(
            {
                "model": config.name,
                "policy": variant.name,
                "seed": settings.seed,
                "lengths": record,
                "samples_missing": num_missing,
                "seconds": round(time.perf_counter() - started, 1),
            }
        )
    )
