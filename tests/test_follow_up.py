"""The claim of the project: what one question skipped, the next may need, and it is still there."""

from __future__ import annotations

from pathlib import Path

import pytest

from longread.config import Settings
from longread.events import Answer
from longread.session import Session

NOVEL = Path(__file__).parent.parent / "sample_docs/northanger_abbey.txt"
BLUE = ("The password of the blue door is 4817.", "What is the password of the blue door?", "4817")
CAKE = (
    "The best thing to eat in Bristol is the plum cake.",
    "What is the best thing to eat in Bristol?",
    "plum",
)
OTHERS = (
    "The train to Oxford leaves from platform 23.",
    "The treasure is buried under the old oak tree in Pemberton.",
    "The gardener's cat is called Pepper.",
)


@pytest.fixture
def session(smollm2_dir: Path, tmp_path: Path) -> Session:
    """A session at 5 % on 2,600 tokens of a novel with facts strewn in."""
    paragraphs = [" ".join(text.split()) for text in NOVEL.read_text().split("\n\n")]
    long = [text for text in paragraphs if len(text) > 200][:12]
    for place, fact in ((1, BLUE[0]), (3, OTHERS[0]), (5, OTHERS[1]), (7, OTHERS[2]), (9, CAKE[0])):
        long.insert(place, fact)
    document = tmp_path / "novel.txt"
    document.write_text("\n\n".join(long))
    settings = Settings(
        model=str(smollm2_dir), no_cache=True, budget="5%", window_size=64, max_tokens=24
    )
    session = Session(settings)
    list(session.open([str(document)]))
    return session


def _ask(session: Session, question: str) -> Answer:
    *_, answer = session.ask(question)
    assert isinstance(answer, Answer)
    return answer


def _forget_what_was_skipped(session: Session) -> float:
    """What a method that evicts does: each head loses the rows its first answer did not select.

    Returns the share of rows lost, mean over layers and heads.
    """
    assert session.trace is not None
    skipped = session.trace.selected == 0  # [L, H_kv, document rows]
    num_rows = skipped.shape[-1]
    for slab in (session._cache.k, session._cache.v):
        slab[:, :, :num_rows].masked_fill_(skipped[..., None], 0.0)
    return float(skipped.float().mean())


@pytest.mark.weights
@pytest.mark.parametrize(("first", "second"), ((BLUE, CAKE), (CAKE, BLUE)))
def test_a_follow_up_finds_what_the_first_question_skipped(
    session: Session, first: tuple[str, str, str], second: tuple[str, str, str]
) -> None:
    assert first[2] in _ask(session, first[1]).text
    answer = _ask(session, second[1])
    assert second[2] in answer.text
    assert answer.selection.fraction_kept < 0.15
    # The same conversation without the rows that the first answer skipped: now it is wrong.
    session.undo()
    session.undo()
    _ask(session, first[1])
    assert _forget_what_was_skipped(session) > 0.5
    assert second[2] not in _ask(session, second[1]).text
