"""What the model read and where an answer looked in it: plain data, no torch, nothing printed.

Owns the form that pages, passages and their heat are handed on in; heat.py makes them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from longread.errors import UsageError
from longread.page_ranges import page_list
from longread.plain_text import one_line, place_text


@dataclass(frozen=True)
class ReadPage:
    """One page, as far as it was read; `passages` are ranges of characters of `text`."""

    number: int  # from 1, its place in the file
    label: str | None  # as the document prints it
    text: str
    passages: tuple[tuple[int, int], ...] = ()

    @property
    def place(self) -> str:
        """`p. 12 (label xii)`, or the heading where there are no pages."""
        return place_text(self.number, self.label)


@dataclass(frozen=True)
class ReadDocument:
    """The pages of one document that the model read, in their order."""

    name: str
    kind: str  # as in document.Document
    pages: tuple[ReadPage, ...]


@dataclass(frozen=True, eq=False)
class Heat:
    """What one answer looked at, per passage, in the order of all documents' passages (P).

    Attention is a share of the probability on all documents' rows; choice is the share of a
    passage's rows that were read, mean over the answer's steps.
    """

    attention: np.ndarray  # float32 [layers, kv_heads, P]
    chosen: np.ndarray  # float32 [layers, kv_heads, P]
    tokens: tuple[str, ...]  # the answer's pieces; together its text
    token_attention: np.ndarray  # float32 [tokens, P], over all layers and KV heads
    token_chosen: np.ndarray  # float32 [tokens, P]


class ReadingLike(Protocol):
    """What the command line needs of `longread.heat.Reading`."""

    follows_tokens: bool  # set it before a question whose heat is wanted

    @property
    def documents(self) -> Sequence[ReadDocument]:
        """The pages that the model read."""

    def heat(self) -> Heat:
        """The heat of the last answer; UsageError where it was not followed."""


def find_page(documents: Sequence[ReadDocument], wanted: str) -> tuple[ReadDocument, ReadPage]:
    """Return the page of `12`, of the label `xii`, or of `12 2`: the second document's.

    UsageError where there is none.
    """
    name, _, last = wanted.rpartition(" ")
    found = _page_of(documents[0], wanted)
    if found is None and last.isdecimal() and 1 <= int(last) <= len(documents):
        documents, wanted = documents[int(last) - 1 :], name.strip()
        found = _page_of(documents[0], wanted)
    if found is None:
        read = page_list([page.number - 1 for page in documents[0].pages])
        raise UsageError(
            f"there is no page {one_line(wanted, 40)} of {documents[0].name} in what was read: "
            f"{read}"
        )
    return documents[0], found


def _page_of(document: ReadDocument, wanted: str) -> ReadPage | None:
    """By number, else by label: the number is what citations show first."""
    by_label = None
    for page in document.pages:
        if str(page.number) == wanted:
            return page
        if by_label is None and page.label == wanted:
            by_label = page
    return by_label


def find_quote(text: str, quote: str) -> tuple[int, int] | None:
    """Return where `quote` stands in `text`, whatever the white space; None where it does not."""
    places = [place for place, char in enumerate(text) if not char.isspace()]
    wanted = "".join(quote.split())
    at = "".join(text.split()).find(wanted) if wanted else -1
    if at < 0:
        return None
    return places[at], places[at + len(wanted) - 1] + 1
