"""`longread eval` as a command: tasks, variants, stored results, reports, and bad usage."""

from __future__ import annotations

import dataclasses
import json
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from test_cells import KEY, result

from longread.cli import main
from longread.config import Settings
from longread.errors import UsageError
from longread.evaluate import tasks
from longread.evaluate.cells import Cell, CellFolder, CellKey, read_cells
from longread.evaluate.groups import groups
from longread.evaluate.pictures import coloured_lines, depth_pictures, plain_lines
from longread.evaluate.plots import write_plots
from longread.evaluate.task import Question, Sample
from longread.evaluate.variants import parse_reading, parse_variants
from longread.policies import POLICIES

Capture = pytest.CaptureFixture[str]
TEXT = (Path(__file__).parent.parent / "sample_docs/us_constitution.txt").read_text()


@dataclass
class Turns:
    """Conversations of two turns."""

    name: str = "turns"

    def sample(self, number: int, num_tokens: int, seed: int) -> Sample:
        questions = tuple(
            Question(f"Who is {number}?", ("a", "e"), max_tokens=4, kind=f"turn {turn}")
            for turn in (1, 2)
        )
        return Sample(self.name, number, TEXT[:1500], questions, in_conversation=True)


@pytest.fixture(autouse=True)
def task(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(tasks.TASKS, "turns", lambda materials: Turns())


def _eval(capture: Capture, *words: str) -> tuple[int, str, str]:
    code = main(["eval", *words])
    out, err = capture.readouterr()
    assert "Traceback" not in err
    return code, out, err


def test_a_run_is_shown_stored_and_gone_on_with(
    capsys: Capture, model_dir: Path, tmp_path: Path
) -> None:
    words = ["turns", "--policies", "dense,tokenselect:window_size=8,snapkv"]
    words += ["--budgets", "10%,0.3", "--lengths", "1500", "--samples", "2", "--out", "found"]
    words += ["--model", str(model_dir), "--dtype", "float32", "--window-size", "16"]
    code, out, err = _eval(capsys, *words)
    assert code == 0, err
    lines = out.splitlines()
    name = model_dir.name
    assert lines[0] == f"turns at 1,500 tokens, {_stored_name(tmp_path)}, seed 0: scores (n)"
    assert "tokenselect:window_size=8 10%" in lines[1]
    assert "snapkv:window_size=16 30%" in lines[1]
    assert [line.split()[0] for line in lines[2:5]] == ["turns", "difference", "rows"]
    record = json.loads(lines[-1])
    assert (record["samples_done"], record["samples_missing"]) == (2, 0)
    assert record["command"] == (
        "longread eval turns --policies dense,tokenselect:window_size=8,snapkv --budgets 10%,0.3 "
        f"--lengths 1500 --samples 2 --model {name} --dtype float32 --window-size 16"
    )
    (group,) = record["groups"]
    assert [v["variant"] for v in group["variants"]][1] == "tokenselect:window_size=8 10%"
    assert set(group["variants"][1]["tasks"]["turns"]["kinds"]) == {"turn 1", "turn 2"}
    again = json.loads(_eval(capsys, *words)[1].splitlines()[-1])
    assert again["samples_done"] == 0
    assert again["groups"] == record["groups"]
    code, out, err = _eval(capsys, "--report", "found", "--plots", "plots")
    assert code == 0, err
    assert "| tokenselect:window_size=8 10% | " in out
    assert f"- `{record['command']}` (cpu " in out
    plots = sorted(path.name for path in (tmp_path / "plots").iterdir())
    assert [name.rpartition("-")[2] for name in plots] == ["budgets.png", "turns.png"]
    for name in plots:
        assert (tmp_path / "plots" / name).read_bytes().startswith(b"\x89PNG")


def _stored_name(folder: Path) -> str:
    """The model's name as it is stored."""
    return read_cells([folder / "found"])[0].key.model


def test_a_time_limit_ends_a_run(capsys: Capture, model_dir: Path) -> None:
    words = ["turns", "--budgets", "10%", "--lengths", "1500", "--samples", "3"]
    words += ["--model", str(model_dir), "--dtype", "float32", "--limit-seconds", "0"]
    code, out, _ = _eval(capsys, *words)
    record = json.loads(out.splitlines()[-1])
    assert (code, record["samples_done"], record["samples_missing"]) == (0, 1, 2)
    assert [v["variant"] for v in record["groups"][0]["variants"]] == ["dense", "tokenselect 10%"]
    assert Path("eval-results").is_dir()


@pytest.mark.parametrize(
    ("words", "message"),
    (
        (("turn",), "there is no task 'turn'; did you mean turns?"),
        ((), "no task is named"),
        (("turns", "--lengths", "4K"), "--lengths is '4K': give numbers of tokens"),
        (("turns", "--lengths", "0"), "--lengths is '0'"),
        (("turns", "--policies", "tokenselct"), "did you mean tokenselect?"),
        (("turns", "--policies", ","), "--policies names no policy"),
        (("turns", "--budgets", "0%"), "budget '0%' is not a budget"),
        (("turns", "--report", "x"), "leave TASKS out"),
        (("turns", "--data", "nowhere", "--policies", "dense,snapkv:pool=max"), "pooling?"),
    ),
)
def test_bad_usage_is_told(capsys: Capture, words: tuple[str, ...], message: str) -> None:
    code, out, err = _eval(capsys, *words)
    assert (code, out) == (2, "")
    assert message in err


def test_a_length_over_the_window_is_told(capsys: Capture, model_dir: Path) -> None:
    words = ["turns", "--lengths", "1000,20000", "--context", "dense", "--model", str(model_dir)]
    code, _, err = _eval(capsys, *words)
    assert code == 2
    assert "--lengths 20000 is over the window of the model, which is 16,384" in err


def test_a_report_of_nothing_is_told(capsys: Capture) -> None:
    code, _, err = _eval(capsys, "--report", "nowhere")
    assert code == 8
    assert "nowhere is not there: give the --out folder of an earlier `longread eval`" in err


@pytest.mark.parametrize(
    ("policies", "message"),
    (
        ("tokenselect:vote=nobody", "vote is 'nobody': choose one of group"),
        ("tokenselect:vote", "vote is '': it needs a value"),
        ("tokenselect:window-size=-1", "window_size is '-1': it must be from 0"),
        ("tokenselect:reselect=0", "it must be from 1"),
        ("tokenselect:budget=5", "budgets are given with --budgets"),
        ("tokenselect:turn=5", "tokenselect has no field 'turn'"),
        ("dense:window_size=5", "dense has no field 'window_size'"),
        ("razor:echo_share=2", "it must be from 0 to 1"),
        ("pyramidkv:beta=x", "give a number"),
        ("pyramidkv:beta=0.3", "beta is '0.3': it must be from 1 to 1e+06"),
        ("snapkv:kernel_size=4", "kernel_size is '4': it must be an odd number from 1 to 1023"),
        ("pyramidkv:kernel_size=0", "it must be from 1 to 1023"),
        ("quest:block_len=5000", "it must be from 1 to 4096"),
        ("razor:repeats=1", "it must be from 2 to 64"),
        ("xkv:value_ratio=0", "it must be over 0"),
    ),
)
def test_bad_fields_are_told(policies: str, message: str) -> None:
    with pytest.raises(UsageError, match="^") as error:
        parse_variants(policies, "5%", Settings())
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("fields", "message"),
    (
        ("budget", "budget is '': it needs a value"),
        ("budget=0", "budget is '0': it must be from 1"),
        ("vote=none", "vote is 'none': choose one of all"),
        ("passage_len=4", "it must be an odd number from 1 to 1023"),
        ("rows=4", "--reading has no field 'rows'"),
        ("", "--reading has no field ''"),
    ),
)
def test_bad_fields_of_a_reading_are_told(fields: str, message: str) -> None:
    with pytest.raises(UsageError, match="^") as error:
        parse_reading(fields)
    assert message in str(error.value)


