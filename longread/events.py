"""What a session yields while it works: plain frozen dataclasses, no torch, nothing printed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Progress:
    """`done` of `total` `unit`s of one stage; stages come in the order the work is done."""

    stage: str  # download, convert, pack, load, read, tokenize, restore, prefill, save, train
    done: int
    total: int
    unit: str  # bytes, tensors, pages, tokens, steps, seconds


@dataclass(frozen=True)
class Notice:
    """One line for the user beside the answer."""

    message: str
    level: str = "warning"  # info or warning


ProgressFn = Callable[[Progress], None]
NoticeFn = Callable[[Notice], None]
PasswordFn = Callable[[str], str | None]  # a document's name to its password


@dataclass(frozen=True)
class CacheUse:
    """How much of the document's KV came from the store."""

    hit: bool  # every document token was reused
    tokens_reused: int
    tokens_prefilled: int
    store_bytes: int
    key: str


@dataclass(frozen=True)
class DocumentInfo:
    """One document as it was read."""

    name: str
    num_pages: int
    num_tokens: int
    page_starts: tuple[tuple[int, int], ...] = ()  # page number, its first token in the document


@dataclass(frozen=True)
class Opened:
    """The documents are in the cache; questions may come."""

    documents: tuple[DocumentInfo, ...]
    cache: CacheUse


@dataclass(frozen=True)
class Text:
    """The next piece of the answer, complete characters only."""

    text: str


@dataclass(frozen=True)
class Citation:
    """A passage that the answer's tokens attended to; `quote` stands in the document.

    Citations are in the order of what the question and its answer add to the attention.
    """

    document: str
    page: int  # page number from 1
    page_label: str | None  # as the document prints it
    quote: str
    score: float  # share of the attention mass on the document, 0 to 1


@dataclass(frozen=True)
class Passage:
    """One of the passages that an answer attended to most; in the order of citations."""

    document: str
    page: int
    page_label: str | None
    text: str
    mass: float  # share of the attention mass on the document, 0 to 1
    head_share: float  # share of (layer, KV head) pairs that selected a row of it
    layer_share: float  # share of layers in which some head selected a row of it
    marks: tuple[tuple[int, int], ...] = ()  # the words of `text` that drew the most, [start, end)


@dataclass(frozen=True)
class Selection:
    """What the policy kept, over all steps of one answer."""

    policy: str
    vote: str | None
    index: str | None
    budget: int | None  # tokens per KV head; None where the policy keeps all rows
    fraction_kept: float  # rows attended / rows cached, mean over steps, layers and KV heads
    passages: tuple[Passage, ...] = ()
    strip: tuple[float, ...] = ()  # attention mass in equal slices of the documents, sums to 1
    heads: tuple[tuple[float, ...], ...] = ()  # [layers][kv_heads]: share of it on the citations


@dataclass(frozen=True)
class Usage:
    """Token counts of one turn."""

    document_tokens: int
    history_tokens: int
    question_tokens: int
    answer_tokens: int


@dataclass(frozen=True)
class Timings:
    """Seconds of wall time."""

    open_s: float  # models, documents and cache, once a session
    prefill_s: float  # of which prefill
    question_s: float  # reading the question, to the first answer token
    decode_s: float  # the rest of the answer
    total_s: float


@dataclass(frozen=True)
class Answer:
    """One finished turn."""

    text: str
    finish_reason: str  # stop, length or interrupted
    model: str
    citations: tuple[Citation, ...]
    usage: Usage
    cache: CacheUse
    selection: Selection
    timings: Timings
    truncated: bool  # the documents were cut to fit, by --truncate
    supported: bool = True  # False where no passage stands out from what an empty question reads


@dataclass(frozen=True)
class Answered:
    """One of several questions was answered, or why it was not."""

    number: int  # of the question, from 1
    answer: Answer | None = None
    why_not: str = ""


Event = Progress | Notice | Opened | Text | Answer
