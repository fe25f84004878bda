"""Ways to rank the passages of a document by what one answer attended to.

Owns the methods that `longread eval sources` compares. What a session cites by is evidence.py's:
the best of these on the books.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from longread.evidence import range_sums


@dataclass(frozen=True, eq=False)
class Looked:
    """Attention mass [L, H_kv, S] on the rows of a document, 0 on what stands around it.

    asked: of the question's last token; said: of the answer's other tokens, summed; blank: of the
    last token of a question without words; copying: the heads' weights [L, H_kv]; starts, ends: the
    rows of the passages [P].
    """

    asked: Tensor
    said: Tensor
    num_said: int
    blank: Tensor
    copying: Tensor
    starts: Tensor
    ends: Tensor


@dataclass(frozen=True)
class Method:
    """One way to score passages.

    tokens: `question` is its last token, which begins the answer, `answer` the answer's others;
    contrast: with what an empty question looks at: `less` takes it off, `heads` takes it off each
    head and leaves no head below 0, `ratio` is m log(m / blank) of the shares; passage: `sum`,
    `mean` or `max` of its tokens; copying: weigh heads by how well they copy.
    """

    tokens: str = "both"
    contrast: str = ""
    passage: str = "sum"
    copying: bool = False

    @property
    def name(self) -> str:
        """What differs from the plain way, which is called `attention`."""
        words = [] if self.tokens == "both" else [f"{self.tokens} only"]
        words += [
            {"less": "less blank", "heads": "heads less blank", "ratio": "blank ratio"}.get(
                self.contrast, ""
            )
        ]
        words += ["copying heads"] if self.copying else []
        words += [] if self.passage == "sum" else [self.passage]
        return ", ".join(filter(None, words)) or "attention"

    def scores(self, looked: Looked) -> Tensor:
        """One score for each passage, float64 [P]."""
        mass = _mass(looked, self.tokens)
        blank = looked.blank.double()
        if self.contrast == "heads":
            mass = (mass - blank).clamp(min=0)
        if self.copying:
            weights = looked.copying.double()[..., None]
            mass, blank = mass * weights, blank * weights
        rows, blank_rows = mass.sum(dim=(0, 1)), blank.sum(dim=(0, 1))
        if self.contrast == "less":
            rows = rows - blank_rows
        found = passage_scores(rows, looked.starts, looked.ends, self.passage)
        if self.contrast == "ratio":
            other = passage_scores(blank_rows, looked.starts, looked.ends, self.passage)
            found = found / found.sum().clamp(min=1e-12)
            other = other / other.sum().clamp(min=1e-12)
            found = found * ((found + 1e-9) / (other + 1e-6)).log()
        return found


METHODS: tuple[Method, ...] = (
    Method(),
    Method(passage="mean"),
    Method(passage="max"),
    Method(tokens="question"),
    Method(tokens="answer"),
    Method(copying=True),
    Method(contrast="less"),
    Method(contrast="heads"),
    Method(contrast="ratio"),
    Method(contrast="less", copying=True),
    Method(contrast="less", passage="mean"),
    Method(contrast="less", passage="max"),
    Method(contrast="less", tokens="question"),
    Method(contrast="less", tokens="answer"),
)


def passage_scores(rows: Tensor, starts: Tensor, ends: Tensor, passage: str) -> Tensor:
    """Sum, mean or greatest of the rows of each passage: [S] to [P]."""
    if passage == "max":
        bounds = zip(starts.tolist(), ends.tolist(), strict=True)
        return torch.stack([rows[start:end].max() for start, end in bounds])
    sums = range_sums(rows, starts, ends)
    return sums / (ends - starts) if passage == "mean" else sums


def first_place(order: Sequence[int], wanted: Sequence[bool]) -> int:
    """The place, from 1, of the first passage of `order` that is wanted; 0 where none is."""
    return next((place for place, idx in enumerate(order, 1) if wanted[idx]), 0)


def _mass(looked: Looked, tokens: str) -> Tensor:
    """Mean over the tokens, float64 [L, H_kv, S]. An answer of one token has no others."""
    asked, said = looked.asked.double(), looked.said.double()
    if tokens == "question" or not looked.num_said:
        return asked
    if tokens == "answer":
        return said / looked.num_said
    return (asked + said) / (1 + looked.num_said)
