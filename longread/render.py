"""What a session yields, shown on two streams: the answer on one, everything else on the other.

Owns the look of answers, sources, selections, notices and errors. Text of documents and models is
printed as it is, without rich's markup and without control characters, and never wrapped.
"""

from __future__ import annotations

import os
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, TextIO

from longread.events import (
    Answer,
    Citation,
    DocumentInfo,
    Event,
    Notice,
    Opened,
    Progress,
    Selection,
    Text,
)
from longread.plain_text import (
    NO_SUPPORT,
    clean,
    count_text,
    one_line,
    place_text,
    size_text,
)
from longread.progress import BarProgress, NoProgress, PlainProgress, ProgressView
from longread.selection_view import head_lines, selection_lines

if TYPE_CHECKING:
    from rich.console import Console

PIPE_WIDTH = 100
MAX_QUOTE_LEN = 300


class Screen:
    """The two streams of one run, and the rules of what goes where.

    `quiet` leaves out progress, notes and sources; warnings and errors stay.
    """

    def __init__(self, out: TextIO, err: TextIO, *, quiet: bool = False) -> None:
        self.out = out
        self.err = err
        self.quiet = quiet
        self._view: ProgressView = NoProgress() if quiet else _progress_view(err)
        self._console: Console | None = None
        self._at_line_start = True

    def show(self, events: Iterator[Event], *, stream: bool = True) -> Opened | Answer | None:
        """Show events as they come; return the last Opened or Answer.

        Ctrl-C outside the generator is handed into it, so that it can end with the partial answer.
        With `stream` false the answer's text is left to the caller.
        """
        last: Opened | Answer | None = None
        try:
            event = next(events, None)
            while event is not None:
                try:
                    last = self._take(event, stream) or last
                    event = next(events, None)
                except KeyboardInterrupt as interrupt:
                    if isinstance(last, Answer):
                        break
                    if not isinstance(events, Generator):
                        raise
                    event = events.throw(interrupt)
        finally:
            self._view.stop()
            if stream:
                self.end_line()
        return last

    def _take(self, event: Event, stream: bool) -> Opened | Answer | None:
        if isinstance(event, Progress):
            self._view.update(event)
            return None
        self._view.stop()
        if isinstance(event, Notice):
            self.notice(event)
        elif isinstance(event, Text):
            if stream:
                self.write(event.text)
        else:
            return event
        return None

    def progress(self, progress: Progress) -> None:
        """Show one report; call `stop_progress` when the work is done."""
        self._view.update(progress)

    def stop_progress(self) -> None:
        """Clear the bar away."""
        self._view.stop()

    def write(self, text: str) -> None:
        """Write a piece of the answer at once."""
        safe = clean(text)
        if safe:
            self.out.write(safe)
            self.out.flush()
            self._at_line_start = safe.endswith("\n")

    def end_line(self) -> None:
        """Finish the answer's last line, if it is not."""
        if not self._at_line_start:
            self.out.write("\n")
            self.out.flush()
            self._at_line_start = True

    def print(self, line: str = "") -> None:
        """Write one line of a command's result."""
        self.out.write(clean(line) + "\n")
        self._at_line_start = True

    def note(self, line: str, style: str = "dim") -> None:
        """Write one line beside the answer; --quiet leaves it out."""
        if not self.quiet:
            self._err_line(line, style)

    def tell(self, line: str) -> None:
        """Write one line that was asked for, so that --quiet keeps it."""
        self._err_line(line, "")

    def notice(self, notice: Notice) -> None:
        """Write a notice; --quiet leaves out those that are no warnings."""
        self._view.stop()
        line = one_line(notice.message)
        if notice.level == "warning":
            self._err_line(f"longread: warning: {line}", "yellow")
        else:
            self.note(f"longread: {line}")

    def error(self, message: str) -> None:
        """Write the one line of an error."""
        self._view.stop()
        self._err_line(f"longread: error: {one_line(message)}", "red")

    def sources(self, answer: Answer) -> None:
        """Write where the answer comes from; --quiet leaves it out."""
        for line in source_lines(answer.citations):
            self.note(line)

    def ending(self, answer: Answer) -> None:
        """Say where an answer is not whole or not supported; as a warning, --quiet keeps it."""
        if answer.finish_reason == "interrupted":
            self.notice(Notice("interrupted; the answer is not complete"))
        elif answer.finish_reason == "length":
            number = count_text(answer.usage.answer_tokens, "token")
            self.notice(
                Notice(f"the answer was cut at {number} (--max-tokens, or the model's window)")
            )
        if not answer.supported:
            self.notice(Notice(f"{NO_SUPPORT}: check it"))

    def selected(
        self,
        selection: Selection,
        documents: Sequence[DocumentInfo],
        *,
        heads: bool = False,
    ) -> None:
        """Write the best passages, the strip and with `heads` the table of layers and KV heads.

        It was asked for, so --quiet keeps it.
        """
        width = self._width()
        lines = selection_lines(selection, documents, width, cut=self.err.isatty())
        for line in [*lines, *(head_lines(selection, width) if heads else [])]:
            self._err_line(line.text, "dim", line.marks)

    def _width(self) -> int:
        try:
            return max(20, os.get_terminal_size(self.err.fileno()).columns)
        except (OSError, ValueError, AttributeError):
            return PIPE_WIDTH

    def _err_line(self, line: str, style: str, marks: Sequence[tuple[int, int, str]] = ()) -> None:
        """Write a line. marks: where other styles are; its text must be clean then."""
        safe = clean(line)
        if not self.err.isatty():
            # A log that is full or gone is no reason to lose the answer.
            with suppress(OSError):
                self.err.write(safe + "\n")
                self.err.flush()
            return
        from rich.console import Console
        from rich.text import Text as StyledText

        self._console = self._console or Console(file=self.err, highlight=False)
        styled = StyledText(safe, style=style)
        for start, end, own in marks:
            styled.stylize(f"not dim {own}", start, end)
        self._console.print(styled, soft_wrap=True)


