"""Cells as tables: scores in points with their n, and differences to dense with their intervals."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from longread.evaluate import divergence, statistics
from longread.evaluate.cells import Cell
from longread.evaluate.groups import REFERENCE, Group
from longread.evaluate.statistics import Interval

_NONE = "-"


@dataclass(frozen=True)
class Table:
    """Rows of text under a title."""

    title: str
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    def transposed(self) -> Table:
        """The same with rows as columns."""
        columns = tuple(zip(self.head, *self.rows, strict=True))
        return Table(self.title, columns[0], columns[1:])

    def markdown(self) -> str:
        """The table in Markdown, under a heading."""
        lines = [self.head, ["---"] * len(self.head), *self.rows]
        escaped = ["| " + " | ".join(c.replace("|", "\\|") for c in line) + " |" for line in lines]
        return "\n".join([f"### {self.title}", "", *escaped, ""])


def score_table(group: Group) -> Table:
    """Tasks under each variant, their mean, its difference to dense, and the rows read."""
    rows = [
        (task, *(_score(group.cells.get((task, name))) for name in group.variants))
        for task in group.tasks
    ]
    if len(group.tasks) > 1:
        rows.append(("mean", *(_mean(group, name) for name in group.variants)))
    changes = (statistics.difference(group.pairs(name)) for name in group.variants)
    rows.append(("difference", *map(_change, changes)))
    read = (_fraction_read(group.of_variant(name)) for name in group.variants)
    rows.append(("rows read", *read))
    return Table(f"{group.title}: scores (n)", ("task", *group.variants), tuple(rows))


def difference_table(group: Group) -> Table | None:
    """Differences to dense task by task; None where there is nothing to compare, or one task."""
    if len(group.tasks) == 1:
        return None

    def change(task: str, variant: str) -> str:
        return _change(statistics.difference(group.pairs(variant, task)))

    title = f"{group.title}: difference to {REFERENCE} [95 % interval]"
    return _others(title, "task", group, group.tasks, change)


def kind_tables(group: Group, task: str) -> list[Table]:
    """Scores and differences of a task's kinds of question; none where they are all of one kind."""
    kinds = statistics.kinds(cell for (own, _), cell in group.cells.items() if own == task)
    if len(kinds) < 2:
        return []
    rows = tuple(
        (kind, *(_score(group.cells.get((task, name)), kind) for name in group.variants))
        for kind in kinds
    )
    title = group.title if len(group.tasks) == 1 else f"{group.title}: {task}"
    tables = [Table(f"{title}: scores (n)", ("kind", *group.variants), rows)]

    def change(kind: str, variant: str) -> str:
        return _change(statistics.difference(group.pairs(variant, task), kind))

    title = f"{title}: difference to {REFERENCE} [95 % interval]"
    return tables + [table for table in [_others(title, "kind", group, kinds, change)] if table]


def measure_table(group: Group, task: str) -> Table | None:
    """Further figures of a task's answers under each variant; None where it has none."""
    found = _measures([cell for (own, _), cell in group.cells.items() if own == task])
    if not found:
        return None
    rows = tuple(
        (
            name,
            *(
                _points(sum(values) / len(values), len(values)) if values else _NONE
                for values in (of_variants.get(variant, []) for variant in group.variants)
            ),
        )
        for name, of_variants in found.items()
    )
    title = group.title if len(group.tasks) == 1 else f"{group.title}: {task}"
    return Table(f"{title}: further figures (n)", ("measure", *group.variants), rows)


def _measures(cells: Sequence[Cell]) -> dict[str, dict[str, list[float]]]:
    """Each further figure of each variant, a value a sample."""
    found: dict[str, dict[str, list[float]]] = {}
    for cell in cells:
        for result in cell.results.values():
            for name, value in result.measures:
                found.setdefault(name, {}).setdefault(cell.key.name, []).append(value)
    return found


def divergence_table(group: Group, task: str) -> Table | None:
    """Where a task's answers leave dense's; None where that was not looked for."""
    cells = {name: group.cells.get((task, name)) for name in group.variants}
    compared = {
        name: cell
        for name, cell in cells.items()
        if cell and any(result.places for result in cell.results.values())
    }
    if not compared:
        return None
    title = group.title if len(group.tasks) == 1 else f"{group.title}: {task}"
    rows = divergence.rows(list(compared.values()))
    return Table(f"{title}: where answers leave {REFERENCE}'s", ("", *compared), tuple(rows))


