"""Several documents in one session: citations keep them apart, a changed one is read from there."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from small_pdf import make_writer, show, to_bytes

from longread.config import Settings
from longread.document import document_text
from longread.events import Answer, Notice, Opened
from longread.session import Session

CONSTITUTION = (Path(__file__).parent.parent / "sample_docs/us_constitution.txt").read_text()


@pytest.fixture
def sources(tmp_path: Path) -> list[Path]:
    """A text, a PDF whose pages are labelled, and source code whose places are lines."""
    text, pdf, code = tmp_path / "law.txt", tmp_path / "pages.pdf", tmp_path / "rules.py"
    text.write_text(CONSTITUTION[:1500])
    writer = make_writer(
        show(f"Page {i} of the second document says that register {i} holds {i * i}.")
        for i in range(1, 7)
    )
    writer.set_page_label(0, 1, "/r")
    writer.set_page_label(2, 5, "/D", start=1)
    pdf.write_bytes(to_bytes(writer))
    code.write_text("\n".join(f"def rule_{i}():\n    return {i}" for i in range(60)))
    return [text, pdf, code]


def opened(session: Session, sources: list[Path]) -> Opened:
    *_, last = session.open([str(source) for source in sources])
    assert isinstance(last, Opened)
    return last


def answered(session: Session) -> Answer:
    *_, last = session.ask("Which register holds 16?")
    assert isinstance(last, Answer)
    return last


def test_citations_keep_each_document_s_name_and_pages(
    settings: Settings, sources: list[Path]
) -> None:
    session = Session(replace(settings, policy="dense", no_cache=True))
    first, second, third = opened(session, sources).documents
    assert [first.name, second.name, third.name] == ["law.txt", "pages.pdf", "rules.py"]
    assert [number for number, _ in second.page_starts] == [1, 2, 3, 4, 5, 6]
    answer = answered(session)
    assert answer.citations
    prompt = session._prompt
    assert prompt is not None
    by_name = {tokenized.document.name: tokenized.document for tokenized in prompt.documents}
    for cited in [*answer.citations, *answer.selection.passages]:
        document = by_name[cited.document]
        page = next(page for page in document.pages if page.page_idx + 1 == cited.page)
        quote = cited.quote if hasattr(cited, "quote") else cited.text
        assert quote in " ".join(page.text.split())
        assert cited.page_label == page.label


def test_each_passage_is_cited_from_the_document_its_rows_belong_to(
    settings: Settings, sources: list[Path]
) -> None:
    session = Session(replace(settings, no_cache=True))
    opened(session, sources)
    prompt = session._prompt
    assert prompt is not None
    labels = {}
    for row in range(len(prompt.token_ids)):
        place = prompt.locate(row)
        if place is None:
            continue
        document = prompt.documents[place.document_idx].document
        page = document.pages[place.page_idx]
        start, end = prompt.document_spans[place.document_idx]
        assert start <= row < end
        text = document_text(document)[place.char_start : place.char_end]
        assert text.split("\n\n")[0].strip() in page.text
        labels[document.name, page.page_idx + 1] = page.label
    assert [labels["pages.pdf", number] for number in range(1, 7)] == [
        "i",
        "ii",
        "1",
        "2",
        "3",
        "4",
    ]
    assert labels["law.txt", 1] is None
    assert labels["rules.py", 1] == "§ lines 1-80, rule_0"


@pytest.mark.parametrize("changed", [0, 1, 2])
def test_one_changed_document_is_read_again_only_from_there_on(
    settings: Settings, sources: list[Path], changed: int
) -> None:
    first = Session(settings)
    opened(first, sources)
    assert first._prompt is not None
    start, _ = first._prompt.document_spans[changed]
    if sources[changed].suffix == ".pdf":
        contents = [show(f"Altogether another page {i}, changed.") for i in range(6)]
        sources[changed].write_bytes(to_bytes(make_writer(contents)))
    else:
        sources[changed].write_text("Quite other words. " + sources[changed].read_text())
    session = Session(settings)
    again = opened(session, sources)
    assert session._prompt is not None
    # A few tokens of the changed document may be the old ones.
    assert start <= again.cache.tokens_reused <= start + 8
    num_tokens = len(session._prompt.token_ids)
    assert again.cache.tokens_prefilled == num_tokens - again.cache.tokens_reused
    fresh = Session(replace(settings, no_cache=True))
    opened(fresh, sources)
    # Numbers and not greedy text: rows that were read in other batches differ in their last bits.
    for found, expected in ((session._cache.k, fresh._cache.k), (session._cache.v, fresh._cache.v)):
        torch.testing.assert_close(
            found[:, :, :num_tokens], expected[:, :, :num_tokens], rtol=1e-3, atol=1e-3
        )


def test_warnings_name_the_document_they_are_about(settings: Settings, sources: list[Path]) -> None:
    writer = make_writer([show("Some text"), b""])
    sources[1].write_bytes(to_bytes(writer))
    notices = [
        event.message
        for event in Session(settings).open([str(source) for source in sources])
        if isinstance(event, Notice)
    ]
    assert [message for message in notices if message.startswith("pages.pdf: no text on page 2")]
