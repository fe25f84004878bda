"""How `longread eval` reads: by selection past the window, as a session does, and told in cells."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import tiny
from test_evaluate_runner import LENGTH, Made, Model, _of_a_session, _sample

from longread import context
from longread.cli import main
from longread.config import CONTEXT_NAMES, Settings
from longread.context import Way
from longread.errors import ContextError, UsageError
from longread.evaluate import tasks
from longread.evaluate.cells import CellFolder, read_cells
from longread.evaluate.contexts import answering, name_of, ways_to_read
from longread.evaluate.grid import Grid, Request
from longread.evaluate.task import Sample
from longread.evaluate.variants import parse_reading, parse_variants
from longread.events import Event
from longread.model import Decoder
from longread.past_window import Reading
from longread.prompt import ChatFormat
from longread.tokenizer import Tokenizer
from longread.weights import load_config

WINDOW = 1024
Capture = pytest.CaptureFixture[str]


# Few rows, so that a short document is already read by selection.
NARROW = Reading(sink_size=4, window_size=32, budget=100, chunk_tokens=64)


@pytest.fixture
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(context, "Reading", lambda: NARROW)


@pytest.fixture(scope="module")
def small_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with a window of 1,024 tokens."""
    root = tmp_path_factory.mktemp("small")
    folder = tiny.save_hf_folder(root / "hf", "qwen2", max_position_embeddings=WINDOW)
    return tiny.convert(folder, root / "models")


def _model(settings: Settings, past_window: Reading | None = None) -> Model:
    path = Path(settings.model)
    decoder = Decoder.load(path, "cpu", "float32", past_window=past_window)
    return Model(decoder, Tokenizer.load(path), ChatFormat.load(path), settings)


def test_each_length_is_read_as_the_window_asks(small_dir: Path) -> None:
    config, lengths = load_config(small_dir), (512, WINDOW, WINDOW + 1, 3 * WINDOW)

    def ways(
        context: str, lengths: Sequence[int] = lengths, fields: str = "budget=100:chunk_tokens=64"
    ) -> dict[str, tuple[int, ...]]:
        found = ways_to_read(context, lengths, config, parse_reading(fields))
        return {f"{name_of(way)} {way.stretch}": own for way, own in found.items()}

    select = "select:budget=100:chunk_tokens=64 1"
    assert ways("auto") == {"dense 1": lengths[:2], select: lengths[2:]}
    assert ways("select") == {select: lengths}
    (way,) = ways_to_read("select", lengths, config)
    assert way.reading == Reading().fitting(WINDOW) and way.reading.num_positions <= WINDOW
    assert ways("yarn") == {"dense 1": lengths[:2], "yarn 2": lengths[2:3], "yarn 4": lengths[3:]}
    assert ways("dense", lengths[:2]) == {"dense 1": lengths[:2]}
    with pytest.raises(UsageError, match="1025 is over the window of the model, which is 1,024"):
        ways("dense")
    with pytest.raises(UsageError, match="attends to 3,200 positions.* trained for 1,024"):
        ways("auto", fields="vote=all")
    assert set(CONTEXT_NAMES) == {"auto", "select", "yarn", "dense"}


def test_what_reads_past_the_window_at_a_step_cannot_answer() -> None:
    variants = parse_variants("dense,snapkv,tokenselect", "20%,100%,900,256", Settings())
    assert answering(variants, Way(stretch=2), WINDOW) == tuple(variants)
    # Of 1,024 rows 256 are the question's, 128 the answer's, 4 sinks and 256 window: 380 are left.
    names = [variant.name for variant in answering(variants, Way(Reading()), WINDOW)]
    assert names == ["tokenselect 20%", "tokenselect 256"]
    edge = parse_variants("tokenselect", "380,381", Settings())
    assert answering(edge, Way(Reading()), WINDOW) == (edge[0],)


@pytest.mark.parametrize("in_conversation", (False, True))
@pytest.mark.parametrize("policy", ("tokenselect", "tokenselect:vote=none"))
def test_answers_past_the_window_are_those_of_a_session(
    settings: Settings, tmp_path: Path, narrow: None, policy: str, in_conversation: bool
) -> None:
    sample = _sample(in_conversation=in_conversation)
    (variant,) = parse_variants(policy, "5%", settings)
    (said,) = _model(settings, NARROW).answers(sample, policy, "5%").values()
    selecting = replace(settings, context="select")
    expected = _of_a_session(selecting, sample, tmp_path, variant)
    assert [answer.text for answer in said] == [text for text, _ in expected]
    for answer, (_, fraction_kept) in zip(said, expected, strict=True):
        if answer.rows_cached:
            assert answer.rows_read / answer.rows_cached == pytest.approx(fraction_kept, abs=1e-4)
    (near,) = _model(settings).answers(sample, policy, "5%").values()
    assert [answer.text for answer in near] != [answer.text for answer in said]


