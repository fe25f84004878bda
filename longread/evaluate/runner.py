"""Answers of many policies to the same questions, on one prefill of each document.

What the model reads and what a policy is told are those of a session: the document, the question,
and then greedy decoding. A question of the document alone is read once for all policies, which
answer side by side where there are kernels for them; in a conversation each policy reads and
answers by itself. One cache serves all samples of a length, so that captured steps stay valid.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from longread.cache import Remembered
from longread.document import Document, Page
from longread.errors import ContextError
from longread.evaluate.coverage import coverage, rows_of
from longread.evaluate.task import Question, Sample
from longread.evaluate.together import Answer, Together, answer_together, room_for_branches
from longread.evaluate.variants import Variant
from longread.model import Decoder
from longread.policies import Policy, Turn
from longread.policies.kept import rows_read
from longread.prompt import ChatFormat, build_prompt, question_ids, tokenize_document
from longread.reread import DocumentRereader
from longread.tokenizer import Tokenizer
from longread.trace import Trace

_ABOUT = 0.8  # of a length: the question and the answer's room are the rest
_SPARE_ROWS = 4096  # for conversations and long answers; more make the cache grow


@dataclass(frozen=True)
class Prompt:
    """A sample as token ids: document [S] int64, and of each question what is read with it.

    copied: of each question the document's rows that its answer copies, if any.
    """

    sample: Sample
    document: Tensor
    questions: tuple[tuple[int, ...], ...]
    copied: tuple[range, ...]

    @property
    def num_rows(self) -> int:
        """Rows of the document, its questions and the longest answers that the cache must hold."""
        questions = self.sample.questions
        rooms = [len(i) + q.max_tokens for i, q in zip(self.questions, questions, strict=True)]
        room = sum(rooms) if self.sample.in_conversation else max(rooms)
        return len(self.document) + room


@dataclass(frozen=True)
class Said:
    """An answer. Rows are those of one KV head in the mean over layers, summed over its steps."""

    text: str
    rows_read: float
    rows_cached: int
    measures: dict[str, float] = field(default_factory=dict)


@dataclass
class Times:
    """Seconds of the work so far. Questions: preparing the policies counts."""

    prefill_s: float = 0.0
    questions_s: float = 0.0
    answers_s: float = 0.0


class Prompts:
    """Samples to token ids. One thread at a time."""

    def __init__(self, tokenizer: Tokenizer, chat: ChatFormat) -> None:
        self._tokenizer = tokenizer
        self._chat = chat

    @property
    def overhead(self) -> int:
        """Tokens of a prompt beside those of its document and question."""
        empty = Sample("", 0, "", (Question("", ()),))
        prompt = self.make(empty)
        return len(prompt.document) + len(prompt.questions[0])

    def make(self, sample: Sample) -> Prompt:
        """The sample's prompt, as a session would read it; an answer's prefix follows it."""
        pages = (Page(0, None, sample.document),)
        document = Document(sample.task, "", "text", "", len(pages), pages, ())
        tokenized = tokenize_document(self._tokenizer, document)
        prompt = build_prompt(self._tokenizer, self._chat, [tokenized])
        questions = []
        for number, question in enumerate(sample.questions):
            first = number == 0 or not sample.in_conversation
            ids = question_ids(self._tokenizer, self._chat, question.text, [sample.task], first)
            questions.append((*ids, *self._tokenizer.encode(question.answer_prefix)))
        rows = tuple(rows_of(q.copied, sample.document, prompt) for q in sample.questions)
        return Prompt(sample, torch.from_numpy(prompt.token_ids).long(), tuple(questions), rows)


class Runner:
    """The policies of one length of prompts, and the cache that they share."""

    def __init__(
        self, decoder: Decoder, tokenizer: Tokenizer, variants: Sequence[Variant], num_tokens: int
    ) -> None:
        """num_tokens: about the longest prompt."""
        self.times = Times()
        self._decoder = decoder
        self._tokenizer = tokenizer
        self._by_products = Remembered()
        num_rows = min(decoder.config.window, num_tokens + _SPARE_ROWS)
        num_rows += room_for_branches(len(variants), 1)
        self._cache = decoder.new_cache(num_rows)
        self._num_tokens = num_tokens
        # Kept from sample to sample, with their indexes, so that their plans stay equal.
        self._policies: dict[tuple[Variant, int], Policy] = {}
        decoder.captured.clear()
        decoder.captured.most = 2 * len(variants) + 1  # each alone, and side by side

    def answers(self, prompt: Prompt, variants: Sequence[Variant]) -> dict[Variant, list[Said]]:
        """What each variant says to each question. Raises ContextError over the model's window."""
        self._read(prompt, len(variants))
        if not prompt.sample.in_conversation:
            return self._together(prompt, variants)
        return {variant: self._conversation(prompt, variant) for variant in variants}

    def _together(self, prompt: Prompt, variants: Sequence[Variant]) -> dict[Variant, list[Said]]:
        """Each question after the document alone, under all variants."""
        group = Together([self._policy(variant, prompt) for variant in variants])
        said: dict[Variant, list[Said]] = {variant: [] for variant in variants}
        for number, (question, ids) in enumerate(
            zip(prompt.sample.questions, prompt.questions, strict=True)
        ):
            self._cache.truncate(len(prompt.document))
            self._prepare(group, prompt, again=number > 0)
            logits = self._ask(group, [], ids)
            started = time.perf_counter()
            answers = answer_together(
                self._decoder, self._cache, group.policies, logits, question.max_tokens
            )
            num_rows = self._cache.length
            for place, policy in enumerate(group.policies):
                if place not in answers:
                    self._cache.truncate(num_rows)
                    answers[place] = self._answer(policy, logits, question)
            self.times.answers_s += time.perf_counter() - started
            covered = self._coverage(group, prompt, number)
            for place, variant in enumerate(variants):
                said[variant].append(self._said(answers[place], covered[place]))
        return said

    def _coverage(self, group: Together, prompt: Prompt, number: int) -> list[dict[str, float]]:
        text, rows = prompt.sample.questions[number].copied, prompt.copied[number]
        if not text:
            return [{} for _ in group.policies]
        self._cache.truncate(len(prompt.document))
        self._prepare(group, prompt, again=True)
        ids = prompt.questions[number], self._tokenizer.encode(f" {text}")
        return coverage(self._decoder, self._cache, group, *ids, rows)

    def _conversation(self, prompt: Prompt, variant: Variant) -> list[Said]:
        """One variant's answers, each question read after the answers before it."""
        said: list[Said] = []
        policy = self._policy(variant, prompt)
        pending: list[int] = []
        self._cache.truncate(len(prompt.document))
        self._prepare(policy, prompt)
        for question, ids in zip(prompt.sample.questions, prompt.questions, strict=True):
            start = self._cache.length
            logits = self._ask(policy, pending, ids)
            started = time.perf_counter()
            answer = self._answer(policy, logits, question)
            self.times.answers_s += time.perf_counter() - started
            said.append(self._said(answer, {}))
            pending = [*pending, *ids, *answer.ids][self._cache.length - start :]
        return said

    def _said(self, answer: Answer, measures: dict[str, float]) -> Said:
        text = self._tokenizer.decode(answer.ids).strip()
        return Said(text, answer.rows_read, answer.rows_cached, measures)

    def _policy(self, variant: Variant, prompt: Prompt) -> Policy:
        """The variant's policy; a budget that is a share counts from the document's rows.

        Documents of about the length count as that long: steps are captured for each budget. Past
        the window it is limited as in a session.
        """
        num_rows = len(prompt.document)
        if num_rows >= _ABOUT * self._num_tokens:
            num_rows = self._num_tokens
        num_rows = min(num_rows, self._decoder.trained_window)
        if (variant, num_rows) not in self._policies:
            for key in [key for key in self._policies if key[0] == variant]:
                del self._policies[key]
            self._policies[variant, num_rows] = variant.make(num_rows, self._decoder.most_of_share)
        return self._policies[variant, num_rows]

    def _read(self, prompt: Prompt, num_variants: int) -> None:
        """Prefill the document into the cleared cache, with room for the variants' answers."""
        questions = prompt.sample.questions
        num_rows, window = prompt.num_rows, self._decoder.config.window
        if num_rows > window:
            raise ContextError(
                f"sample {prompt.sample.number} of {prompt.sample.task} takes {num_rows:,} tokens "
                f"with its answers, but the window of {self._decoder.config.name} is {window:,}: "
                "choose a smaller length (--lengths)"
            )
        started = time.perf_counter()
        self._cache.clear()
        most_tokens = max(question.max_tokens for question in questions)
        self._cache.reserve(num_rows + room_for_branches(num_variants, most_tokens))
        self._by_products = Remembered()
        self._decoder.prefill(prompt.document, self._cache)
        self.times.prefill_s += time.perf_counter() - started

    def _prepare(self, policy: Policy, prompt: Prompt, *, again: bool = False) -> None:
        started = time.perf_counter()
        self._cache.by_products = self._by_products
        rereader = DocumentRereader(self._decoder, prompt.document)
        if again and isinstance(policy, Together):
            policy.begin_anew(self._cache, rereader)
        else:
            policy.prepare(self._cache, rereader)
        self._cache.by_products = None
        self.times.questions_s += time.perf_counter() - started

    def _ask(self, policy: Policy, pending: Sequence[int], ids: Sequence[int]) -> Tensor:
        """Read what is pending of the last answer, and a question; returns logits [V]."""
        started = time.perf_counter()
        start = self._cache.length
        policy.start_turn(Turn(start + len(pending), start + len(pending) + len(ids)))
        logits = self._decoder.extend(torch.tensor([*pending, *ids]), self._cache, policy)
        self._decoder.check_finite(logits)
        self.times.questions_s += time.perf_counter() - started
        return logits

    def _answer(self, policy: Policy, logits: Tensor, question: Question) -> Answer:
        """Decode until an end token or the cap; the last token is then not in the cache."""
        decoder, cache = self._decoder, self._cache
        plan = policy.kernel_plan()
        counter = _RowCounter(decoder) if plan is None else None
        answer = Answer([])
        while True:
            token = logits.argmax(dim=-1, keepdim=True)
            token_id = int(token)
            if token_id in decoder.config.eos_token_ids:
                break
            answer.ids.append(token_id)
            if len(answer.ids) >= question.max_tokens:
                break
            logits = decoder.decode(token, cache, policy, counter)
            answer.rows_cached += cache.length
            if plan is not None:
                answer.rows_read += rows_read(plan, policy.kernel_turn(), cache.length)
        if counter is not None:
            answer.rows_read = counter.rows_read
        return answer


class _RowCounter(Trace):
    """A trace without the mass of rows, for steps in torch operations."""

    def __init__(self, decoder: Decoder) -> None:
        config = decoder.config
        super().__init__(
            config.num_hidden_layers, config.num_key_value_heads, 0, device=decoder.device
        )
        self._read = torch.zeros((), device=decoder.device, dtype=torch.float64)

    def record(self, layer_idx: int, indices: Tensor | None, probs: Tensor) -> None:
        if indices is None:
            self._read += probs.shape[-1]
        else:
            self._read += (indices >= 0).sum() / indices.shape[0]

    @property
    def rows_read(self) -> float:
        """Summed over steps, mean over layers and heads."""
        return float(self._read) / self.mass.shape[0]
