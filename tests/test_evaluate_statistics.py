"""Means, paired differences with bootstrap intervals, and the tables that show them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from test_cells import KEY, result

from longread.evaluate import plots, statistics, tables
from longread.evaluate.cells import Cell
from longread.evaluate.groups import groups
from longread.evaluate.pictures import depth_pictures


def _cell(
    variant: str, scores: dict[int, Sequence[float]], task: str = "vt", kind: str = ""
) -> Cell:
    label, _, budget = variant.partition(" ")
    key = replace(KEY, variant=label, budget=budget, policy=label.split(":")[0], task=task)
    results = {n: result(n, *values, kind=kind) for n, values in scores.items()}
    return Cell(key, [], results)


def test_the_interval_covers_as_often_as_it_says() -> None:
    random = np.random.default_rng(1)
    true_mean, covered = 0.1, 0
    for _ in range(200):
        groups = [random.normal(true_mean, scale, 40) for scale in (0.1, 0.5)]
        interval = statistics.bootstrap(groups)
        covered += interval.low <= true_mean <= interval.high
    assert 0.90 <= covered / 200 <= 0.99


def test_the_interval_is_that_of_the_normal_distribution_for_many_samples() -> None:
    group = np.random.default_rng(2).normal(0.0, 1.0, 1000)
    interval = statistics.bootstrap([group])
    assert interval.mean == pytest.approx(group.mean())
    half = 1.96 * group.std() / 1000**0.5
    assert interval.low == pytest.approx(group.mean() - half, abs=0.005)
    assert interval.high == pytest.approx(group.mean() + half, abs=0.005)
    assert statistics.bootstrap([group]) == interval


def test_a_task_counts_once_however_many_samples_it_has() -> None:
    interval = statistics.bootstrap([np.zeros(1000), np.ones(10)])
    assert (interval.mean, interval.num) == (0.5, 1010)


@pytest.mark.parametrize("num", (1, 7, 20, 100))
@pytest.mark.parametrize("value", (-1.0, 0.0, 0.5))
def test_equal_differences_leave_room_for_what_was_not_seen(num: int, value: float) -> None:
    unseen = 1 - 0.05 ** (1 / num)
    interval = statistics.bootstrap([np.full(num, value)])
    assert interval.mean == value
    assert interval.low == pytest.approx(value - unseen * (1 + value))
    assert interval.high == pytest.approx(value + unseen * (1 - value))


def test_tasks_of_equal_differences_know_more_together() -> None:
    interval = statistics.bootstrap([np.zeros(20)] * 13)
    assert interval.high == -interval.low == pytest.approx(1 - 0.05 ** (1 / 260))
    # Beside a task whose samples differ, the equal ones widen its share of the interval.
    apart = statistics.bootstrap([np.array([0.0, 1.0, 0.0, 0.0])])
    interval = statistics.bootstrap([np.array([0.0, 1.0, 0.0, 0.0]), np.zeros(9)])
    assert interval.low == pytest.approx((apart.low - (1 - 0.05 ** (1 / 9))) / 2)
    assert interval.high == pytest.approx((apart.high + (1 - 0.05 ** (1 / 9))) / 2)


def test_no_shares_that_could_be_missed_sum_to_more_than_the_bound() -> None:
    nums, weights = np.array([3, 10, 40]), np.array([0.4, 1.0, 2.0])
    bound = statistics._unseen(nums.tolist(), weights.tolist())
    # Any shares, scaled in their logarithms to be missed in exactly 5 of 100 evaluations.
    logs = np.random.default_rng(0).dirichlet(np.ones(3), 20_000) * np.log(0.05) / nums
    sums = -np.expm1(logs) @ weights
    assert bound * 0.99 < sums.max() <= bound + 1e-9
    # A task that can grow no further adds nothing.
    alone = statistics._unseen([10], [1.0])
    assert statistics._unseen([10, 5], [1.0, 0.0]) == pytest.approx(alone)


def test_the_interval_of_rare_differences_covers_as_often_as_it_says() -> None:
    random = np.random.default_rng(3)
    for share in (0.02, 0.05, 0.1):  # 12 samples without one of them: 78, 54 and 28 of 100
        groups = (random.random((300, 1, 12)) < share).astype(float)
        found = [statistics.bootstrap(group) for group in groups]
        assert np.mean([each.low <= share <= each.high for each in found]) >= 0.94


def test_only_shared_samples_are_compared() -> None:
    cell = _cell("tokenselect 5%", {0: [0.0], 1: [1.0], 5: [0.0]})
    dense = _cell("dense", {0: [1.0], 1: [1.0], 2: [0.0]})
    interval = statistics.difference([(cell, dense)])
    assert interval is not None
    assert (interval.mean, interval.num) == (-0.5, 2)
    assert (interval.low, interval.high) == (-1.0, 0.0)
    assert statistics.difference([(cell, _cell("dense", {7: [1.0]}))]) is None
    assert statistics.difference([]) is None


def test_kinds_are_counted_apart_and_numbers_in_them_in_order() -> None:
    cell = _cell("dense", {})
    for number, depth in enumerate((95, 5, 15)):
        one = replace(result(number, 1.0, 0.0), kinds=(f"depth {depth}%", ""))
        cell.results[number] = one
    assert statistics.kinds([cell]) == ["depth 5%", "depth 15%", "depth 95%"]
    assert statistics.scores(cell) == {0: 0.5, 1: 0.5, 2: 0.5}
    assert statistics.scores(cell, "depth 15%") == {2: 1.0}
    other = replace(
        cell, results={n: replace(r, scores=(0.0, 1.0)) for n, r in cell.results.items()}
    )
    assert statistics.difference([(other, cell)], "depth 5%") == statistics.Interval(
        -1, -1, pytest.approx(0.9), 1
    )


def test_one_mean_for_tables_plots_and_pictures() -> None:
    """A task counts once however many samples it has, and only those that have the kind."""
    cells = [
        _cell("dense", {0: [1.0], 1: [1.0], 2: [1.0]}, task="needles", kind="depth 5%"),
        _cell("dense", {0: [0.0, 0.5]}, task="qa_1"),
    ]
    assert statistics.mean(cells) == 0.625
    assert statistics.mean(cells, "depth 5%") == 1.0
    assert statistics.mean(cells, "depth 15%") is None
    assert statistics.mean([]) is None
    assert statistics.mean(cells[1:]) == cells[1].mean == 0.25
    family = [
        replace(cell, key=replace(cell.key, task=f"qa_{n}")) for n, cell in enumerate(cells, 1)
    ]
    for cell in family:
        cell.results = {
            n: replace(r, kinds=("depth 5%",) * len(r.scores)) for n, r in cell.results.items()
        }
    (group,) = groups(family)
    (picture,) = depth_pictures([group])
    assert picture.scores == ((0.625,),)
    assert tables.summary(group)["variants"][0]["mean"] == 0.625  # type: ignore[index]
    assert tables.score_table(group).rows[2][:2] == ("mean", "62.5 (4)")
    assert plots._points(group, "dense") == 62.5


CELLS = [
    _cell("tokenselect 20%", {0: [1.0], 1: [1.0]}),
    _cell("tokenselect 5%", {0: [0.0], 1: [1.0]}),
    _cell("dense", {0: [1.0], 1: [1.0]}),
    _cell("dense", {0: [0.0, 0.5]}, task="qa_1"),
    _cell("tokenselect 5%", {0: [1.0, 0.5]}, task="qa_1"),
]


def test_scores_stand_in_a_table_with_their_n() -> None:
    (group,) = groups(CELLS)
    table = tables.score_table(group)
    assert table.head == ("task", "dense", "tokenselect 5%", "tokenselect 20%")
    assert table.rows == (
        ("vt", "100.0 (2)", "50.0 (2)", "100.0 (2)"),
        ("qa_1", "25.0 (1)", "75.0 (1)", "-"),
        ("mean", "62.5 (3)", "62.5 (3)", "100.0 (2), 1 of 2 tasks"),
        ("difference", "-", "0.0 [-96.2, +48.8]", "0.0 [-77.6, +77.6]"),
        ("rows read", "26.2 %", "26.2 %", "26.2 %"),
    )
    differences = tables.difference_table(group)
    assert differences is not None
    assert differences.rows == (
        ("vt", "-50.0 [-100.0, 0.0]", "0.0 [-77.6, +77.6]"),
        ("qa_1", "+50.0 [-92.5, +97.5]", "-"),
    )


def test_kinds_have_tables_of_their_own() -> None:
    first, second = (_cell(name, {0: [1.0]}, kind="turn 1") for name in ("dense", "snapkv 5%"))
    first.results[1] = result(1, 1.0, kind="turn 2")
    second.results[1] = result(1, 0.0, kind="turn 2")
    (group,) = groups([first, second])
    scores, differences = tables.kind_tables(group, "vt")
    assert scores.rows == (
        ("turn 1", "100.0 (1)", "100.0 (1)"),
        ("turn 2", "100.0 (1)", "0.0 (1)"),
    )
    assert differences.rows == (
        ("turn 1", "0.0 [-95.0, +95.0]"),
        ("turn 2", "-100.0 [-100.0, +90.0]"),
    )
    summary = tables.summary(group)["variants"]
    assert isinstance(summary, list)
    assert summary[1]["tasks"]["vt"]["kinds"]["turn 2"]["mean"] == 0.0
    assert tables.kind_tables(groups(CELLS)[0], "vt") == []


def test_what_is_not_comparable_stands_apart() -> None:
    others = [
        replace(CELLS[2], key=replace(CELLS[2].key, **change))
        for change in (
            {"length": 1024},
            {"seed": 1},
            {"model": "b"},
            {"prompt_identity": "0"},
            {"dtype": "float32"},
        )
    ]
    found = groups([*CELLS, *others])
    assert len(found) == 6
    assert [(group.model, group.length, group.seed) for group in found] == [
        ("a/model b", 1024, 0),
        ("a/model b", 4096, 0),
        ("a/model b", 4096, 0),
        ("a/model b", 4096, 0),
        ("a/model b", 4096, 1),
        ("b", 4096, 0),
    ]


def test_a_table_in_markdown() -> None:
    table = tables.Table("scores", ("task", "a|b"), (("vt", "1"), ("qa", "2")))
    assert table.transposed().markdown() == (
        "### scores\n\n| task | vt | qa |\n| --- | --- | --- |\n| a\\|b | 1 | 2 |\n"
    )
