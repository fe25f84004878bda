"""Stored results as PNG files: score by budget, accuracy by turn, and depth by length."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from longread.disk import disk_errors_with
from longread.errors import UsageError
from longread.evaluate import statistics
from longread.evaluate.cells import budget_order
from longread.evaluate.groups import REFERENCE, Group
from longread.evaluate.pictures import DepthPicture, depth_pictures

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_TURN = re.compile(r"turn \d+")
_WIDTH, _HEIGHT = 4.0, 3.4  # inches, of one panel
_IN_A_ROW = 4
_APART = 0.05  # between the points of two variants at one place, which are often equal


def write_plots(groups: Sequence[Group], folder: Path) -> list[Path]:
    """Draw what the groups have to show; returns the files.

    Raises UsageError where matplotlib is missing, StoreError where the folder cannot be written.
    """
    figures: dict[str, Figure] = {}
    for group in groups:
        name = f"{group.model}-{group.family}-{group.length}-seed{group.seed}"
        if any(budget for _, budget in map(_parts, group.variants)):
            figures[f"{name}-budgets"] = _by_budget(group)
        turns = [k for k in statistics.kinds(group.cells.values()) if _TURN.fullmatch(k)]
        if len(turns) > 1:
            figures[f"{name}-turns"] = _by_turn(group, turns)
    by_title: dict[str, list[DepthPicture]] = {}
    for picture in depth_pictures(groups):
        by_title.setdefault(picture.title.removesuffix(f": {picture.variant}"), []).append(picture)
    for title, pictures in by_title.items():
        figures[f"{title}-depths"] = _by_depth(title, pictures)
    paths = []
    with disk_errors_with(
        "write a plot to", folder, "free some space", "give a folder that you can write to"
    ):
        folder.mkdir(parents=True, exist_ok=True)
        for name, figure in figures.items():
            path = folder / f"{re.sub(r'[^A-Za-z0-9.]+', '-', name).strip('-')}.png"
            figure.savefig(path, dpi=120)
            paths.append(path)
    return paths


def _by_budget(group: Group) -> Figure:
    """The mean over the tasks at each budget, with the interval of the difference to dense."""
    figure, (axes,) = _panels(1)
    lines: dict[str, list[tuple[str, str]]] = {}
    for variant in group.variants:
        label, budget = _parts(variant)
        if budget:
            lines.setdefault(label, []).append((budget, variant))
    budgets = sorted({b for line in lines.values() for b, _ in line}, key=budget_order)
    for number, (label, line) in enumerate(lines.items()):
        places, means, below, above = [], [], [], []
        for budget, variant in line:
            mean = _points(group, variant)
            change = statistics.difference(group.pairs(variant))
            places.append(budgets.index(budget) + _APART * (number - (len(lines) - 1) / 2))
            means.append(mean)
            below.append(100 * (change.mean - change.low) if change else 0.0)
            above.append(100 * (change.high - change.mean) if change else 0.0)
        # Bounds that were rounded may cross the mean by less than a float's last digit.
        error = [[max(0.0, length) for length in side] for side in (below, above)]
        axes.errorbar(places, means, yerr=error, marker="o", capsize=3, label=label)
    for style, variant in zip(("--", ":", "-."), _references(group), strict=False):
        level = _points(group, variant)
        axes.axhline(level, color="black", linestyle=style, label=variant)
    axes.set_xticks(range(len(budgets)), budgets)
    axes.set_xlabel("budget")
    axes.set_ylabel("score")
    axes.set_title(group.title, fontsize=8)
    axes.legend(fontsize=7, loc="center left", bbox_to_anchor=(1.0, 0.5))
    return figure


def _references(group: Group) -> list[str]:
    """Dense, as the documents were read densely or otherwise."""
    return [v for v in group.variants if group.of_variant(v)[0].key.variant == REFERENCE]


def _by_turn(group: Group, turns: Sequence[str]) -> Figure:
    """Accuracy at each turn, a panel for each budget, with dense in all of them."""
    budgets = sorted({budget for _, budget in map(_parts, group.variants)} - {""}, key=budget_order)
    figure, panels = _panels(max(1, len(budgets)))
    for axes, budget in zip(panels, budgets or [""], strict=False):
        shown = [variant for variant in group.variants if _parts(variant)[1] in ("", budget)]
        for number, variant in enumerate(shown):
            means = [_points(group, variant, turn) for turn in turns]
            style = "k--" if variant in _references(group) else "o-"
            apart = _APART * (number - (len(shown) - 1) / 2)
            places = [place + apart for place in range(len(turns))]
            axes.plot(places, means, style, label=_parts(variant)[0])
        axes.set_xticks(range(len(turns)), turns)
        axes.set_ylim(-5, 105)
        axes.set_ylabel("score")
        axes.set_title(f"{group.title}\nbudget {budget}", fontsize=8)
        axes.legend(fontsize=7, loc="center left", bbox_to_anchor=(1.0, 0.5))
    return figure


def _by_depth(title: str, pictures: Sequence[DepthPicture]) -> Figure:
    """A panel for each variant: depth down, length across."""
    figure, panels = _panels(len(pictures))
    for axes, picture in zip(panels, pictures, strict=False):
        scores = [
            [float("nan") if score is None else 100 * score for score in row]
            for row in picture.scores
        ]
        axes.imshow(scores, vmin=0, vmax=100, cmap="RdYlGn", alpha=0.7, aspect="auto")
        axes.set_xticks(range(len(picture.lengths)), [f"{n:,}" for n in picture.lengths])
        axes.set_yticks(range(len(picture.depths)), list(picture.depths), fontsize=7)
        for y, row in enumerate(picture.scores):
            for x, score in enumerate(row):
                if score is not None:
                    axes.text(x, y, f"{100 * score:.0f}", ha="center", va="center", fontsize=7)
        axes.set_title(f"{title}\n{picture.variant}", fontsize=8)
    return figure


def _panels(number: int) -> tuple[Figure, list[Axes]]:
    """A figure of so many panels, in rows; no state of matplotlib's own is touched."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise UsageError(
            "plots need matplotlib: run `pip install 'longread[eval]'`, or leave --plots out"
        ) from None
    columns = min(number, _IN_A_ROW)
    rows = -(-number // columns)
    figure = Figure(figsize=(_WIDTH * max(columns, 1.5), _HEIGHT * rows), layout="constrained")
    panels: Any = figure.subplots(rows, columns, squeeze=False)
    flat = list(panels.flat)
    for axes in flat[number:]:
        axes.set_axis_off()
    return figure, flat[:number]


def _parts(variant: str) -> tuple[str, str]:
    """Label and budget of a variant's name."""
    label, _, budget = variant.partition(" ")
    return label, budget


def _points(group: Group, variant: str, kind: str | None = None) -> float:
    """A variant's mean in points; NaN, which is not drawn, where there are no samples."""
    mean = statistics.mean(group.of_variant(variant), kind)
    return float("nan") if mean is None else 100 * mean
