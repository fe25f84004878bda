"""Cells that are shown side by side: those of one family of tasks, model, length and seed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from longread.evaluate.cells import RESULTS_VERSION, Cell, CellKey, budget_order
from longread.evaluate.tasks import GROUPS, family_of
from longread.plain_text import count_text

REFERENCE = "dense"


@dataclass(frozen=True)
class Group:
    """Cells of one family, model, length and seed, side by side; none is without samples."""

    family: str  # tasks that have a mean together, or a task by itself
    model: str
    length: int
    seed: int
    results_version: int
    tasks: tuple[str, ...]
    variants: tuple[str, ...]  # by name, dense first
    cells: dict[tuple[str, str], Cell]  # by task and variant

    @property
    def title(self) -> str:
        """What the cells have in common."""
        length = count_text(self.length, "token")
        family = self.family
        if 1 < len(self.tasks) < len(GROUPS.get(family, ())):
            family = f"{len(self.tasks)} of {len(GROUPS[family])} tasks of {family}"
        old = self.results_version != RESULTS_VERSION
        version = f", results version {self.results_version}" if old else ""
        return f"{family} at {length}, {self.model}, seed {self.seed}{version}"

    def of_variant(self, variant: str) -> list[Cell]:
        """A variant's cells in the order of the tasks."""
        return [cell for task in self.tasks if (cell := self.cells.get((task, variant)))]

    def pairs(self, variant: str, task: str | None = None) -> list[tuple[Cell, Cell]]:
        """A variant's cells, of one task or all, beside dense's; none for dense itself.

        Dense's is the cell that was read in the same way, or else the one that was read densely.
        """
        return [
            (cell, reference)
            for cell in self.of_variant(variant)
            if (task is None or cell.key.task == task) and (reference := self._reference(cell.key))
        ]

    def _reference(self, key: CellKey) -> Cell | None:
        names = (replace(key, variant=REFERENCE, budget="").name, REFERENCE)
        found = (self.cells.get((key.task, name)) for name in names)
        return next((cell for cell in found if cell and key.variant != REFERENCE), None)


def groups(cells: Sequence[Cell]) -> list[Group]:
    """The groups; models, families and tasks in the order of the cells, lengths ascending."""
    found: dict[tuple[object, ...], list[Cell]] = {}
    for cell in cells:
        if cell.results:
            found.setdefault(_shared(cell.key), []).append(cell)
    models = list(dict.fromkeys(cell.key.model for cell in cells))
    families = list(dict.fromkeys(family_of(cell.key.task) for cell in cells))
    made = []
    for own in found.values():
        key = own[0].key
        labels = list(dict.fromkeys(cell.key.label for cell in own))
        ordered = sorted(
            {cell.key.name: cell.key for cell in own}.values(),
            key=lambda k: (k.name != REFERENCE, labels.index(k.label), budget_order(k.budget)),
        )
        made.append(
            Group(
                family_of(key.task),
                key.model,
                key.length,
                key.seed,
                key.results_version,
                tuple(dict.fromkeys(cell.key.task for cell in own)),
                tuple(key.name for key in ordered),
                {(cell.key.task, cell.key.name): cell for cell in own},
            )
        )
    return sorted(
        made,
        key=lambda group: (
            models.index(group.model),
            families.index(group.family),
            group.length,
            group.seed,
            group.results_version,
        ),
    )


def _shared(key: CellKey) -> tuple[object, ...]:
    identities = (key.results_version, key.model_identity, key.prompt_identity, key.dtype)
    return (family_of(key.task), key.model, *identities, key.length, key.seed)