@pytest.mark.parametrize("policy", POLICIES)
def test_every_field_may_be_given_its_default(policy: str) -> None:
    for field in dataclasses.fields(POLICIES[policy]):
        if field.init and field.name != "budget":
            text = f"{policy}:{field.name}={field.default}"
            (variant,) = parse_variants(text, "5%", Settings())
            assert getattr(variant.make(100), field.name) == field.default


def test_variants_have_one_name_each() -> None:
    named = parse_variants(
        "dense,dense,tokenselect,tokenselect:vote=group,tokenselect:vote=none:sink_size=0",
        "0.05,5%,20%,512",
        Settings(window_size=64),
    )
    assert [variant.name for variant in named] == [
        "dense",
        *(f"tokenselect:window_size=64 {budget}" for budget in ("5%", "20%", "512")),
        *(
            f"tokenselect:vote=none:sink_size=0:window_size=64 {budget}"
            for budget in ("5%", "20%", "512")
        ),
    ]
    policy = named[4].make(1000)
    assert (policy.budget, policy.vote, policy.sink_size) == (50, "none", 0)
    with pytest.raises(UsageError, match="tokenselect needs a budget"):
        parse_variants("tokenselect", "", Settings())
    assert parse_variants("dense", "", Settings())[0].make(10) is not None