def _progress_view(err: TextIO) -> ProgressView:
    return BarProgress(err) if err.isatty() else PlainProgress(err)


def source_lines(citations: Iterable[Citation], *, full: bool = False) -> list[str]:
    """Return `Sources:  [1] a.pdf, p. 12 (label xii): “quote”` and its like, one a line.

    full: the whole quotes, and the share of the attention on the documents that fell on each.
    """
    lines = []
    head = "Sources:"
    for number, citation in enumerate(citations, 1):
        where = f"{citation.document}, {page_text(citation.page, citation.page_label)}"
        quote = one_line(citation.quote, None if full else MAX_QUOTE_LEN)
        share = f" ({citation.score:.1%} of the attention)" if full else ""
        lines.append(f"{head}  [{number}] {where}{share}: “{quote}”")
        head = " " * len(head)
    return lines or [f"{head}  none: the answer rests on no passage of the document"]


def page_text(page: int, label: str | None) -> str:
    """Return `p. 12`, with the label where the document prints another, or `§ Heading`."""
    return place_text(page, label)


def opened_line(opened: Opened) -> str:
    """Return what was read and how much of it came from the cache."""
    cache = opened.cache
    parts = [
        f"{info.name}: {count_text(info.num_pages, 'page')}, {count_text(info.num_tokens, 'token')}"
        for info in opened.documents
    ]
    num_cached = cache.tokens_reused + cache.tokens_prefilled
    # The cache also holds the prompt's beginning; without a word the sums would not come out.
    more = num_cached != sum(info.num_tokens for info in opened.documents)
    with_prompt = f"{num_cached:,} with the prompt: " if more else ""
    return (
        f"{'; '.join(parts)} ({with_prompt}{cache.tokens_reused:,} from the cache, "
        f"{cache.tokens_prefilled:,} read now; {size_text(cache.store_bytes)} stored)"
    )
