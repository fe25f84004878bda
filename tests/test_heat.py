"""What was read and where an answer looked: pages, passages, sums per layer, head and token."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from last_event import last_event

from longread.config import Settings
from longread.errors import UsageError
from longread.events import Answer
from longread.evidence import cut_passages
from longread.session import Session

CONSTITUTION = Path(__file__).parent.parent / "sample_docs/us_constitution.txt"

PAGE = "Congress makes the laws of number {}. The President signs them, or sends them back.\n" * 6


@pytest.fixture
def document(tmp_path: Path) -> Path:
    path = tmp_path / "law.txt"
    path.write_text("\f".join(PAGE.format(*[n] * 6) for n in range(1, 6)))
    return path


def _ask(session: Session, question: str = "Who makes laws?") -> Answer:
    answer = last_event(session.ask(question))
    assert isinstance(answer, Answer)
    return answer


def _opened(settings: Settings, *sources: Path) -> Session:
    session = Session(settings)
    last_event(session.open([str(source) for source in sources]))
    session.reading.follows_tokens = True
    return session


def test_pages_are_what_the_model_read(settings: Settings, document: Path) -> None:
    (read,) = _opened(settings, document).reading.documents
    assert (read.name, read.kind) == ("law.txt", "text")
    assert [page.number for page in read.pages] == [1, 2, 3, 4, 5]
    assert read.pages[2].text.startswith("Congress makes the laws of number 3. The President")
    for page in read.pages:
        ends = [0]
        for start, end in page.passages:
            assert ends[-1] <= start < end <= len(page.text)
            ends.append(end)
        assert page.text[ends[-1] :].strip() == ""
        assert len(page.passages) > 3


def test_pages_that_were_cut_off_are_not_shown(settings: Settings, tmp_path: Path) -> None:
    path = tmp_path / "long.txt"
    path.write_text(CONSTITUTION.read_text() * 2)
    session = _opened(replace(settings, truncate=True, no_cache=True), path)
    whole = session._prompt.documents[0].document
    (read,) = session.reading.documents
    assert 1 < len(read.pages) < len(whole.pages)
    *full, last = read.pages
    assert [page.text for page in full] == [page.text for page in whole.pages[: len(full)]]
    assert whole.pages[len(full)].text.startswith(last.text)
    assert last.passages[-1][1] <= len(last.text) < len(whole.pages[len(full)].text)


def test_heat_adds_up(settings: Settings, document: Path) -> None:
    session = _opened(replace(settings, budget="10%", sink_size=0, window_size=0), document)
    answer = _ask(session)
    heat = session.reading.heat()
    num_passages = sum(len(page.passages) for page in session.reading.documents[0].pages)
    assert heat.attention.shape[2] == heat.token_attention.shape[1] == num_passages
    assert heat.attention.sum() == pytest.approx(1.0, abs=1e-4)
    assert heat.token_attention.sum(axis=1) == pytest.approx(1.0, abs=1e-4)
    assert len(heat.tokens) == answer.usage.answer_tokens > 2
    assert "".join(heat.tokens).strip() == answer.text
    assert 0.05 < heat.chosen.mean() < 0.2
    # The first token comes from the question, which reads all rows and is no step of the answer.
    np.testing.assert_allclose(heat.token_chosen[0], 1.0)
    by_token = heat.token_chosen[1:].mean(axis=0)
    np.testing.assert_allclose(by_token, heat.chosen.mean(axis=(0, 1)), atol=1e-5)


def test_heat_is_that_of_the_trace(settings: Settings, document: Path) -> None:
    session = _opened(settings, document)
    _ask(session)
    assert session.trace is not None
    heat = session.reading.heat()
    spans = cut_passages(session._prompt)
    mass = session.trace.mass.double().numpy()
    sums = np.stack([mass[:, :, s.token_start : s.token_end].sum(-1) for s in spans], axis=-1)
    np.testing.assert_allclose(heat.attention, sums / sums.sum(), rtol=1e-4, atol=1e-7)


def test_all_rows_are_chosen_by_dense(settings: Settings, document: Path) -> None:
    session = _opened(replace(settings, policy="dense"), document)
    _ask(session)
    heat = session.reading.heat()
    np.testing.assert_allclose(heat.chosen, 1.0)
    np.testing.assert_allclose(heat.token_chosen, 1.0)


def test_heat_of_what_was_not_followed(settings: Settings, document: Path) -> None:
    session = _opened(settings, document)
    session.reading.follows_tokens = False
    with pytest.raises(UsageError, match="ask it again"):
        session.reading.heat()
    _ask(session)
    with pytest.raises(UsageError, match="ask it again"):
        session.reading.heat()
    session.reading.follows_tokens = True
    _ask(session)
    session.reading.heat()
    session.undo()
    with pytest.raises(UsageError, match="ask it again"):
        session.reading.heat()


def test_what_a_question_chose_past_the_window_is_told(settings: Settings, tmp_path: Path) -> None:
    path = tmp_path / "long.txt"
    path.write_text(CONSTITUTION.read_text()[:36_000])
    session = _opened(replace(settings, context="select", no_cache=True), path)
    assert session.documents[0].num_tokens > 9000
    _ask(session)
    heat = session.reading.heat()
    assert 0.1 < heat.token_chosen[0].mean() < 0.99
    assert heat.token_attention[0].sum() == pytest.approx(1.0, abs=1e-4)