def test_a_switch_that_is_off_leaves_a_cell_what_it_was() -> None:
    on, off, plain = parse_variants(
        "tokenselect:stand_in=yes,tokenselect:stand_in=false,tokenselect:index=exact",
        "5%",
        Settings(),
    )
    assert on.name == "tokenselect:stand_in=true 5%" and off.name == "tokenselect 5%"
    assert parse_variants(on.label, "5%", Settings()) == [on]
    assert [name for name, _ in off.fields] == [name for name, _ in plain.fields]
    assert on.make(100).kernel_plan() != off.make(100).kernel_plan()
    for vote, settings in ((":vote=none", Settings()), ("", Settings(vote="group-max"))):
        with pytest.raises(UsageError, match="stand_in needs vote=group, and the vote is"):
            parse_variants(f"tokenselect:stand_in=true{vote}", "5%", settings)
    with pytest.raises(UsageError, match="stand_in is 'maybe': give true or false"):
        parse_variants("tokenselect:stand_in=maybe", "5%", Settings())


def test_groups_of_tasks_have_names() -> None:
    assert len(tasks.task_names(["ruler"])) == 13
    assert tasks.task_names(["vt", "ruler", "vt", "turns"])[0] == "vt"
    assert tasks.family_of("vt") == "ruler"
    assert tasks.family_of("turns") == "turns"


def _needles() -> list[Cell]:
    cells = []
    for length, scores in ((4096, (1.0, 0.5)), (16384, (0.0, 1.0))):
        for variant in ("dense", "snapkv"):
            key = CellKey(
                **{
                    **{name: getattr(KEY, name) for name in CellKey.__dataclass_fields__},
                    "task": "needles",
                    "length": length,
                    "variant": variant,
                    "budget": "" if variant == "dense" else "5%",
                }
            )
            results = {
                number: result(number, score, kind=f"depth {5 + 90 * number}%")
                for number, score in enumerate(scores)
            }
            cells.append(Cell(key, [], results))
    del cells[3].results[0]
    return cells


def test_depths_and_lengths_make_a_picture() -> None:
    first, second = depth_pictures(groups(_needles()))
    assert plain_lines(first) == [
        "needles, a/model b, seed 0: dense",
        "depth 5%     100      0",
        "depth 95%     50    100",
        "tokens     4,096 16,384",
    ]
    assert plain_lines(second)[1] == "depth 5%     100      -"
    styles = [str(span.style) for span in coloured_lines(first)[1].spans]
    assert styles == ["black on #5ae65a", "black on #e65a5a"]
    others = _needles()[:1]
    others[0].results[0] = result(0, 1.0, kind="turn 1")
    assert len(depth_pictures(groups(others))[0].depths) == 1


def test_plots_of_depths(tmp_path: Path) -> None:
    names = sorted(path.name for path in write_plots(groups(_needles()), tmp_path))
    assert names == [
        "a-model-b-needles-16384-seed0-budgets.png",
        "a-model-b-needles-4096-seed0-budgets.png",
        "needles-a-model-b-seed-0-depths.png",
    ]


def test_plots_say_what_they_need(
    capsys: Capture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = CellFolder(tmp_path / "found")
    run = dict.fromkeys(("command", "device", "longread", "torch", "python"), "x")
    with folder.locked():
        folder.add(KEY, result(0, 1.0), run)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    code, _, err = _eval(capsys, "--report", "found", "--plots", "plots")
    assert code == 2
    assert "pip install 'longread[eval]'" in err
    assert _eval(capsys, "--report", "found")[0] == 0