def test_a_share_counts_from_no_more_rows_than_the_window(
    settings: Settings, small_dir: Path
) -> None:
    """And is no more than what reading chose; a number of rows is taken as it is."""
    model = _model(replace(settings, model=str(small_dir)), NARROW)
    for share, rows in (("5%", -(-WINDOW // 20)), ("30%", NARROW.budget)):
        said = model.answers(_sample(), "tokenselect", share)
        same = model.answers(_sample(), "tokenselect", str(rows))
        assert list(said.values()) == list(same.values())
    (more,) = model.answers(_sample(), "tokenselect", str(2 * NARROW.budget)).values()
    (few,) = said.values()
    assert more[0].rows_read > few[0].rows_read > 0


def test_lengths_are_read_as_they_must_be(
    capsys: Capture, small_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(tasks.TASKS, "made", lambda materials: _Fitting())
    out = tmp_path / "found"
    words = ["eval", "made", "--policies", "dense,tokenselect", "--budgets", "5%", "--samples", "2"]
    words += ["--lengths", f"900,{LENGTH}", "--model", str(small_dir), "--dtype", "float32"]
    words += ["--window-size", "16", "--out", str(out)]
    words += ["--reading", "budget=100:sink-size=4:window-size=32:chunk_tokens=64"]
    select = "select:sink_size=4:window_size=32:budget=100:chunk_tokens=64"
    assert main(words) == 0
    shown, err = capsys.readouterr()
    assert "dense: cannot answer from what was read by selection" in err
    assert f"left out at {LENGTH:,} tokens" in err
    found = {
        (cell.key.length, cell.key.context, cell.key.policy): len(cell.results)
        for cell in read_cells([out])
    }
    assert found == {
        (900, "dense", "dense"): 2,
        (900, "dense", "tokenselect"): 2,
        (LENGTH, select, "tokenselect"): 2,
    }
    record = json.loads(shown.splitlines()[-1])
    assert (record["samples_done"], record["samples_missing"]) == (4, 0)
    assert [group["length"] for group in record["groups"]] == [900, LENGTH]
    assert "--context" not in record["command"]
    assert f"--reading {words[-1]}" in record["command"]
    assert f"tokenselect:window_size=16[{select}] 5%" in shown
    assert main([*words, "--context", "select"]) == 0
    shown, _ = capsys.readouterr()
    record = json.loads(shown.splitlines()[-1])
    assert record["samples_done"] == 2 and "--context select" in record["command"]
    assert main([*words, "--context", "yarn"]) == 0
    capsys.readouterr()
    found = {
        (cell.key.length, cell.key.name) for cell in read_cells([out]) if cell.key.context == "yarn"
    }
    assert found == {
        (LENGTH, "dense[yarn]"),
        (LENGTH, "tokenselect:window_size=16[yarn] 5%"),
    }
    assert main([*words[:2], "--policies", "dense", *words[6:], "--context", "select"]) == 2
    assert "none of the --policies can answer" in capsys.readouterr()[1]
    assert main(["eval", "sources", "--reading", "vote=group"]) == 2
    assert "--reading says how documents are read for answers" in capsys.readouterr()[1]


@dataclass
class _Fitting:
    """Documents of about the tokens that are asked for."""

    name: str = "made"

    def sample(self, number: int, num_tokens: int, seed: int) -> Sample:
        sample = _sample(number, text="law " * num_tokens)
        return replace(sample, document="law " * (num_tokens // 2), task=self.name, number=number)


@dataclass
class _Growing(Made):
    """Its samples of number 1 and 2 are over the window of 16,384 tokens."""

    def sample(self, number: int, num_tokens: int, seed: int) -> Sample:
        sample = super().sample(number, num_tokens, seed)
        return replace(sample, document=sample.document * (20 if number in (1, 2) else 1))


def test_samples_that_do_not_fit_are_found_before_anything_is_read(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = _model(settings)
    events: list[Event] = []
    rest = (model.tokenizer, model.chat, CellFolder(tmp_path), events.append, events.append)
    variants = tuple(parse_variants("dense,tokenselect", "10%", settings))
    request = Request((Made(), _Growing("grows")), (1000, LENGTH), variants, 4, 0)

    def unread(*args: object, **kwargs: object) -> None:
        raise AssertionError("the model reads before all samples are checked")

    with monkeypatch.context() as patch:
        patch.setattr(model.decoder, "prefill", unread)
        with pytest.raises(ContextError) as error:
            Grid(model.decoder, *rest).run(request)
    message = str(error.value)
    prompt = model.prompts().make(_Growing("grows").sample(1, 0, 0))
    assert message.startswith(
        f"sample 1 of grows at 1,000 takes {prompt.num_rows:,} tokens with its answers "
        "(and 3 more samples), but the window of "
    )
    assert message.endswith("is 16,384: choose smaller --lengths, or leave grows out")
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]
    # What is read by selection has no such window.
    far = Grid(_model(settings, Reading()).decoder, *rest, context="select")
    works = far._works(replace(request, lengths=(LENGTH,), num_samples=2))
    assert [work.prompt.sample.number for work in works[LENGTH]] == [0, 0, 1, 1]
