"""What `longread eval sources` found: stored as it comes, and as tables.

Owns the file, a line of JSON a sample under a line that says what was measured, and the figures:
how often each method has the right page first, and how well an answer without support is told.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from longread.atomic import write_atomic
from longread.disk import disk_errors_with
from longread.errors import StoreError
from longread.evaluate.sources import METHOD_NAMES, SUPPORT, Sourced
from longread.evaluate.tables import Table
from longread.evidence import least_support

RESULTS_VERSION = 1  # to be raised whenever the same key gives other results
_SUFFIX = ".sources"
FIGURES = ("page@1", "page@3", "page@5", "quote@1")


class SourceFile:
    """The samples of one model, policy, length and seed."""

    def __init__(self, folder: Path, key: dict[str, Any]) -> None:
        """key: `model`, `length`, `policy`, `seed`, which name the file, and what else counts.

        Raises StoreError where the file holds the samples of something else.
        """
        name = "-".join(str(key[part]) for part in ("model", "length", "policy", "seed"))
        self._path = path = folder / (re.sub(r"[^\w.-]+", "-", name) + _SUFFIX)
        self._key = {"results_version": RESULTS_VERSION, **key}
        self.samples: dict[int, list[Sourced]] = {}
        with _disk_errors("read", path):
            try:
                lines = path.read_text(encoding="utf-8").splitlines()
            except FileNotFoundError:
                return
        try:
            records = [json.loads(line) for line in lines]
            if records[0] != self._key:
                raise StoreError(
                    f"{path} holds what another model or version found: give another --out"
                )
            for record in records[1:]:
                self.samples[record["number"]] = [
                    Sourced(**{**item, "places": _places(item["places"])})
                    for item in record["results"]
                ]
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise StoreError(
                f"{path} holds no results that this version reads ({error!r}): move it away"
            ) from error

    def add(self, number: int, results: Sequence[Sourced]) -> None:
        """Take a sample in and write the file. Raises StoreError."""
        self.samples[number] = list(results)
        records: list[dict[str, Any]] = [self._key]
        for place, found in sorted(self.samples.items()):
            records.append({"number": place, "results": [dataclasses.asdict(one) for one in found]})
        with _disk_errors("create", self._path.parent):
            self._path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(
            self._path, ["".join(f"{json.dumps(record)}\n" for record in records).encode()]
        )


def place_table(title: str, results: Sequence[Sourced]) -> Table:
    """How often each method has the gold page and passage among its first, in percent."""
    answered = [one for one in results if one.kind == "answerable"]
    right = [one for one in answered if one.right >= 1.0]
    head = ["ranked by", *(f"{group}:{name}" for group in ("right", "all") for name in FIGURES)]
    rows = tuple(
        (name, *map(_percent, (*place_figures(right, name), *place_figures(answered, name))))
        for name in METHOD_NAMES
    )
    title = (
        f"{title}: gold page among the first sources, gold passage the first, % of {len(right)} "
        f"questions answered right and of all {len(answered)}"
    )
    return Table(title, tuple(head), rows)


def place_figures(results: Sequence[Sourced], method: str) -> tuple[float | None, ...]:
    """FIGURES of a method, 0 to 1; None where there is no result."""
    places = [one.places[method] for one in results]
    if not places:
        return (None,) * len(FIGURES)
    pages = [sum(0 < page <= most for page, _ in places) / len(places) for most in (1, 3, 5)]
    return (*pages, sum(quote == 1 for _, quote in places) / len(places))


def support_table(title: str, results: Sequence[Sourced], length: int) -> Table:
    """How well each sign tells, in percent, what texts of `length` tokens do not answer."""
    rows = []
    for name in results[0].signs if results else ():
        figures = support_figures(results, name, length)
        rows.append((name, *(_shown(key, value) for key, value in figures.items())))
    num = sum(one.kind != "answerable" for one in results)
    head = ("an answer is marked by", *(support_figures((), "", length).keys()))
    title = f"{title}: {num} answers to what the text does not answer, told by a low sign, %"
    return Table(title, head, tuple(rows))


def support_figures(results: Sequence[Sourced], sign: str, length: int) -> dict[str, float | None]:
    """Area under the curve, then shares at a threshold: `least_support`, or for others the best.

    Told: of questions that the text does not answer (recall). Precision: of all that are marked,
    wrong answers to the others counting as marked in vain. The best is that of the greatest F1 on
    these very results, so it flatters.
    """
    groups: dict[str, list[float]] = {"answerable": [], "right": [], "without": []}
    for one in results:
        value = one.signs[sign]
        if one.kind != "answerable":
            groups["without"].append(value)
            continue
        groups["answerable"].append(value)
        if one.right >= 1.0:
            groups["right"].append(value)
    answerable, right, without = groups.values()
    least = least_support(length) if sign == SUPPORT else _best_threshold(answerable, without)
    told, in_vain = (sum(v < least for v in found) for found in (without, answerable))
    return {
        "AUC": _area(answerable, without),
        "below": least,
        "told": _share(without, least),
        "precision": told / (told + in_vain) if told + in_vain else None,
        "marked of right": _share(right, least),
    }


def _area(more: Sequence[float], less: Sequence[float]) -> float | None:
    """How often one of `more` is over one of `less` (Mann-Whitney), ties counting half."""
    pairs = [(a > b) + 0.5 * (a == b) for a in more for b in less]
    return sum(pairs) / len(pairs) if pairs else None


def _best_threshold(answerable: Sequence[float], without: Sequence[float]) -> float:
    def f1(least: float) -> float:
        told = sum(value < least for value in without)
        marked = told + sum(value < least for value in answerable)
        return 2 * told / max(marked + len(without), 1)

    return max(sorted({*answerable, *without}), key=f1, default=0.0)


def _share(values: Sequence[float], least: float) -> float | None:
    return sum(value < least for value in values) / len(values) if values else None


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}".rstrip("%")


def _shown(name: str, value: float | None) -> str:
    if value is None or name not in ("AUC", "below"):
        return _percent(value)
    return f"{value:.2f}" if name == "AUC" else f"{value:.3g}"


def _places(record: dict[str, list[int]]) -> dict[str, tuple[int, int]]:
    return {name: (page, quote) for name, (page, quote) in record.items()}


def summary(results: Sequence[Sourced], length: int) -> dict[str, Any]:
    """All figures, for the last line in JSON."""
    answered = [one for one in results if one.kind == "answerable"]
    right = [one for one in answered if one.right >= 1.0]
    signs = tuple(results[0].signs) if results else ()
    kinds = [one.kind for one in results]
    return {
        "questions": {kind: kinds.count(kind) for kind in dict.fromkeys(kinds)},
        "right": len(right),
        "figures": FIGURES,
        "methods": {
            name: {
                group: [None if value is None else round(value, 4) for value in figures]
                for group, figures in (
                    ("right", place_figures(right, name)),
                    ("all", place_figures(answered, name)),
                )
            }
            for name in METHOD_NAMES
        },
        "support": {sign: support_figures(results, sign, length) for sign in signs},
    }


def _disk_errors(action: str, path: Path) -> AbstractContextManager[None]:
    return disk_errors_with(action, path, if_full="free some space", otherwise="give another --out")
