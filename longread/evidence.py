"""From attention to passages: what an answer looked at, with page and quote.

What counts is the attention of the question's last token, which begins the answer, and of each
answer token on the rows selected for it, less what a question without words looks at: that takes
off what draws attention in every text. `longread eval sources` measures it (docs/quality.md).

Owns the ranking of passages; never looks at the model's words, so a quote always stands in the
document.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch
from torch import Tensor

from longread.document import document_text
from longread.events import Citation, Passage, Selection
from longread.policies import Policy
from longread.prompt import DocumentPrompt
from longread.trace import Trace

_MIN_SUPPORT = 0.04  # up to so many rows; both were measured: docs/quality.md
_MIN_SUPPORT_ROWS = 4096
_WORD = re.compile(r"\S+")
_SENTENCE_END = re.compile(r"[.!?;:][\"'”’)\]]*\s+|\n\s*\n")
_MIN_PASSAGE_CHARS = 40
_MAX_PASSAGE_CHARS = 400
_MIN_CITATION_SHARE = 0.2  # of the best passage's score
_MIN_MARK_SHARE = 0.5  # of the most attended word of a passage


@dataclass(frozen=True)
class Span:
    """One passage of the documents: its page, its characters and its rows."""

    document_idx: int
    page_idx: int  # place in Document.pages
    char_start: int  # in document_text of its document
    char_end: int
    token_start: int  # rows of the cache
    token_end: int


def least_support(num_rows: int) -> float:
    """What the best passage of a prompt of `num_rows` rows adds where the text answers.

    The longer the text the less: about as the root of its length.
    """
    return _MIN_SUPPORT * min(1.0, (_MIN_SUPPORT_ROWS / max(num_rows, 1)) ** 0.5)


class Evidence:
    """The passages of one prompt, ranked by what one answer attended to."""

    def __init__(
        self,
        trace: Trace,
        prompt: DocumentPrompt,
        blank: Tensor,
        spans: list[Span] | None = None,
    ) -> None:
        """blank: the `row_mass` of a question without words, of one token; spans: the passages."""
        self._prompt = prompt
        self._trace = trace
        self._spans = cut_passages(prompt) if spans is None else spans
        rows = row_mass(trace.mass, prompt) / (1 + trace.num_steps)
        self._row_lifts = (rows - blank) / blank.sum().clamp(min=1e-12)
        self._row_shares = rows / rows.sum().clamp(min=1e-12)
        starts = torch.tensor([span.token_start for span in self._spans], dtype=torch.int64)
        ends = torch.tensor([span.token_end for span in self._spans], dtype=torch.int64)
        self._lifts = range_sums(self._row_lifts, starts, ends)  # [passages], float64 on the CPU
        self._shares = range_sums(self._row_shares, starts, ends)

    @property
    def support(self) -> float:
        """How much attention the best passage adds, over what all documents have without words."""
        return float(self._lifts.max()) if self._spans else 0.0

    @property
    def supported(self) -> bool:
        """Whether some passage stands out."""
        return self.support >= least_support(len(self._prompt.token_ids))

    def sources(self, limit: int = 3) -> list[Span]:
        """The passages that citations name, best first."""
        best = self._best(limit)
        least = float(self._lifts[best[0]]) * _MIN_CITATION_SHARE if best else 0.0
        return [
            self._spans[i]
            for place, i in enumerate(best)
            if not place or float(self._lifts[i]) >= least > 0
        ]

    def citations(self, limit: int = 3) -> tuple[Citation, ...]:
        """The best passages, at most one of each sentence, best first."""
        return tuple(
            Citation(*self._place(span), quote=self._text(span), score=self._share(span))
            for span in self.sources(limit)
        )

    def passages(self, limit: int = 10) -> tuple[Passage, ...]:
        """The best passages with the share of heads and layers that chose a row of each."""
        found = []
        for span in (self._spans[i] for i in self._best(limit)):
            chosen = self._trace.selected[:, :, span.token_start : span.token_end].any(dim=-1)
            found.append(
                Passage(
                    *self._place(span),
                    text=self._text(span),
                    mass=self._share(span),
                    head_share=float(chosen.float().mean()),
                    layer_share=float(chosen.any(dim=1).float().mean()),
                    marks=self._marks(span),
                )
            )
        return tuple(found)

    def heads(self, limit: int = 3) -> tuple[tuple[float, ...], ...]:
        """For each layer and KV head the share of its attention on the documents in `sources`."""
        mass, spans = self._trace.mass, self.sources(limit)
        if not spans:
            return ()
        found, whole = torch.zeros_like(mass[..., 0]), torch.zeros_like(mass[..., 0])
        for span in spans:
            found += mass[..., span.token_start : span.token_end].sum(dim=-1)
        for start, end in self._prompt.document_spans:
            whole += mass[..., start:end].sum(dim=-1)
        return tuple(tuple(layer) for layer in (found / whole.clamp(min=1e-12)).tolist())

    def selection(self, name: str, policy: Policy) -> Selection:
        """What the policy of that name kept, over all steps of the answer."""
        return Selection(
            policy=name,
            vote=getattr(policy, "vote", None),
            index=getattr(policy, "index", None),
            budget=getattr(policy, "budget", None),
            fraction_kept=self._trace.fraction_kept,
            passages=self.passages(),
            strip=self.strip(),
            heads=self.heads(),
        )

    def strip(self, num_slices: int = 240) -> tuple[float, ...]:
        """Attention mass in equal slices of the documents' tokens, in their order; sums to 1."""
        spans = self._prompt.document_spans
        rows = torch.cat([self._row_shares[start:end] for start, end in spans])
        if rows.numel() == 0:
            return ()
        edges = torch.linspace(0, rows.numel(), min(num_slices, rows.numel()) + 1).long()
        return tuple(range_sums(rows, edges[:-1], edges[1:]).tolist())

    def _best(self, limit: int) -> list[int]:
        """Places in `_spans` of what was attended to at all."""
        if not self._spans:
            return []
        lifts = self._lifts.masked_fill(self._shares <= 0, -torch.inf)
        order = lifts.topk(min(limit, len(self._spans))).indices
        return [i for i in order.tolist() if self._shares[i] > 0]

    def _share(self, span: Span) -> float:
        return float(self._row_shares[span.token_start : span.token_end].sum())

    def _place(self, span: Span) -> tuple[str, int, str | None]:
        document = self._prompt.documents[span.document_idx].document
        page = document.pages[span.page_idx]
        return document.name, page.page_idx + 1, page.label

    def _text(self, span: Span) -> str:
        document = self._prompt.documents[span.document_idx].document
        return " ".join(document_text(document)[span.char_start : span.char_end].split())

    def _marks(self, span: Span) -> tuple[tuple[int, int], ...]:
        """The words of `_text` whose tokens drew the most."""
        tokenized = self._prompt.documents[span.document_idx]
        text = document_text(tokenized.document)
        words = [
            (match.start(), match.end())
            for match in _WORD.finditer(text, span.char_start, span.char_end)
        ]
        first_row = self._prompt.document_spans[span.document_idx][0]
        own = slice(span.token_start - first_row, span.token_end - first_row)
        lifts = self._row_lifts[span.token_start : span.token_end].tolist()
        drawn = [0.0] * len(words)
        bounds = zip(tokenized.char_starts[own], tokenized.char_ends[own], lifts, strict=True)
        for start, end, lift in bounds:
            for number, (word_start, word_end) in enumerate(words):
                if start < word_end and end > word_start:
                    drawn[number] += lift
        least = max(drawn, default=0.0) * _MIN_MARK_SHARE
        marks, at = [], 0
        for (start, end), lift in zip(words, drawn, strict=True):
            if lift > 0 and lift >= least:
                marks.append((at, at + end - start))
            at += end - start + 1
        return tuple(marks)


def row_mass(mass: Tensor, prompt: DocumentPrompt) -> Tensor:
    """Attention on each row of the documents over all heads, [S] float64 on the CPU; 0 elsewhere.

    mass: [L, H_kv, S].
    """
    rows = mass.sum(dim=(0, 1), dtype=torch.float64).cpu()
    inside = torch.zeros_like(rows)
    for start, end in prompt.document_spans:
        inside[start:end] = 1.0
    return rows * inside


def range_sums(rows: Tensor, starts: Tensor, ends: Tensor) -> Tensor:
    """The sum of each range [starts, ends) of rows [S]."""
    cumulative = torch.cat((rows.new_zeros(1), rows.cumsum(0)))
    return cumulative[ends] - cumulative[starts]


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
