"""From attention to passages: what is cited, what is marked, and when nothing stands out."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from longread.config import Settings
from longread.document import Document, Page
from longread.events import Answer
from longread.evidence import Evidence, Span, cut_passages, least_support, row_mass
from longread.prompt import ChatFormat, DocumentPrompt, build_prompt, tokenize_document
from longread.session import Session
from longread.tokenizer import Tokenizer
from longread.trace import Trace

SENTENCES = (
    "The harbour of Marsk lies behind two long walls of grey stone. ",
    "Its keeper is Greta Lund, who came from Harwick as a child. ",
    "Every spring the walls are mended before the herring fleet comes. ",
    "The light on the northern wall was built in the year 1831. ",
)
LAYERS, HEADS = 2, 3


@pytest.fixture(scope="module")
def prompt(model_dir: Path) -> DocumentPrompt:
    pages = (Page(0, None, SENTENCES[0] + SENTENCES[1]), Page(1, "ii", "".join(SENTENCES[2:])))
    document = Document("port.txt", "", "text", "", 2, pages, ())
    tokenizer = Tokenizer.load(model_dir)
    tokenized = tokenize_document(tokenizer, document)
    return build_prompt(tokenizer, ChatFormat.load(model_dir), [tokenized])


def _spans(prompt: DocumentPrompt) -> list[Span]:
    spans = cut_passages(prompt)
    assert len(spans) == len(SENTENCES)
    return spans


def _mass(prompt: DocumentPrompt, *weights: float) -> Tensor:
    """Attention of one token: so much on each passage, spread over its rows and all heads."""
    mass = torch.zeros(LAYERS, HEADS, len(prompt.token_ids))
    mass[:, :, 0] = 0.5  # the first row draws attention in every text
    for span, weight in zip(_spans(prompt), weights, strict=True):
        mass[:, :, span.token_start : span.token_end] = weight / (span.token_end - span.token_start)
    return mass


def _evidence(prompt: DocumentPrompt, mass: Tensor, blank: Tensor, num_steps: int = 3) -> Evidence:
    trace = Trace(LAYERS, HEADS, mass.shape[2], device=torch.device("cpu"))
    trace.mass += mass * (1 + num_steps)
    trace.num_steps = num_steps
    trace.selected += (mass > 0).int()
    return Evidence(trace, prompt, row_mass(blank, prompt))


def test_what_an_empty_question_looks_at_is_taken_off(prompt: DocumentPrompt) -> None:
    blank = _mass(prompt, 0.30, 0.02, 0.04, 0.04)
    evidence = _evidence(prompt, _mass(prompt, 0.25, 0.12, 0.04, 0.04), blank)
    first, *_ = evidence.citations()
    assert first.quote == SENTENCES[1].strip()
    assert (first.document, first.page) == ("port.txt", 1)
    assert first.score == pytest.approx(0.12 / 0.45, rel=1e-4)
    assert evidence.support == pytest.approx(0.10 / 0.40, rel=1e-4)
    assert evidence.supported
    texts = [passage.text for passage in evidence.passages()]
    assert texts[0] == first.quote and texts[-1] == SENTENCES[0].strip()


def test_citations_end_where_little_is_added(prompt: DocumentPrompt) -> None:
    blank = _mass(prompt, 0.1, 0.1, 0.1, 0.1)
    evidence = _evidence(prompt, _mass(prompt, 0.1, 0.3, 0.2, 0.12), blank)
    assert [citation.quote for citation in evidence.citations()] == [
        SENTENCES[1].strip(),
        SENTENCES[2].strip(),
    ]
    assert [citation.page_label for citation in evidence.citations()] == [None, "ii"]
    assert len(evidence.sources(1)) == 1


def test_nothing_stands_out_of_an_answer_like_any_other(prompt: DocumentPrompt) -> None:
    blank = _mass(prompt, 0.3, 0.1, 0.1, 0.1)
    same = _evidence(prompt, blank.clone(), blank)
    assert same.support == pytest.approx(0.0, abs=1e-6) and not same.supported
    away = _evidence(prompt, blank * 0.5, blank)
    assert away.support < 0 and not away.supported
    assert len(away.citations()) == 1  # the least unlikely one
    more = 0.6 * (least_support(100) + 0.001)
    found = _evidence(prompt, _mass(prompt, 0.3, 0.1 + more, 0.1, 0.1), blank)
    assert found.supported


def test_a_longer_text_needs_less_support() -> None:
    """Of 1.5B's right answers the least adds 0.079, 0.040, 0.033, 0.016 at these lengths."""
    lengths = (100, 4096, 8192, 16_384, 32_768)
    found = [round(least_support(length), 4) for length in lengths]
    assert found == [0.04, 0.04, 0.0283, 0.02, 0.0141]


