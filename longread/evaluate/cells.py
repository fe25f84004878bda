"""Results on disk: a cell for each model, task, length, policy with its fields, budget, seed and
way to read.

A folder holds a file for each model, length and task, MODEL/LENGTH/TASK.jsonl, with a cell a line:
its identity, what ran it, its mean, and its samples. Files are written whole, every few seconds: a
killed run loses the samples since then, and a later run adds only what is missing.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from filelock import FileLock, Timeout

from longread.atomic import write_atomic
from longread.disk import disk_errors_with
from longread.errors import StoreError

FORMAT_VERSION = 1
# To be raised whenever the same names give other results: a policy, the index, a task, a prompt,
# how documents are read past the window.
RESULTS_VERSION = 2
_SUFFIX = ".jsonl"
_LOCK = ".lock"
_DENSE = "dense"


@dataclass(frozen=True)
class CellKey:
    """What a cell is. model_identity: of the weights; prompt_identity: of the chat format.

    variant: the policy and its fields as a Variant's label; length: tokens of prompt and answer;
    context: how the document was read, densely or otherwise.
    Cells of another results_version are other cells.
    """

    model: str
    model_identity: str
    prompt_identity: str
    dtype: str
    task: str
    length: int
    seed: int
    policy: str
    variant: str
    fields: tuple[tuple[str, Any], ...]
    budget: str
    results_version: int = RESULTS_VERSION
    context: str = _DENSE

    @property
    def label(self) -> str:
        """The variant, and how the document was read where that is not densely."""
        return self.variant if self.context == _DENSE else f"{self.variant}[{self.context}]"

    @property
    def name(self) -> str:
        """Label and budget, as tables show them."""
        return f"{self.label} {self.budget}".rstrip()


class Place(NamedTuple):
    """A place in an answer: the tokens before it, and its line, counted from 1."""

    token: int
    line: int


@dataclass(frozen=True)
class Result:
    """One sample of a cell: a score, an answer and a kind for each question.

    Rows are those of one KV head in the mean over layers, summed over the steps of all answers.
    places: where each answer first differs from dense's, None where it does not; empty where that
    was not looked for (divergence.py).
    """

    number: int
    scores: tuple[float, ...]
    kinds: tuple[str, ...]
    answers: tuple[str, ...]
    rows_read: float
    rows_cached: int
    measures: tuple[tuple[str, float], ...] = ()
    places: tuple[Place | None, ...] = ()

    @property
    def score(self) -> float:
        """Mean over the questions."""
        return sum(self.scores) / len(self.scores)


@dataclass
class Cell:
    """Results by sample number, and the runs that made them: command, versions, device."""

    key: CellKey
    runs: list[dict[str, str]] = field(default_factory=list)
    results: dict[int, Result] = field(default_factory=dict)

    @property
    def mean(self) -> float:
        """Mean score of the samples, 0 to 1."""
        return sum(result.score for result in self.results.values()) / len(self.results)

    @property
    def fraction_read(self) -> float:
        """Rows read over rows cached; 1 where no answer took a step."""
        cached = sum(result.rows_cached for result in self.results.values())
        return sum(result.rows_read for result in self.results.values()) / cached if cached else 1.0

    def to_json(self) -> str:
        """One line."""
        samples = [
            {
                "number": result.number,
                "scores": [round(score, 6) for score in result.scores],
                **({"kinds": result.kinds} if any(result.kinds) else {}),
                "answers": result.answers,
                "rows": [round(result.rows_read, 1), result.rows_cached],
                **({"measures": dict(result.measures)} if result.measures else {}),
                **({"differs": result.places} if result.places else {}),
            }
            for _, result in sorted(self.results.items())
        ]
        key = {name: getattr(self.key, name) for name in CellKey.__dataclass_fields__}
        record = {
            "format_version": FORMAT_VERSION,
            **key,
            "fields": dict(self.key.fields),
            "n": len(samples),
            "mean": round(self.mean, 6),
            "fraction_read": round(self.fraction_read, 6),
            "runs": self.runs,
            "samples": samples,
        }
        return json.dumps(record, ensure_ascii=False)

    @classmethod
    def from_json(cls, line: str) -> Cell:
        """Raises ValueError, KeyError or TypeError for what `to_json` never wrote."""
        record = json.loads(line)
        if record["format_version"] != FORMAT_VERSION:
            raise ValueError("another version of longread wrote it")
        record.setdefault("results_version", 1)
        record.setdefault("context", _DENSE)
        names = {name: record[name] for name in CellKey.__dataclass_fields__}
        key = CellKey(**{**names, "fields": tuple(record["fields"].items())})
        results = {}
        for sample in record["samples"]:
            scores = tuple(sample["scores"])
            rows_read, rows_cached = sample["rows"]
            results[sample["number"]] = Result(
                sample["number"],
                scores,
                tuple(sample.get("kinds", [""] * len(scores))),
                tuple(sample["answers"]),
                rows_read,
                rows_cached,
                tuple(sample.get("measures", {}).items()),
                tuple(place and Place(*place) for place in sample.get("differs", [])),
            )
        return cls(key, list(record["runs"]), results)


class CellFolder:
    """The cells of a folder; one process at a time writes to it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files: dict[Path, dict[CellKey, Cell]] = {}
        self._changed: set[Path] = set()

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keep other runs out of the folder inside the block, and write what is left at its end."""
        with _disk_errors("create", self._folder):
            self._folder.mkdir(parents=True, exist_ok=True)
            lock = FileLock(self._folder / _LOCK)
            try:
                lock.acquire(timeout=0)
            except Timeout:
                raise StoreError(
                    f"another run writes to {self._folder}: wait for it, or give another --out"
                ) from None
        try:
            yield
        finally:
            try:
                self.write()
            finally:
                (self._folder / _LOCK).unlink(missing_ok=True)
                lock.release()

    def cell(self, key: CellKey) -> Cell:
        """The stored cell, or a new one."""
        cells = self._load(self._path(key))
        return cells.setdefault(key, Cell(key))

    def add(self, key: CellKey, result: Result, run: dict[str, str]) -> None:
        """Take a result in; `write` makes it last."""
        cell = self.cell(key)
        cell.results[result.number] = result
        if run not in cell.runs:
            cell.runs.append(run)
        self.changed(key)

    def changed(self, key: CellKey) -> None:
        """Have `write` write a cell that was changed in its place."""
        self._changed.add(self._path(key))

    def write(self) -> None:
        """Write the files whose cells changed. Raises StoreError."""
        for path in sorted(self._changed):
            cells = sorted(
                (cell for cell in self._files[path].values() if cell.results),
                key=lambda cell: (
                    cell.key.results_version,
                    cell.key.seed,
                    cell.key.label,
                    budget_order(cell.key.budget),
                ),
            )
            with _disk_errors("create", path.parent):
                path.parent.mkdir(parents=True, exist_ok=True)
                write_atomic(path, ["".join(f"{cell.to_json()}\n" for cell in cells).encode()])
        self._changed.clear()

    def _path(self, key: CellKey) -> Path:
        return self._folder / _safe(key.model) / str(key.length) / f"{_safe(key.task)}{_SUFFIX}"

    def _load(self, path: Path) -> dict[CellKey, Cell]:
        if path not in self._files:
            self._files[path] = {cell.key: cell for cell in _cells_of(path)}
        return self._files[path]


def read_cells(folders: Iterable[Path]) -> list[Cell]:
    """Every cell under the folders, of many runs; samples of the same cell come together.

    Raises StoreError for a folder that is not there, cannot be read or holds none.
    """
    found: dict[CellKey, Cell] = {}
    for folder in folders:
        if not folder.is_dir():
            what = "is a file, not a folder" if folder.exists() else "is not there"
            raise StoreError(
                f"{folder} {what}: give the --out folder of an earlier `longread eval`"
            )
        paths = sorted(p for p in folder.rglob(f"*{_SUFFIX}") if not p.name.startswith("."))
        if not paths:
            raise StoreError(f"{folder} holds no results: `longread eval TASKS --out` makes them")
        for path in paths:
            for cell in _cells_of(path):
                known = found.setdefault(cell.key, Cell(cell.key))
                known.results.update(cell.results)
                known.runs.extend(run for run in cell.runs if run not in known.runs)
    return list(found.values())


def budget_order(budget: str) -> tuple[int, float]:
    """Sorts budgets: rows before shares, the smallest first, and no budget last."""
    if not budget:
        return 2, 0.0
    return int(budget.endswith("%")), float(budget.rstrip("%"))


def _cells_of(path: Path) -> Sequence[Cell]:
    with _disk_errors("read", path):
        try:
            text = path.read_text(encoding="utf-8")
        except FileNotFoundError:
            return []
    try:
        return [Cell.from_json(line) for line in text.split("\n") if line]
    except (ValueError, KeyError, TypeError) as error:
        raise StoreError(
            f"{path} holds no results that this version reads ({error!r}): move it away"
        ) from error


def _safe(name: str) -> str:
    return re.sub(r"[^\w.-]+", "-", name).strip(".-") or "unnamed"


def _disk_errors(action: str, path: Path) -> AbstractContextManager[None]:
    return disk_errors_with(
        action,
        path,
        if_full="free some space and run the same command again: what is stored stays",
        otherwise="give a folder that you can write to with --out",
    )