def _others(
    title: str,
    corner: str,
    group: Group,
    names: Sequence[str],
    change: Callable[[str, str], str],
) -> Table | None:
    variants = [name for name in group.variants if group.pairs(name)]
    if not variants:
        return None
    rows = tuple((name, *(change(name, variant) for variant in variants)) for name in names)
    return Table(title, (corner, *variants), rows)


def tables(group: Group) -> list[Table]:
    """All tables of a group."""
    found = [score_table(group)]
    differences = difference_table(group)
    if differences is not None:
        found.append(differences)
    for task in group.tasks:
        further = (measure_table(group, task), divergence_table(group, task))
        found += [*kind_tables(group, task), *(table for table in further if table)]
    return found


def origins(group: Group) -> list[str]:
    """How the cells were made: each command with its device and versions."""
    runs = [run for variant in group.variants for c in group.of_variant(variant) for run in c.runs]
    return list(
        dict.fromkeys(
            f"`{run['command']}` ({run['device']}, longread {run['longread']}, "
            f"torch {run['torch']}, Python {run['python']})"
            for run in runs
        )
    )


def summary(group: Group) -> dict[str, object]:
    """The figures of a group for JSON; scores from 0 to 1."""

    def figures(cell: Cell, kind: str | None = None) -> dict[str, object]:
        pairs = group.pairs(cell.key.name, cell.key.task)
        return {
            "n": len(statistics.scores(cell, kind)),
            "mean": statistics.mean([cell], kind),
            "difference": _record(statistics.difference(pairs, kind)),
        }

    def of_task(cell: Cell) -> dict[str, object]:
        kinds = statistics.kinds([cell])
        apart = {"kinds": {kind: figures(cell, kind) for kind in kinds}} if kinds else {}
        references = [other for _, other in group.pairs(cell.key.name, cell.key.task)]
        places = divergence.records(cell, *references)
        further: dict[str, object] = {"first_differences": places} if places else {}
        measures = _measures([cell])
        if measures:
            further["measures"] = {
                name: {"n": len(values), "mean": sum(values) / len(values)}
                for name, by_variant in measures.items()
                for values in by_variant.values()
            }
        return {**figures(cell), "fraction_read": cell.fraction_read, **apart, **further}

    return {
        "family": group.family,
        "model": group.model,
        "length": group.length,
        "seed": group.seed,
        "variants": [
            {
                "variant": variant,
                "mean": statistics.mean(group.of_variant(variant)),
                "difference": _record(statistics.difference(group.pairs(variant))),
                "tasks": {cell.key.task: of_task(cell) for cell in group.of_variant(variant)},
            }
            for variant in group.variants
        ],
    }


def _record(interval: Interval | None) -> dict[str, float] | None:
    if interval is None:
        return None
    return {
        "mean": interval.mean,
        "low": interval.low,
        "high": interval.high,
        "n": interval.num,
    }


def _score(cell: Cell | None, kind: str | None = None) -> str:
    if cell is None:
        return _NONE
    return _points(statistics.mean([cell], kind), len(statistics.scores(cell, kind)))


def _points(mean: float | None, num: int) -> str:
    return _NONE if mean is None else f"{100 * mean:.1f} ({num})"


def _mean(group: Group, variant: str) -> str:
    cells = group.of_variant(variant)
    text = _points(statistics.mean(cells), sum(len(cell.results) for cell in cells))
    missing = len(cells) < len(group.tasks)
    return f"{text}, {len(cells)} of {len(group.tasks)} tasks" if missing else text


def _change(interval: Interval | None) -> str:
    if interval is None:
        return _NONE
    mean, low, high = (100 * value for value in (interval.mean, interval.low, interval.high))
    return f"{_signed(mean)} [{_signed(low)}, {_signed(high)}]"


def _signed(value: float) -> str:
    return f"{value:+.1f}" if round(value, 1) else "0.0"


def _fraction_read(cells: Sequence[Cell]) -> str:
    cached = sum(result.rows_cached for cell in cells for result in cell.results.values())
    read = sum(result.rows_read for cell in cells for result in cell.results.values())
    return f"{100 * read / cached:.1f} %" if cached else _NONE
