"""The claim of the project: what one question skipped, the next may need, and it is still there."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from torch import Tensor

from longread.config import Settings
from longread.document import document_text
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


def _selected(session: Session, passage: str) -> Tensor:
    """Whether a row of the passage was ever selected in the last answer: [L, H_kv, rows] bool."""
    assert session.trace is not None
    own = session._prompt.documents[0]
    start = document_text(own.document).index(passage)
    first_row, _ = session._prompt.document_spans[0]
    rows = np.searchsorted(own.char_starts, (start, start + len(passage))) + first_row
    return session.trace.selected[:, :, rows[0] : rows[1]] > 0


@pytest.mark.weights
def test_a_follow_up_finds_what_the_first_question_skipped(session: Session) -> None:
    assert CAKE[2] in _ask(session, CAKE[1]).text
    before = _selected(session, BLUE[0])
    answer = _ask(session, BLUE[1])
    assert BLUE[2] in answer.text
    assert answer.selection.fraction_kept < 0.15
    after = _selected(session, BLUE[0])
    # Of the first answer's heads most passed over the passage that the second one needs ...
    assert before.float().mean() < 0.15
    skipped = ~before.any(dim=-1)
    assert skipped.float().mean() > 0.4
    # ... and many of those that had not read one row of it read it now.
    assert (skipped & after.any(dim=-1)).sum() >= 0.2 * skipped.sum()
    assert after.sum() > 2 * before.sum()
