"""Stored results: what comes back, what one line may do, and who may write."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from longread.config import Settings
from longread.errors import StoreError
from longread.evaluate import tables
from longread.evaluate.cells import Cell, CellFolder, CellKey, Result, budget_order, read_cells
from longread.evaluate.groups import groups
from longread.evaluate.variants import parse_variants

RESULTS = Path(__file__).parent.parent / "docs/results"
KEY = CellKey(
    model="a/model b",
    model_identity="1f",
    prompt_identity="2e",
    dtype="bfloat16",
    task="vt",
    length=4096,
    seed=0,
    policy="tokenselect",
    variant="tokenselect:vote=none",
    fields=(("vote", "none"), ("sink_size", 4)),
    budget="5%",
)
RUN = {"command": "longread eval vt", "device": "cpu"}


def result(number: int, *scores: float, kind: str = "") -> Result:
    answers = tuple(f"answer {number}.{i}\n\u2028“x”" for i in range(len(scores)))
    return Result(number, scores, (kind,) * len(scores), answers, 10.5, 40)


def test_a_cell_comes_back_as_it_was(tmp_path: Path) -> None:
    folder = CellFolder(tmp_path)
    with folder.locked():
        folder.add(KEY, result(1, 0.25, 1.0, kind="depth 5%"), RUN)
        folder.add(KEY, result(0, 1.0), RUN)
        folder.add(replace(KEY, budget="10%"), result(0, 0.0), RUN)
        folder.add(replace(KEY, seed=1), result(0, 0.0), RUN)
        folder.add(replace(KEY, length=8192, task="qa/1"), result(0, 0.0), RUN)
    names = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.*"))
    assert names == ["a-model-b/4096/vt.jsonl", "a-model-b/8192/qa-1.jsonl"]
    lines = (tmp_path / names[0]).read_text(encoding="utf-8").split("\n")
    assert len(lines) == 4 and lines[-1] == ""
    record = json.loads(lines[0])
    assert (record["n"], record["mean"], record["fraction_read"]) == (2, 0.8125, 0.2625)
    assert [json.loads(line)["budget"] for line in lines[:2]] == ["5%", "10%"]
    cells = {cell.key: cell for cell in read_cells([tmp_path])}
    assert len(cells) == 4
    assert cells[KEY].results == {
        0: result(0, 1.0),
        1: result(1, 0.25, 1.0, kind="depth 5%"),
    }
    assert cells[KEY].runs == [RUN]
    assert CellFolder(tmp_path).cell(KEY).results == cells[KEY].results


def test_cells_of_several_folders_come_together(tmp_path: Path) -> None:
    for number in (0, 1):
        folder = CellFolder(tmp_path / str(number))
        with folder.locked():
            folder.add(KEY, result(number, 1.0), RUN | {"device": f"cuda {number}"})
    (cell,) = read_cells([tmp_path / "0", tmp_path / "1"])
    assert sorted(cell.results) == [0, 1]
    assert [run["device"] for run in cell.runs] == ["cuda 0", "cuda 1"]
    assert len(read_cells([tmp_path])) == 1


def test_what_was_added_is_kept_where_the_run_fails(tmp_path: Path) -> None:
    folder = CellFolder(tmp_path)
    with pytest.raises(KeyboardInterrupt), folder.locked():
        folder.add(KEY, result(0, 1.0), RUN)
        raise KeyboardInterrupt
    assert len(read_cells([tmp_path])) == 1
    with CellFolder(tmp_path).locked():
        pass


def test_one_run_at_a_time_writes_to_a_folder(tmp_path: Path) -> None:
    with CellFolder(tmp_path).locked():
        with pytest.raises(StoreError, match="another run writes to"):
            with CellFolder(tmp_path).locked():
                pass
    with CellFolder(tmp_path).locked():
        pass


@pytest.mark.parametrize("line", ("{", "[]", '{"format_version": 99}', "\x00", '{"n": 1}'))
def test_other_files_are_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "a-model-b" / "4096" / "vt.jsonl"
    path.parent.mkdir(parents=True)
    path.write_text(line)
    with pytest.raises(StoreError, match="vt.jsonl holds no results that this version reads"):
        read_cells([tmp_path])
    with pytest.raises(StoreError, match="move it away"):
        CellFolder(tmp_path).cell(KEY)


def test_a_folder_without_results_is_named(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="holds no results"):
        read_cells([tmp_path])
    with pytest.raises(StoreError, match="missing is not there: give the --out folder"):
        read_cells([tmp_path / "missing"])
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="file is a file, not a folder"):
        read_cells([tmp_path / "file"])


def test_how_a_document_was_read_tells_cells_apart(tmp_path: Path) -> None:
    folder = CellFolder(tmp_path)
    selected = replace(KEY, context="select")
    with folder.locked():
        folder.add(KEY, result(0, 1.0), RUN)
        folder.add(selected, result(0, 0.0), RUN)
    cells = {cell.key: cell.mean for cell in read_cells([tmp_path])}
    assert cells == {KEY: 1.0, selected: 0.0}
    assert selected.name == "tokenselect:vote=none[select] 5%"
    (group,) = groups(read_cells([tmp_path]))
    assert group.variants == ("tokenselect:vote=none 5%", "tokenselect:vote=none[select] 5%")
    old = json.loads(Cell(KEY, [RUN], {0: result(0, 1.0)}).to_json())
    del old["context"]
    assert Cell.from_json(json.dumps(old)).key == KEY


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="--out"):
        with CellFolder(tmp_path / "file" / "x").locked():
            pass


def test_budgets_have_an_order() -> None:
    budgets = ["", "20%", "2.5%", "512", "5%", "64", "100%"]
    assert sorted(budgets, key=budget_order) == ["64", "512", "2.5%", "5%", "20%", "100%", ""]


def test_a_cell_without_steps_reads_all() -> None:
    cell = Cell(KEY, [], {0: replace(result(0, 1.0), rows_read=0.0, rows_cached=0)})
    assert (cell.fraction_read, cell.mean) == (1.0, 1.0)


def test_a_run_goes_on_from_the_results_of_the_docs() -> None:
    """A cell that a run would not find again, by its file or its fields, would be made anew."""
    stored, folder = read_cells([RESULTS]), CellFolder(RESULTS)
    for cell in stored:
        assert folder.cell(cell.key).results == cell.results, cell.key
        (variant,) = parse_variants(cell.key.variant, cell.key.budget, Settings())
        key = cell.key
        assert (variant.label, variant.budget) == (key.variant, key.budget)
        assert (variant.policy, variant.fields) == (key.policy, key.fields)
        assert cell.runs
        for run in cell.runs:
            assert run["command"].startswith("longread eval ") and "/" not in run["command"]
    assert len({cell.key for cell in stored}) == len(stored) > 100


def test_further_figures_are_stored_and_shown(tmp_path: Path) -> None:
    folder = CellFolder(tmp_path)
    with folder.locked():
        for number, share in enumerate((0.5, 1.0)):
            figures = (("part 1 of 5", share),)
            folder.add(KEY, replace(result(number, 1.0), measures=figures), RUN)
    (cell,) = read_cells([tmp_path])
    assert cell.results[1].measures == (("part 1 of 5", 1.0),)
    (group,) = groups([cell])
    table = tables.measure_table(group, "vt")
    assert table is not None and table.rows == (("part 1 of 5", "75.0 (2)"),)
