"""From attention to passages: what an answer looked at, with page and quote.

What counts is the attention of the question's last token, which begins the answer, and of each
answer token on the rows selected for it.

Owns the ranking of passages by attention mass; never looks at the model's words, so a quote always
stands in the document.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch
from torch import Tensor

from longread.document import document_text
from longread.events import Citation, Passage
from longread.prompt import DocumentPrompt
from longread.trace import Trace

_SENTENCE_END = re.compile(r"[.!?;:][\"'”’)\]]*\s+|\n\s*\n")
_MIN_PASSAGE_CHARS = 40
_MAX_PASSAGE_CHARS = 400
_MIN_CITATION_SHARE = 0.2  # of the best passage's score


@dataclass(frozen=True)
class Span:
    """One passage of the documents: its page, its characters and its rows."""

    document_idx: int
    page_idx: int  # place in Document.pages
    char_start: int  # in document_text of its document
    char_end: int
    token_start: int  # rows of the cache
    token_end: int


class Evidence:
    """The passages of one prompt, ranked by what one answer attended to."""

    def __init__(self, trace: Trace, prompt: DocumentPrompt) -> None:
        self._prompt = prompt
        self._trace = trace
        self._spans = cut_passages(prompt)
        self._row_mass = _row_mass(trace.mass)
        inside = torch.zeros_like(self._row_mass)
        for start, end in prompt.document_spans:
            inside[start:end] = 1.0
        self._row_mass *= inside
        self._row_mass /= self._row_mass.sum().clamp(min=1e-12)
        cumulative = torch.cat((self._row_mass.new_zeros(1), self._row_mass.cumsum(0)))
        starts = torch.tensor([span.token_start for span in self._spans], dtype=torch.int64)
        ends = torch.tensor([span.token_end for span in self._spans], dtype=torch.int64)
        self._scores = cumulative[ends] - cumulative[starts]  # [passages], float64 on the CPU

    def citations(self, limit: int = 3) -> tuple[Citation, ...]:
        """The best passages, at most one of each sentence, best first."""
        best = self._best(limit)
        least = best[0][1] * _MIN_CITATION_SHARE if best else 0.0
        return tuple(
            Citation(*self._place(span), quote=self._text(span), score=score)
            for span, score in best
            if score >= least
        )

    def passages(self, limit: int = 10) -> tuple[Passage, ...]:
        """The most selected passages with the share of heads and layers that chose a row of it."""
        found = []
        for span, score in self._best(limit):
            chosen = self._trace.selected[:, :, span.token_start : span.token_end].any(dim=-1)
            found.append(
                Passage(
                    *self._place(span),
                    text=self._text(span),
                    mass=score,
                    head_share=float(chosen.float().mean()),
                    layer_share=float(chosen.any(dim=1).float().mean()),
                )
            )
        return tuple(found)

    def strip(self, num_slices: int = 240) -> tuple[float, ...]:
        """Attention mass in equal slices of the documents' tokens, in their order; sums to 1."""
        rows = torch.cat([self._row_mass[start:end] for start, end in self._prompt.document_spans])
        if rows.numel() == 0:
            return ()
        edges = torch.linspace(0, rows.numel(), min(num_slices, rows.numel()) + 1).long()
        cumulative = torch.cat((rows.new_zeros(1), rows.cumsum(0)))
        return tuple((cumulative[edges[1:]] - cumulative[edges[:-1]]).tolist())

    def _best(self, limit: int) -> list[tuple[Span, float]]:
        if not self._spans:
            return []
        scores, order = self._scores.topk(min(limit, len(self._spans)))
        return [
            (self._spans[i], score)
            for i, score in zip(order.tolist(), scores.tolist(), strict=True)
            if score > 0
        ]

    def _place(self, span: Span) -> tuple[str, int, str | None]:
        document = self._prompt.documents[span.document_idx].document
        page = document.pages[span.page_idx]
        return document.name, page.page_idx + 1, page.label

    def _text(self, span: Span) -> str:
        document = self._prompt.documents[span.document_idx].document
        return " ".join(document_text(document)[span.char_start : span.char_end].split())


def _row_mass(mass: Tensor) -> Tensor:
    """One weight for each document row, [S] float64 on the CPU. mass: [L, H_kv, S]."""
    return mass.double().sum(dim=(0, 1)).cpu()


def cut_passages(prompt: DocumentPrompt) -> list[Span]:
    """Sentences or short windows that tile the documents; none crosses a page."""
    spans = []
    for document_idx, tokenized in enumerate(prompt.documents):
        first_row, _ = prompt.document_spans[document_idx]
        text = document_text(tokenized.document)
        page_starts = [*(int(start) for start in tokenized.page_char_starts), len(text)]
        starts = torch.from_numpy(tokenized.char_starts)
        read_end = int(tokenized.char_ends[-1]) if len(tokenized.char_ends) else 0
        for page_idx, page in enumerate(tokenized.document.pages):
            page_start = page_starts[page_idx]
            for start, end in _cut(page.text):
                # A document that was cut to fit may end inside a passage.
                end = min(end, read_end - page_start)
                chars = torch.tensor([page_start + start, page_start + end])
                rows = torch.searchsorted(starts, chars.to(starts.dtype)).tolist()
                if rows[0] < rows[1]:
                    bounds = (page_start + start, page_start + end)
                    spans.append(
                        Span(
                            document_idx,
                            page_idx,
                            *bounds,
                            first_row + rows[0],
                            first_row + rows[1],
                        )
                    )
    return spans


def _cut(text: str) -> list[tuple[int, int]]:
    """Cut a page at sentence ends into pieces of 40 to 400 characters where it can be done."""
    pieces, start = [], 0
    ends = [match.end() for match in _SENTENCE_END.finditer(text)]
    for end in [*ends, len(text)]:
        while end - start > _MAX_PASSAGE_CHARS:
            space = text.rfind(" ", start + _MIN_PASSAGE_CHARS, start + _MAX_PASSAGE_CHARS)
            cut = space + 1 if space > 0 else start + _MAX_PASSAGE_CHARS
            pieces.append((start, cut))
            start = cut
        if end - start >= _MIN_PASSAGE_CHARS or (end == len(text) and end > start):
            pieces.append((start, end))
            start = end
    return [(a, b) for a, b in pieces if text[a:b].strip()]
