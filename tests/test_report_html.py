"""The HTML report: whole, harmless whatever the text says, right in a browser if there is one."""

from __future__ import annotations

import base64
import io
import json
import re
from collections.abc import Iterator
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import chromium
import numpy as np
import pytest
from fake_session import make_answer, make_document, make_heat

from longread.events import Answer, Citation
from longread.plain_text import NO_SUPPORT
from longread.reading import Heat, ReadDocument, ReadPage, find_quote
from longread.report_html import MARK, report_html

HOSTILE = (
    "</script><script>hurt()</script> <img src=http://example.org/x onerror=hurt()> "
    "\x1b[31m\x00\u202e & \"quoted\" 'too' </span></div></section> <!-- \ud800 ]]> &lt;b&gt;\r\n"
)
needs_browser = pytest.mark.skipif(chromium.PROGRAM is None, reason="there is no Chromium")


def make_long_document(num_pages: int, passages_per_page: int) -> ReadDocument:
    """Pages of sentences of about a hundred characters, a passage each."""
    sentence = (
        "The captain of the ship said to number {:>6} that the wind would turn before the day. \n"
    )
    pages, number = [], 0
    for page_number in range(1, num_pages + 1):
        text, passages = "", []
        for _ in range(passages_per_page):
            number += 1
            start = len(text)
            text += sentence.format(number)
            passages.append((start, len(text)))
        pages.append(ReadPage(page_number, None, text, tuple(passages)))
    return ReadDocument("ship.txt", "text", tuple(pages))


def num_passages(*documents: ReadDocument) -> int:
    return sum(len(page.passages) for document in documents for page in document.pages)


def make_report(*documents: ReadDocument, answer: Answer | None = None) -> str:
    answer = answer or make_answer("May 7, 1992.")
    heat = make_heat(num_passages(*documents))
    return report_html("When?", answer, documents, heat).decode()


def data_of(report: str) -> dict:
    found = re.search(r'<script type="application/json" id="heat">(.*?)</script>', report)
    assert found is not None
    return json.loads(found[1])


