"""Are the sources of answers right? Questions of books, whose passages that answer are known.

Owns the run: excerpts in pages, the model's answers with their traces, and what each way to rank
passages makes of the same trace. Questions that the excerpt does not answer are asked as well:
those that their book leaves open ("unanswerable"), and those whose passage is not in the excerpt
("elsewhere"). What comes of it in tables is source_results.py's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from longread.cache import KVCache
from longread.document import Document, Page, document_text
from longread.evaluate.bm25 import bm25, coverage
from longread.evaluate.books_qa import BooksQA
from longread.evaluate.copy_heads import copying_heads
from longread.evaluate.source_ranks import METHODS, Looked, first_place
from longread.evaluate.task import Question, Sample
from longread.evaluate.variants import Variant
from longread.evidence import Evidence, cut_passages, row_mass
from longread.model import Decoder
from longread.policies import Policy
from longread.prompt import (
    ChatFormat,
    DocumentPrompt,
    build_prompt,
    question_ids,
    tokenize_document,
)
from longread.reply import Reply, generate
from longread.reread import DocumentRereader, blank_mass
from longread.sampling import Sampler, SamplingParams
from longread.tokenizer import Tokenizer
from longread.trace import Trace

PAGE_CHARS = 1_800
NUM_ELSEWHERE = 2  # questions of other passages that each excerpt is asked
CITED = "as cited"
BM25 = "BM25, question"
BM25_ANSWER = "BM25, question and answer"
METHOD_NAMES = (CITED, *(method.name for method in METHODS), BM25, BM25_ANSWER)
SUPPORT = "support"
_NUM_CITED = 5
_NAME = "book.txt"


@dataclass(frozen=True)
class Sourced:
    """One question, its answer, and where each method has what answers it.

    places: by method, the place from 1 of the first passage on a gold page, and of the first that
    overlaps the gold passage; 0 where none is. signs: by name, figures of how well the answer is
    supported, more being better.
    """

    question: str
    kind: str  # answerable, unanswerable or elsewhere
    answer: str
    right: float
    places: dict[str, tuple[int, int]]
    signs: dict[str, float]


def in_pages(text: str) -> tuple[Page, ...]:
    """The text in pages of at most PAGE_CHARS, cut at white space where there is some."""
    pages, start = [], 0
    while start < len(text):
        end = min(len(text), start + PAGE_CHARS)
        if end < len(text):
            space = max(text.rfind(" ", start, end), text.rfind("\n", start, end))
            end = space + 1 if space > start else end
        pages.append(text[start:end])
        start = end
    return tuple(Page(number, None, page) for number, page in enumerate(pages))


def samples(task: BooksQA, num_tokens: int, most: int, seed: int) -> Iterator[Sample]:
    """The task's samples, each with questions of passages that it lacks added."""
    for number in range(min(most, task.num_samples(num_tokens))):
        sample = task.sample(number, num_tokens, seed)
        others = [
            replace(question, kind="elsewhere")
            for question in task.answerable()
            if question.evidence not in sample.document
        ]
        step = max(len(others) // NUM_ELSEWHERE, 1)
        first = number % step
        strangers = tuple(others[first::step][:NUM_ELSEWHERE])
        yield replace(sample, questions=(*sample.questions, *strangers))


class SourceRunner:
    """One model and one policy, asked of samples one after the other."""

    def __init__(
        self, decoder: Decoder, tokenizer: Tokenizer, chat: ChatFormat, variant: Variant
    ) -> None:
        self._decoder = decoder
        self._tokenizer = tokenizer
        self._chat = chat
        self._variant = variant

    @cached_property
    def _copying(self) -> Tensor:
        return copying_heads(self._decoder, self._tokenizer, self._chat)

    def ask(self, sample: Sample) -> list[Sourced]:
        """Read the sample's document and answer its questions, each of the document alone."""
        pages = in_pages(sample.document)
        document = Document(_NAME, "", "text", "", len(pages), pages, ())
        tokenized = tokenize_document(self._tokenizer, document)
        prompt = build_prompt(self._tokenizer, self._chat, [tokenized])
        token_ids = torch.from_numpy(prompt.token_ids).long()
        num_rows = len(token_ids)
        self._decoder.captured.clear()  # steps that were captured for another cache
        cache = self._decoder.new_cache(num_rows)
        self._decoder.prefill(token_ids, cache)
        blank = blank_mass(self._decoder, cache, self._ids(""))
        asked = _Asked(prompt, blank, self._copying)
        policy = self._variant.make(num_rows)
        found = []
        for number, question in enumerate(sample.questions):
            if number == 0 or policy.evicts or policy.rebuilds:
                policy.prepare(cache, DocumentRereader(self._decoder, token_ids))
            trace = Trace(*blank.shape, device=self._decoder.device)
            snapshot = _Snapshot()
            trace.at_step_end = snapshot
            answer = self._answer(question, cache, policy, trace)
            cache.truncate(num_rows)
            found.append(asked.sourced(question, answer, trace, snapshot.mass))
        return found

    def _ids(self, question: str) -> list[int]:
        return question_ids(self._tokenizer, self._chat, question, [_NAME], True)

    def _answer(self, question: Question, cache: KVCache, policy: Policy, trace: Trace) -> str:
        reply = Reply(0, 0, question.max_tokens)
        sampler = Sampler(SamplingParams(0.0, 1.0, 0), self._decoder.device)
        prompt_ids = self._ids(question.text)
        for _ in generate(
            self._decoder, cache, policy, self._tokenizer, sampler, prompt_ids, trace, reply
        ):
            pass  # the pieces are in the reply
        return "".join(reply.pieces).strip()


class _Snapshot:
    """The mass of a trace as it was when the question had been read."""

    def __init__(self) -> None:
        self.mass = torch.empty(0)

    def __call__(self, trace: Trace) -> None:
        if not trace.num_steps:
            self.mass = trace.mass.clone()


class _Asked:
    """One document of which questions are asked: its passages, and what stands where in it."""

    def __init__(self, prompt: DocumentPrompt, blank: Tensor, copying: Tensor) -> None:
        self._prompt = prompt
        self._blank = self._inside(blank)
        self._blank_rows = row_mass(blank, prompt)
        self._copying = copying
        self._spans = cut_passages(prompt)
        text = document_text(prompt.documents[0].document)
        self._texts = [text[span.char_start : span.char_end] for span in self._spans]
        device = blank.device
        self._starts = torch.tensor([span.token_start for span in self._spans], device=device)
        self._ends = torch.tensor([span.token_end for span in self._spans], device=device)

    def sourced(self, question: Question, answer: str, trace: Trace, asked: Tensor) -> Sourced:
        """Rank the passages by all methods. asked: the trace's mass after the question."""
        evidence = Evidence(trace, self._prompt, self._blank_rows)
        cited = [self._spans.index(span) for span in evidence.sources(_NUM_CITED)]
        orders = {CITED: cited}
        looked = Looked(
            asked=self._inside(asked),
            said=self._inside(trace.mass - asked),
            num_said=trace.num_steps,
            blank=self._blank,
            copying=self._copying,
            starts=self._starts,
            ends=self._ends,
        )
        for method in METHODS:
            orders[method.name] = _best_first(method.scores(looked).tolist())
        by_words = bm25(question.text, self._texts)
        orders[BM25] = _best_first(by_words)
        orders[BM25_ANSWER] = _best_first(bm25(f"{question.text} {answer}", self._texts))
        places: dict[str, tuple[int, int]] = {}
        if question.kind == "answerable":
            hits = self._hits(question.evidence)
            pages = {self._spans[idx].page_idx for idx, hit in enumerate(hits) if hit}
            on_page = [span.page_idx in pages for span in self._spans]
            places = {
                name: (first_place(order, on_page), first_place(order, hits))
                for name, order in orders.items()
            }
        signs = {
            SUPPORT: evidence.support,
            "attention on the text": float(
                row_mass(trace.mass, self._prompt).sum()
                / ((1 + trace.num_steps) * self._blank_rows.sum())
            ),
            "first source's share": sum(c.score for c in evidence.citations(1)),
            "question's words in the sources": coverage(
                question.text, self._texts, [self._texts[idx] for idx in cited[:3]]
            ),
            "BM25 of the best passage": max(by_words, default=0.0),
        }
        right = question.score(answer) if question.kind == "answerable" else 0.0
        return Sourced(question.text, question.kind, answer, right, places, signs)

    def _hits(self, evidence: str) -> list[bool]:
        """Which passages overlap `evidence`, wherever it was cut into pages."""
        starts = self._prompt.documents[0].page_char_starts.tolist()
        pages = self._prompt.documents[0].document.pages
        first = "".join(page.text for page in pages).index(evidence)
        found, begins = [], [0]
        for page in pages:
            begins.append(begins[-1] + len(page.text))
        for span in self._spans:
            shift = begins[span.page_idx] - starts[span.page_idx]
            start, end = span.char_start + shift, span.char_end + shift
            found.append(start < first + len(evidence) and end > first)
        return found

    def _inside(self, mass: Tensor) -> Tensor:
        """The mass with 0 on what stands around the document."""
        ((start, end),) = self._prompt.document_spans
        inside = torch.zeros_like(mass)
        inside[..., start:end] = mass[..., start:end]
        return inside


def _best_first(scores: Sequence[float]) -> list[int]:
    return sorted(range(len(scores)), key=lambda idx: -scores[idx])
