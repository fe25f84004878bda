"""How documents are read at each length (`--context`), and which policies answer from that.

Owns the choice, and one run of the grid for each way to read: a model that reads past its window,
or in a longer one, is another Decoder. Reading itself is past_window.py's and rope.py's.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence

from longread import rope
from longread.context import QUESTION_RESERVE, Way
from longread.errors import UsageError
from longread.evaluate.grid import Grid, Outcome, Request
from longread.evaluate.task import ANSWER_ROOM
from longread.evaluate.variants import Variant
from longread.events import Notice, NoticeFn
from longread.past_window import Reading
from longread.policies import TokenSelect
from longread.weights import ModelConfig


def name_of(way: Way) -> str:
    """What cells call a way to read; how far YaRN stretches the window follows from the length."""
    if way.reading is not None:
        return f"select{way.reading.label}"
    return "yarn" if way.stretch > 1 else "dense"


def ways_to_read(
    context: str, lengths: Sequence[int], config: ModelConfig, reading: Reading | None = None
) -> dict[Way, tuple[int, ...]]:
    """The lengths that are read in each way.

    With `auto` what the window cannot hold is read by selection, with `yarn` in a longer window;
    what it holds is read densely. reading: how to read by selection. Raises UsageError for what is
    over the window and is to be read densely, where YaRN cannot be had, and for a reading that
    passes the window itself.
    """
    if reading is not None and reading.num_positions > config.window:
        raise UsageError(
            f"--reading attends to {reading.num_positions:,} positions, and the model was trained "
            f"for {config.window:,}: choose smaller sizes"
        )
    reading = reading or Reading().fitting(config.window)
    found: dict[Way, tuple[int, ...]] = {}
    for length in lengths:
        is_over = length > config.window
        if context == "yarn":
            way = Way(stretch=rope.yarn_factor(config, length))
        elif context == "select" or (context == "auto" and is_over):
            way = Way(reading)
        elif is_over:
            raise UsageError(
                f"--lengths {length} is over the window of the model, which is {config.window:,}: "
                "leave out --context dense to have it read by selection, or give --context yarn"
            )
        else:
            way = Way()
        found[way] = (*found.get(way, ()), length)
    return found


def answering(variants: Sequence[Variant], way: Way, window: int) -> tuple[Variant, ...]:
    """The variants that can answer from what was read so; see context.answering_policy."""
    return tuple(variant for variant in variants if not way.selects or _fits(variant, window))


def _fits(variant: Variant, window: int) -> bool:
    """Whether a policy selects, and what it reads at a step has positions within the window."""
    policy = variant.make(window)
    if not isinstance(policy, TokenSelect) or policy.budget is None or policy.stand_in:
        return False
    room = window - QUESTION_RESERVE - ANSWER_ROOM
    return policy.sink_size + policy.window_size + policy.budget <= room


def run_contexts(
    request: Request,
    ways: Mapping[Way, tuple[int, ...]],
    window: int,
    make_grid: Callable[[Way], Grid],
    notice: NoticeFn,
) -> Outcome:
    """`Grid.run` for the lengths of each way to read, one model after the other.

    window: as the model was trained. Raises UsageError where no variant can answer.
    """
    started = time.perf_counter()
    planned = []
    for way, lengths in ways.items():
        variants = answering(request.variants, way, window)
        left_out = [variant.name for variant in request.variants if variant not in variants]
        if left_out:
            notice(
                Notice(
                    f"{', '.join(left_out)}: cannot answer from what was read by selection, or "
                    f"read more than the window of {window:,} at a step; left out at "
                    f"{', '.join(f'{length:,}' for length in lengths)} tokens"
                )
            )
        if variants:
            planned.append((way, dataclasses.replace(request, lengths=lengths, variants=variants)))
    if not planned:
        raise UsageError(
            "none of the --policies can answer from what is read by selection: give tokenselect "
            f"with a budget that leaves room in the window of {window:,} tokens"
        )
    outcome = Outcome([])
    for way, part in planned:
        if request.limit_s is not None:
            spent = time.perf_counter() - started
            part = dataclasses.replace(part, limit_s=max(0.0, request.limit_s - spent))
        make_grid(way).run(part, outcome)  # and its model is let go
    outcome.check_found()
    return outcome