class Page(HTMLParser):
    """The tags of a page with what they hold."""

    def __init__(self, report: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.spans: list[str] = []
        self._in_span = False
        self.feed(report)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag == "span" and (dict(attrs).get("class") or "").startswith("h"):
            self._in_span = True
            self.spans.append("")

    def handle_endtag(self, tag: str) -> None:
        self._in_span = self._in_span and tag != "span"

    def handle_data(self, data: str) -> None:
        if self._in_span:
            self.spans[-1] += data


def test_one_span_a_passage_with_its_text() -> None:
    document = make_document("book.txt")
    page = Page(make_report(document))
    texts = [p.text[start:end] for p in document.pages for start, end in p.passages]
    assert page.spans == texts
    places = [tag for tag, _ in page.tags if tag == "section"]
    assert len(places) == 12


def test_question_answer_sources_and_settings_are_there() -> None:
    report = make_report(make_document("book.txt"))
    assert report.startswith("<!doctype html>")
    assert MARK in report.encode()
    assert '<h1 dir="auto">When?</h1>' in report
    assert '<b data-t="1">May</b><b data-t="2"> 7,</b><b data-t="3"> 19</b>' in report
    assert '<a href="#s1">[1] p. 12 (label xii)</a>' in report
    # The source's mark stands before the passage that holds the quote.
    assert re.search(
        r'<sup id="s1" data-p="23">1</sup><span class="h15">In May, 1992, a quote', report
    )
    assert "<dt>Budget</dt><dd>20 tokens per KV head</dd>" in report


def test_a_source_that_is_not_found_leads_to_its_page() -> None:
    answer = make_answer("May 7, 1992.")
    answer = replace(answer, citations=(Citation("book.txt", 3, None, "not there", 0.1),))
    report = make_report(make_document("book.txt"), answer=answer)
    assert re.search(r'<h3>p. 3</h3><sup id="s1" data-p="4">1</sup><div', report)


def test_several_documents_are_named_in_the_sources() -> None:
    report = make_report(make_document("a.txt"), make_document("book.txt"))
    assert "[1] book.txt, p. 12 (label xii)</a>" in report
    assert report.count('id="s1"') == 1
    assert len(Page(report).spans) == 48


def test_an_answer_without_sources_says_so() -> None:
    answer = replace(make_answer("I do not know.", "length"), citations=())
    report = make_report(make_document("book.txt"), answer=answer)
    assert "rests on no passage" in report
    assert "The answer is not complete." in report
    assert "<b data-t" not in report  # the heat's tokens are of another text


def test_an_answer_without_support_is_marked() -> None:
    document = make_document("book.txt")
    assert NO_SUPPORT not in make_report(document)
    report = make_report(document, answer=replace(make_answer("x"), supported=False))
    assert report.count(NO_SUPPORT) == 1
    assert 'href="#s1"' in report


def test_nothing_is_fetched_and_no_other_script_may_run() -> None:
    report = make_report(make_document("book.txt"))
    addresses = re.findall(r'(?:src|href|url)\s*[=(]\s*"?([^"\s>)]+)', report)
    assert set(addresses) == {"data:,", "#s1"}
    assert "http:" not in report and "https:" not in report and "@import" not in report
    policy = re.search(r'Content-Security-Policy" content="([^"]+)"', report)
    assert policy is not None
    assert "default-src 'none'" in policy[1] and "script-src 'sha256-" in policy[1]


def test_hostile_text_is_text() -> None:
    size = len(HOSTILE)
    pages = (ReadPage(1, HOSTILE, HOSTILE * 2, ((0, size), (size, 2 * size))),)
    document = ReadDocument(HOSTILE, "text", pages)
    answer = replace(
        make_answer(HOSTILE),
        model=HOSTILE,
        citations=(Citation(HOSTILE, 1, HOSTILE, HOSTILE, 1.0),),
    )
    heat = replace(make_heat(2), tokens=(HOSTILE[:20], HOSTILE[20:]))
    data = report_html(HOSTILE, answer, (document,), heat)
    report = data.decode("utf-8")
    page = Page(report)
    assert [tag for tag, _ in page.tags].count("script") == 2
    assert not [tag for tag, _ in page.tags if tag in ("img", "iframe", "object", "form")]
    assert not [name for _, attrs in page.tags for name in attrs if name.startswith("on")]
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]", report)
    assert len(page.spans) == 2
    assert page.spans[0].startswith("</script><script>hurt()</script> <img src=")


def test_slices_are_bytes_of_layers_heads_and_tokens() -> None:
    document = make_document("book.txt")
    heat = make_heat(24)
    heat = replace(heat, attention=np.random.default_rng(0).random((3, 2, 24)).astype(np.float32))
    data = data_of(report_html("When?", make_answer("x"), (document,), heat).decode())
    heads = data["attention"]["heads"]
    assert len(heads["bytes"]) == len(heads["peaks"]) == 4 * 3
    assert len(data["attention"]["tokens"]["bytes"]) == len(data["choice"]["tokens"]["bytes"]) == 4

    def values(place: int) -> np.ndarray:
        return np.frombuffer(base64.b64decode(heads["bytes"][place]), np.uint8) / 255

    def expected(mass: np.ndarray) -> np.ndarray:
        return np.sqrt(mass / mass.max())

    attention = heat.attention.astype(np.float64)
    np.testing.assert_allclose(values(0), expected(attention.sum((0, 1))), atol=0.003)
    np.testing.assert_allclose(values(2), expected(attention.sum(0)[1]), atol=0.003)
    np.testing.assert_allclose(values(3), expected(attention.sum(1)[0]), atol=0.003)
    np.testing.assert_allclose(values(3 * 3 + 2), expected(attention[2, 1]), atol=0.003)
    share = attention.sum((0, 1)).max() / attention.sum()
    assert heads["peaks"][0] == pytest.approx(share, abs=1e-4)


def test_a_heat_of_nothing_is_drawn_as_such() -> None:
    document = make_document("book.txt")
    zeros = np.zeros((3, 2, 24), np.float32)
    nothing = np.zeros((0, 24), np.float32)
    heat = Heat(zeros, zeros, (), nothing, nothing)
    report = report_html("When?", make_answer("", "interrupted"), (document,), heat).decode()
    assert "(no answer)" in report
    assert 'class="h0"' in report and 'class="h1"' not in report


