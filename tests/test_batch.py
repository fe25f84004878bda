"""Questions that are answered several at once, beside each alone, on a tiny model in fp32."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import tiny
import torch
from last_event import last_event

from longread import batch
from longread.batch import affordable_places
from longread.cache import KVCache
from longread.config import POLICY_NAMES, Settings
from longread.errors import ModelError, UsageError
from longread.events import Answer
from longread.policies import H2O, Dense
from longread.sampling import SamplingParams
from longread.session import Session
from longread.weights import load_config

QUESTIONS = (
    "Who makes laws?",
    "What is the President's oath, and who says it?",
    "When?",
    "Why? " * 20,
    "How long is the term of a Senator?",
)


@pytest.fixture
def document(tmp_path: Path) -> Path:
    text = Path(__file__).parent.parent.joinpath("sample_docs/us_constitution.txt").read_text()
    path = tmp_path / "document.txt"
    path.write_text(text[:1500])
    return path


MOST_AT_ONCE = 3


@pytest.fixture(autouse=True)
def untrained(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny.use_untrained_predictor(load_config(model_dir), monkeypatch)


def _opened(settings: Settings, document: Path) -> Session:
    session = Session(settings)
    last_event(session.open([str(document)]))
    return session


def _together(settings: Settings, document: Path) -> list[Answer]:
    found = dict[int, Answer]()
    for answered in _opened(settings, document).ask_each(enumerate(QUESTIONS, 1), MOST_AT_ONCE):
        assert answered.answer is not None
        found[answered.number] = answered.answer
    return [found[number] for number in range(1, len(QUESTIONS) + 1)]


def _alone(settings: Settings, document: Path) -> Iterator[Answer]:
    for number, question in enumerate(QUESTIONS):
        session = _opened(replace(settings, seed=settings.seed + number), document)
        answer = last_event(session.ask(question))
        assert isinstance(answer, Answer)
        yield answer


def _check_same(settings: Settings, document: Path) -> None:
    for found, alone in zip(_together(settings, document), _alone(settings, document), strict=True):
        assert found.text == alone.text and found.usage == alone.usage
        assert found.finish_reason == alone.finish_reason
        assert [c.quote for c in found.citations] == [c.quote for c in alone.citations]
        for mine, other in zip(found.citations, alone.citations, strict=True):
            assert mine.score == pytest.approx(other.score, rel=1e-4)
        kept = alone.selection.fraction_kept
        assert found.selection.fraction_kept == pytest.approx(kept, rel=1e-6)


@pytest.mark.parametrize("policy", POLICY_NAMES)
def test_an_answer_is_the_one_that_its_question_gets_alone(
    settings: Settings, document: Path, policy: str
) -> None:
    _check_same(replace(settings, policy=policy, budget="10%"), document)


@pytest.mark.parametrize(
    "change",
    (
        {"temperature": 1.5, "seed": 2**63 - 6},
        {"temperature": 0.8, "top_p": 0.9, "policy": "dense"},
        {"reselect": 3, "max_tokens": 11},
        {"reselect": 4, "neighbours": 2, "policy": "butler"},
        {"vote": "none", "index": "exact"},
        {"vote": "all", "dtype": "bfloat16"},
        {"context": "select"},
        {"no_cache": True, "policy": "h2o"},
    ),
    ids=str,
)
def test_so_it_is_under_other_settings(
    settings: Settings, document: Path, change: dict[str, object]
) -> None:
    _check_same(replace(settings, budget="10%", **change), document)  # type: ignore[arg-type]


def test_a_long_answer_outgrows_its_first_room(settings: Settings, document: Path) -> None:
    settings = replace(settings, max_tokens=2 * batch._MARGIN_ROWS, budget="10%")
    session = _opened(settings, document)
    found = [answered.answer for answered in session.ask_each([(1, "When?"), (2, "Why?")])]
    alone = last_event(_opened(settings, document).ask("When?"))
    assert isinstance(alone, Answer) and alone.usage.answer_tokens > batch._MARGIN_ROWS + 30
    assert alone.text in [answer.text for answer in found if answer is not None]


def test_what_does_not_fit_is_told_and_the_others_are_answered(
    settings: Settings, document: Path
) -> None:
    session = _opened(settings, document)
    asked = [(7, "When?"), (8, "why? " * 8000), (9, "Who makes laws?")]
    found = {answered.number: answered for answered in session.ask_each(asked)}
    assert found[8].answer is None and "the window of" in found[8].why_not
    assert found[7].answer is not None and found[9].answer is not None
    assert not session.turns
    assert list(_opened(settings, document).ask_each([])) == []


def test_an_empty_question_is_an_error(settings: Settings, document: Path) -> None:
    with pytest.raises(UsageError, match="empty"):
        list(_opened(settings, document).ask_each([(1, " ")]))


def test_damaged_weights_are_told(settings: Settings, document: Path) -> None:
    session = _opened(settings, document)
    with torch.inference_mode():
        session._decoder.network.norm.fill_(torch.nan)
    with pytest.raises(ModelError, match="damaged"):
        list(session.ask_each([(1, "When?")]))


def test_answers_come_as_they_are_finished(settings: Settings, document: Path) -> None:
    session = _opened(replace(settings, max_tokens=4), document)
    numbers = [answered.number for answered in session.ask_each(enumerate("abcdefg", 1), 3)]
    assert sorted(numbers) == list(range(1, 8))
    assert set(numbers[:3]) <= {1, 2, 3, 4, 5}


def test_places_are_as_many_as_memory_has_room_for(
    settings: Settings, document: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder = _opened(settings, document)._decoder
    cache: KVCache = decoder.new_cache(1000)
    cache.length = 900

    def places(free: int | None, policy: Dense | H2O) -> int:
        monkeypatch.setattr(batch, "free_bytes", lambda device: free)
        return affordable_places(decoder, cache, policy, 64, 50)

    assert places(None, Dense()) == places(1 << 40, Dense()) == 64
    assert places(0, Dense()) == 1
    some = places(2_000_000, Dense())
    assert 1 < some < 64
    assert places(2_000_000, H2O(budget=9)) < some


def test_seeds_go_by_the_questions_numbers() -> None:
    params = SamplingParams(temperature=1.0, seed=2**63 - 1)
    assert params.of_question(1) == params
    assert params.of_question(3).seed == 1
