"""What a needle's depth and the length do to the score, as a picture made of characters.

One picture for each variant: a row a depth, a column a length, a field the mean score in percent,
with a colour from red to green where the terminal has colours. plots.py draws the same as PNG.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from longread.evaluate import statistics
from longread.evaluate.groups import Group

if TYPE_CHECKING:
    from rich.text import Text

_FIELD = 5  # characters
_DEPTH = re.compile(r"depth (\d+(?:\.\d+)?)%")


@dataclass(frozen=True)
class DepthPicture:
    """Mean scores from 0 to 1, None where there is no sample: a row a depth, a value a length."""

    title: str
    variant: str
    lengths: tuple[int, ...]
    depths: tuple[str, ...]
    scores: tuple[tuple[float | None, ...], ...]


def depth_pictures(groups: Sequence[Group]) -> list[DepthPicture]:
    """A picture for each variant of each family whose questions come by depth ("depth 35%")."""
    apart: dict[tuple[str, str, int, int], list[Group]] = {}
    for group in groups:
        shared = (group.family, group.model, group.seed, group.results_version)
        apart.setdefault(shared, []).append(group)
    pictures = []
    for (family, model, seed, _), own in apart.items():
        depths = [
            kind
            for kind in statistics.kinds(cell for group in own for cell in group.cells.values())
            if _DEPTH.fullmatch(kind)
        ]
        variants = dict.fromkeys(variant for group in own for variant in group.variants)
        for variant in variants if depths else ():
            pictures.append(
                DepthPicture(
                    f"{family}, {model}, seed {seed}: {variant}",
                    variant,
                    tuple(group.length for group in own),
                    tuple(depths),
                    tuple(
                        tuple(statistics.mean(group.of_variant(variant), depth) for group in own)
                        for depth in depths
                    ),
                )
            )
    return pictures


def plain_lines(picture: DepthPicture) -> list[str]:
    """The picture in plain characters."""
    return [line.plain for line in coloured_lines(picture)]


def coloured_lines(picture: DepthPicture) -> list[Text]:
    """The picture for a console of rich, each field on its colour."""
    from rich.text import Text

    margin = max(map(len, picture.depths)) + 1
    widths = [max(_FIELD, len(f"{length:,}") + 1) for length in picture.lengths]
    lines = [Text(picture.title, style="bold")]
    for depth, scores in zip(picture.depths, picture.scores, strict=True):
        line = Text(depth.ljust(margin))
        for score, width in zip(scores, widths, strict=True):
            shown = "-" if score is None else f"{100 * score:.0f}"
            line.append(
                shown.rjust(width), style="" if score is None else f"black on {_hex(score)}"
            )
        lines.append(line)
    heads = (f"{n:,}".rjust(width) for n, width in zip(picture.lengths, widths, strict=True))
    lines.append(Text("tokens".ljust(margin) + "".join(heads)))
    return lines


def _hex(score: float) -> str:
    """Red at 0, yellow in the middle, green at 1."""
    red, green = min(1.0, 2 - 2 * score), min(1.0, 2 * score)
    return f"#{round(90 + 140 * red):02x}{round(90 + 140 * green):02x}5a"
