"""Every policy through a session: a stored entry, follow-ups, undo, saved turns, another policy."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import tiny
from last_event import last_event

from longread.config import POLICY_NAMES, Settings
from longread.events import Answer
from longread.policies import POLICIES
from longread.reread import DocumentRereader
from longread.session import Session
from longread.weights import load_config

CONSTITUTION = Path(__file__).parent.parent / "sample_docs/us_constitution.txt"
QUESTIONS = ("Who makes laws?", "How long is a term?", "Who may vote?")


@pytest.fixture(autouse=True)
def untrained(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny.use_untrained_predictor(load_config(model_dir), monkeypatch)


def _ask(session: Session, question: str) -> Answer:
    answer = last_event(session.ask(question))
    assert isinstance(answer, Answer)
    return answer


@pytest.mark.parametrize("kv_dtype", ("bf16", "int8"))
@pytest.mark.parametrize("name", POLICY_NAMES)
def test_a_stored_entry_gives_the_same_conversation_without_a_second_reading(
    settings: Settings, tmp_path: Path, name: str, kv_dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    document = tmp_path / "document.txt"
    document.write_text(CONSTITUTION.read_text()[:2000])
    settings = replace(settings, policy=name, kv_dtype=kv_dtype)
    conversations = []
    for _ in range(2):
        session = Session(settings)
        list(session.open([str(document)]))
        answers = [_ask(session, question) for question in QUESTIONS[:2]]
        assert session.undo()
        answers.append(_ask(session, QUESTIONS[2]))
        for answer in answers:
            assert answer.selection.policy == name
            selects = name != "dense" and not POLICIES[name].rebuilds
            was_selected = selects and answer.usage.answer_tokens > 1
            assert (answer.selection.fraction_kept < 0.6) == was_selected
        conversations.append([answer.text for answer in answers])
        monkeypatch.delattr(DocumentRereader, "documents", raising=False)  # once is enough
        monkeypatch.delattr(DocumentRereader, "text", raising=False)
    assert conversations[0] == conversations[1]


@pytest.mark.parametrize("name", POLICY_NAMES)
def test_saved_turns_and_other_policies_go_together(
    settings: Settings, tmp_path: Path, name: str
) -> None:
    document = tmp_path / "document.txt"
    document.write_text(CONSTITUTION.read_text()[:2000])
    first = Session(replace(settings, policy=name))
    list(first.open([str(document)]))
    for question in QUESTIONS[:2]:
        _ask(first, question)
    resumed = Session(replace(settings, policy=name))
    list(resumed.open([str(document)]))
    list(resumed.restore(first.turns))
    assert _ask(resumed, QUESTIONS[2]).selection.policy == name
    assert resumed._policy.evicts == (resumed._policy.left(0, 100) is not None)
    resumed.configure(replace(settings, policy="dense"))
    assert _ask(resumed, QUESTIONS[2]).selection.fraction_kept == 1.0
    resumed.configure(replace(settings, policy=name))
    assert _ask(resumed, QUESTIONS[2]).selection.policy == name