def test_what_was_not_read_is_not_cited(prompt: DocumentPrompt) -> None:
    blank = _mass(prompt, 0.1, 0.1, 0.1, 0.1)
    evidence = _evidence(prompt, _mass(prompt, 0.0, 0.2, 0.0, 0.0), blank)
    assert [passage.text for passage in evidence.passages()] == [SENTENCES[1].strip()]
    blank = _mass(prompt, 0.3, 0.0, 0.0, 0.0)
    less = _evidence(prompt, _mass(prompt, 0.2, 0.0, 0.0, 0.0), blank)
    assert [passage.text for passage in less.passages()] == [SENTENCES[0].strip()]
    nothing = _evidence(prompt, torch.zeros_like(blank), blank)
    assert nothing.citations() == nothing.passages() == nothing.heads() == ()


def test_the_words_that_drew_the_most_are_marked(prompt: DocumentPrompt) -> None:
    span = _spans(prompt)[1]
    tokenized = prompt.documents[0]
    (first_row, _), page = prompt.document_spans[0], tokenized.document.pages[0]
    mass = _mass(prompt, 0.1, 0.1, 0.1, 0.1)
    blank = mass.clone()
    for word in ("Greta", "Harwick"):
        at = page.text.index(word)
        for row, (start, end) in enumerate(
            zip(tokenized.char_starts, tokenized.char_ends, strict=True), first_row
        ):
            if start < at + len(word) and end > at:
                mass[:, :, row] += 0.1 / len(word)
    (passage, *_) = _evidence(prompt, mass, blank).passages()
    marked = [passage.text[start:end] for start, end in passage.marks]
    assert marked == ["Greta", "Harwick"]
    assert passage.text == SENTENCES[1].strip()
    assert passage.head_share == passage.layer_share == 1.0
    assert span.token_start > first_row


def test_the_share_of_each_head_on_the_sources(prompt: DocumentPrompt) -> None:
    span = _spans(prompt)[3]
    mass = _mass(prompt, 0.1, 0.1, 0.1, 0.1)
    blank = mass.clone()
    mass[1, 2, span.token_start : span.token_end] *= 7
    heads = _evidence(prompt, mass, blank).heads(limit=1)
    assert len(heads) == LAYERS and len(heads[0]) == HEADS
    assert heads[1][2] == pytest.approx(0.7, rel=1e-4)
    assert heads[0] == pytest.approx((0.25, 0.25, 0.25), rel=1e-4)


def test_rows_around_the_documents_do_not_count(prompt: DocumentPrompt) -> None:
    mass = _mass(prompt, 0.1, 0.1, 0.1, 0.1)
    rows = row_mass(mass, prompt)
    assert rows[0] == 0 and rows.dtype == torch.float64
    assert float(rows.sum()) == pytest.approx(0.4 * LAYERS * HEADS, rel=1e-4)


@pytest.mark.weights_all
def test_support_of_a_real_model(qwen05_dir: Path) -> None:
    session = Session(Settings(model=str(qwen05_dir), no_cache=True, max_tokens=40))
    text = Path(__file__).parent.parent / "sample_docs/us_constitution.txt"
    for _ in session.open([str(text)], pages="1-2"):
        pass
    *_, answer = session.ask("How many Senators does each State have?")
    assert isinstance(answer, Answer) and answer.supported
    assert "two Senators from each State" in answer.citations[0].quote
    session.undo()
    *_, answer = session.ask("What salary in dollars does the Constitution fix for the President?")
    assert isinstance(answer, Answer) and not answer.supported