def test_quotes_are_found_whatever_the_white_space() -> None:
    text = "One two\n\n three  four."
    assert find_quote(text, "two three") == (4, 15)
    assert find_quote(text, "four. ") == (17, 22)
    assert find_quote(text, "five") is None
    assert find_quote(text, " ") is None


@pytest.fixture(scope="module")
def tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[chromium.Browser]:
    with chromium.browser(tmp_path_factory.mktemp("chromium")) as tab:
        yield tab


def open_report(tab: chromium.Browser, path: Path, report: str) -> None:
    path.write_text(report)
    tab.open(path)
    assert tab.complaints() == []
    assert tab.requests() == [path.as_uri()]


@needs_browser
def test_a_long_report_is_drawn_in_both_schemes(tab: chromium.Browser, tmp_path: Path) -> None:
    image = pytest.importorskip("matplotlib.image")
    open_report(tab, tmp_path / "r.html", make_report(make_long_document(30, 20)))
    means = []
    for scheme in ("light", "dark"):
        tab.scheme(scheme)
        tab.run("scrollTo(0, 20000)")
        pixels = image.imread(io.BytesIO(tab.screenshot()), format="png")[..., :3]
        assert len(np.unique((pixels * 255).astype(np.uint8).reshape(-1, 3), axis=0)) > 50
        means.append(float(pixels.mean()))
    assert means[0] > 0.8
    assert means[1] < 0.3


@needs_browser
def test_heat_switches_by_layer_head_token_and_kind(tab: chromium.Browser, tmp_path: Path) -> None:
    open_report(tab, tmp_path / "r.html", make_report(make_document("book.txt")))
    classes = "[...document.querySelectorAll('.text span')].map(s => s.className).join()"
    said = "document.getElementById('said').textContent"
    first = tab.run(classes)
    assert first.endswith("h15")
    assert tab.run(said).startswith("Whole answer, all layers and KV heads. The strongest passage")
    tab.run("document.querySelectorAll('.answer b')[1].click()")
    assert tab.run(said).startswith("Token 2 of 4, all layers")
    rolled = tab.run(classes)
    assert rolled.split(",")[0] == "h15" and rolled != first
    tab.run("document.getElementById('layer').value = 3")
    tab.run("document.getElementById('layer').dispatchEvent(new Event('change'))")
    assert tab.run(said).startswith("Whole answer, layer 2. ")
    assert tab.run(classes) == first
    tab.run("document.querySelector('input[value=choice]').click()")
    assert tab.run(said).endswith("had 100% of its rows read.")
    assert set(tab.run(classes).split(",")) == {"h0", "h15"}
    assert tab.run("document.body.className") == "choice"


@needs_browser
def test_a_click_on_a_source_goes_to_its_passage(tab: chromium.Browser, tmp_path: Path) -> None:
    document = make_long_document(200, 20)
    quote = document.pages[149].text.split("\n")[10]
    citation = Citation("ship.txt", 150, None, quote, 0.3)
    answer = replace(make_answer("May 7, 1992."), citations=(citation,))
    open_report(tab, tmp_path / "r.html", make_report(document, answer=answer))
    tab.run("document.querySelector('.sources a').click()")
    tab.run("new Promise(done => requestAnimationFrame(() => setTimeout(done, 50)))")
    top = tab.run("document.getElementById('s1').getBoundingClientRect().top")
    assert 0 < top < 900
    assert quote[:40] in tab.run("document.querySelector('#s1 + span').textContent")


@needs_browser
def test_hostile_text_runs_nothing(tab: chromium.Browser, tmp_path: Path) -> None:
    document = ReadDocument("x", "text", (ReadPage(1, None, HOSTILE, ((0, len(HOSTILE)),)),))
    open_report(tab, tmp_path / "r.html", make_report(document))
    assert tab.run("typeof hurt") == "undefined"
    assert tab.run("document.images.length + document.scripts.length") == 2
    assert "<img src=http://example.org/x" in tab.run("document.querySelector('.text').textContent")
