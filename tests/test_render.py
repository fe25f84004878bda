"""What reaches the two streams: plain text, no control characters, no wrapping, no markup."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest
from fake_session import CITATION, make_answer

from longread.events import Answer, CacheUse, DocumentInfo, Event, Notice, Opened, Progress, Text
from longread.plain_text import NO_SUPPORT, clean, count_text, json_text, one_line, size_text
from longread.progress import PLAIN_INTERVAL_S, PlainProgress
from longread.render import Screen, opened_line, source_lines
from longread.strip import BLOCKS, draw, page_ticks, resample, tick_line

LONG = "a long line of words " * 20


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def make_screen(quiet: bool = False) -> tuple[Screen, io.StringIO, io.StringIO]:
    out, err = io.StringIO(), io.StringIO()
    return Screen(out, err, quiet=quiet), out, err


@pytest.mark.parametrize(
    "code", [0, 7, 8, 0x0B, 0x0C, 0x0D, 0x1B, 0x7F, 0x85, 0x9B, 0x202E, 0x2066]
)
def test_control_characters_are_stripped(code: int) -> None:
    assert clean(f"a{chr(code)}b\tc\nd") == "ab\tc\nd"


def test_marks_that_text_needs_stay() -> None:
    text = "naïve שלום‏ 日本語 👩‍👧 e\u0301 \u00ad"
    assert clean(text) == text


def test_half_surrogates_can_be_encoded() -> None:
    clean("\ud800").encode("utf-8")
    json_text({"a": "\ud800"}).encode("utf-8")


def test_one_line() -> None:
    assert one_line(" a\n\tb\r\nc\fd ") == "a b c d"
    assert one_line("abcdef", 4) == "abc…"


def test_json_keeps_what_it_escapes() -> None:
    text = "\x1b[31m\x9b\u202eé\x7f"
    dumped = json_text({"text": text}, indent=2)
    assert json.loads(dumped)["text"] == text
    assert clean(dumped) == dumped
    assert "é" in dumped


def test_sizes_and_counts() -> None:
    assert [size_text(n) for n in (0, 999, 1000, 98_362_432, 20 * 1024**3)] == [
        "0 B",
        "999 B",
        "1.0 kB",
        "98.4 MB",
        "21.5 GB",
    ]
    assert count_text(1, "page") == "1 page"
    assert count_text(10_214, "token") == "10,214 tokens"


def answer_events(text: str) -> Iterator[Event]:
    yield Progress("prefill", 1, 2, "tokens")
    yield Text(text[:3])
    yield Text(text[3:])
    yield make_answer(text)


def test_answer_and_nothing_else_on_out() -> None:
    screen, out, err = make_screen()
    answer = screen.show(answer_events("[p. 3] \x1b[2Jsays [bold]so[/bold] " + LONG))
    assert isinstance(answer, Answer)
    screen.sources(answer)
    assert out.getvalue() == "[p. 3] [2Jsays [bold]so[/bold] " + LONG + "\n"
    assert err.getvalue() == (
        "Sources:  [1] book.txt, p. 12 (label xii): “a quote [p. 3] with brackets”\n"
    )


def test_without_stream_nothing_is_on_out() -> None:
    screen, out, _ = make_screen()
    screen.show(answer_events("text"), stream=False)
    assert out.getvalue() == ""


def test_quiet_keeps_warnings_and_errors_only() -> None:
    screen, _, err = make_screen(quiet=True)
    screen.notice(Notice("by the way", level="info"))
    screen.note("a note")
    screen.sources(make_answer("x"))
    assert err.getvalue() == ""
    screen.notice(Notice("mind\nthis\x07"))
    screen.error("broken\nin two lines")
    assert err.getvalue() == (
        "longread: warning: mind this\nlongread: error: broken in two lines\n"
    )


def test_pipes_are_not_wrapped_nor_coloured() -> None:
    screen, _, err = make_screen()
    screen.notice(Notice(LONG))
    screen.error(LONG)
    assert err.getvalue().count("\n") == 2
    assert "\x1b" not in err.getvalue()


def test_terminal_colours_and_no_color(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    coloured, plain = Terminal(), Terminal()
    Screen(io.StringIO(), coloured).error("[bold]x[/bold]")
    assert "\x1b[31m" in coloured.getvalue()
    assert "[bold]x[/bold]" in coloured.getvalue()
    monkeypatch.setenv("NO_COLOR", "1")
    Screen(io.StringIO(), plain).error("x")
    assert plain.getvalue() == "longread: error: x\n"


def test_progress_bar_on_a_terminal_is_gone_before_the_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    err = Terminal()
    out = io.StringIO()
    Screen(out, err).show(answer_events("text"))
    assert "reading the document" in err.getvalue()
    assert "\x1b[?25h" in err.getvalue()  # the cursor is back
    assert out.getvalue() == "text\n"


def test_plain_progress_is_sparse() -> None:
    stream = io.StringIO()
    now_s = 0.0
    view = PlainProgress(stream, clock=lambda: now_s)
    for done in range(0, 101):
        view.update(Progress("prefill", done * 100, 10_000, "tokens"))
        now_s += PLAIN_INTERVAL_S / 40
    lines = stream.getvalue().splitlines()
    assert lines == [
        "longread: reading the document: 4,000 of 10,000 tokens",
        "longread: reading the document: 8,000 of 10,000 tokens",
        "longread: reading the document: 10,000 of 10,000 tokens",
    ]


def test_plain_progress_says_nothing_of_quick_stages() -> None:
    stream = io.StringIO()
    view = PlainProgress(stream, clock=lambda: 0.0)
    for stage in ("load", "read", "prefill"):
        for done in (0, 5, 10):
            view.update(Progress(stage, done, 10, "pages"))
    assert stream.getvalue() == ""


def test_ctrl_c_while_showing_reaches_the_session() -> None:
    seen = []

    def events() -> Iterator[Event]:
        try:
            yield Text("one ")
            yield Text("two")
        except KeyboardInterrupt:
            seen.append("interrupt")
        yield make_answer("one", "interrupted")

    class Interrupting(io.StringIO):
        def write(self, text: str) -> int:
            if text == "two":
                raise KeyboardInterrupt
            return super().write(text)

    out, err = Interrupting(), io.StringIO()
    screen = Screen(out, err)
    answer = screen.show(events())
    assert isinstance(answer, Answer)
    assert answer.finish_reason == "interrupted"
    assert seen == ["interrupt"]
    assert out.getvalue() == "one \n"
    screen.ending(answer)
    assert "not complete" in err.getvalue()


def test_ctrl_c_outside_a_session_goes_on() -> None:
    def events() -> Iterator[Event]:
        yield Progress("prefill", 1, 2, "tokens")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        make_screen()[0].show(events())


def test_an_answer_without_support_is_marked_whatever_is_quiet() -> None:
    screen, out, err = make_screen(quiet=True)
    screen.ending(make_answer("x"))
    assert err.getvalue() == ""
    screen.ending(replace(make_answer("x"), supported=False))
    assert err.getvalue() == f"longread: warning: {NO_SUPPORT}: check it\n"
    assert out.getvalue() == ""


def test_no_sources_says_so() -> None:
    assert source_lines([]) == ["Sources:  none: the answer rests on no passage of the document"]


def test_further_sources_are_aligned_and_labels_shown_where_they_differ() -> None:
    lines = source_lines([CITATION, CITATION])
    assert lines[1].startswith("          [2] book.txt")
    same = source_lines([type(CITATION)("b.txt", 3, "3", "x", 0.1)])
    assert same == ["Sources:  [1] b.txt, p. 3: “x”"]


@pytest.mark.parametrize("num_slices", [1, 7, 64, 100, 1000])
@pytest.mark.parametrize("num_columns", [1, 7, 64, 100])
def test_resampling_keeps_the_mass(num_slices: int, num_columns: int) -> None:
    masses = [1.0 + (i % 3) for i in range(num_slices)]
    columns = resample(masses, num_columns)
    assert len(columns) == num_columns
    assert sum(columns) == pytest.approx(sum(masses))


def test_strip_shows_where() -> None:
    masses = [0.0] * 50 + [1.0] + [0.0] * 49
    strip = draw(masses, 20)
    assert len(strip) == 20
    assert strip.index(BLOCKS[-1]) == 10
    assert draw([0.0] * 5, 80) == BLOCKS[0] * 5
    assert draw([], 80) == BLOCKS[0]


@dataclass(frozen=True)
class PagedInfo(DocumentInfo):
    """A document that tells where its pages begin: page number, first token."""

    page_starts: tuple[tuple[int, int], ...] = ()


def test_ticks_stand_where_pages_begin() -> None:
    starts = tuple((number, 1000 * (number - 11) // 100) for number in range(11, 111))
    line = tick_line(page_ticks([PagedInfo("a", 100, 1000, starts)], 80), 80)
    numbers = [int(number) for number in line.split()]
    assert numbers[0] == 11
    assert numbers == sorted(numbers)
    assert len(numbers) > 4
    for number in numbers:
        assert line.index(str(number)) == int(0.8 * (number - 11))
    assert len(tick_line(page_ticks([PagedInfo("a", 100, 1000, starts)], 80), 10)) <= 10


def test_ticks_without_page_starts_are_quarters() -> None:
    line = tick_line(page_ticks([DocumentInfo("a", 100, 1000)], 80), 80)
    assert line.split() == ["0%", "25%", "50%", "75%"]
    assert line.index("50%") == 40


def test_ticks_of_several_documents() -> None:
    documents = [
        PagedInfo("a", 3, 100, ((1, 0), (2, 50), (3, 60))),
        PagedInfo("b", 2, 300, ((7, 0), (8, 150))),
    ]
    line = tick_line(page_ticks(documents, 80), 80)
    assert line.index("#1") == 0
    assert line.index("#2") == 20
    assert line.index("8") == 50


def test_nothing_to_tick() -> None:
    assert tick_line(page_ticks([], 80), 80) == ""


def test_what_was_read_adds_up() -> None:
    documents = (DocumentInfo("a.pdf", 3, 2664),)
    cache = CacheUse(False, 1000, 1704, 2_000_000, "k")
    assert opened_line(Opened(documents, cache)) == (
        "a.pdf: 3 pages, 2,664 tokens "
        "(2,704 with the prompt: 1,000 from the cache, 1,704 read now; 2.0 MB stored)"
    )
