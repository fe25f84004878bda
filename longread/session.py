"""One conversation over a set of documents: open them, ask, undo. Yields events, never prints."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from typing import BinaryIO

import torch

from longread import context
from longread.batch import MOST_PLACES, Question
from longread.cache import KVCache
from longread.config import Settings
from longread.errors import ContextError, UsageError
from longread.events import (
    Answered,
    DocumentInfo,
    Event,
    Notice,
    Opened,
    PasswordFn,
)
from longread.evidence import row_mass
from longread.grounds import Grounds
from longread.heat import Reading
from longread.history import Turn as PastTurn
from longread.history import answer_settings
from longread.ingest import (
    base_key,
    document_info,
    fill_cache,
    fit_prompt,
    read_documents,
)
from longread.live import Emit, Live, live
from longread.model import Decoder
from longread.packed import choose_weights
from longread.policies import Turn
from longread.prompt import ChatFormat, DocumentPrompt, question_ids
from longread.reply import Reply, generate
from longread.reread import DocumentRereader, blank_mass
from longread.sampling import Sampler, SamplingParams
from longread.side_by_side import answer_all
from longread.store import Store
from longread.tokenizer import Tokenizer
from longread.trace import Trace
from longread.weights import load_config, prepare


class Session:
    """Documents in a cache and the turns asked of them. One thread at a time."""

    def __init__(self, settings: Settings, *, keep_steps: bool = False) -> None:
        """keep_steps: keep the selected rows of every step in `trace.steps`."""
        self.turns: list[PastTurn] = []
        self.documents: tuple[DocumentInfo, ...] = ()
        self.trace: Trace | None = None
        self._settings = settings
        self._keep_steps = keep_steps
        self._pending_ids: list[int] = []  # answer tokens that are not in the cache yet
        self._marks: list[tuple[int, list[int]]] = []  # (cache length, pending) before each turn
        if settings.threads:
            torch.set_num_threads(settings.threads)

    def open(
        self,
        sources: Sequence[str],
        *,
        pages: str | None = None,
        password: PasswordFn | None = None,
        stdin: BinaryIO | None = None,
    ) -> Iterator[Event]:
        """Read the documents and fill the cache; the last event is Opened.

        sources: paths, or `-` for stdin. Raises the LongreadError of what failed.
        """

        def call(worker: Live) -> Opened:
            def ask_password(name: str) -> str | None:
                return worker.ask(lambda: password(name)) if password is not None else None

            return self._open(sources, pages, ask_password, stdin, worker.emit)

        opened = yield from live(call)
        yield opened

    def ask(self, question: str) -> Iterator[Event]:
        """Answer from the documents and the turns so far; the last event is Answer.

        Ctrl-C ends the answer with finish_reason `interrupted` and what was said until then.
        Raises UsageError for an empty question, ContextError where the window is full.
        """
        started = time.perf_counter()
        pending, own_ids = self._pending_ids, self._question_ids(question)
        start = self._cache.length
        room = self._room(start + len(pending), len(own_ids))
        self._marks.append((start, pending))
        self._pending_ids = []
        num_rows, keeps_steps = len(self._prompt.token_ids), self._keep_steps
        self.trace = self._decoder.new_trace(num_rows, keep_steps=keeps_steps)
        self.reading.follow(self.trace)
        reply = Reply(len(pending), len(own_ids), min(self._settings.max_tokens, room))
        try:
            try:
                yield from generate(
                    self._decoder,
                    self._cache,
                    self._policy,
                    self._tokenizer,
                    Sampler(self._sampling, self._decoder.device),
                    pending + own_ids,
                    self.trace,
                    reply,
                )
            except KeyboardInterrupt:
                reply.finish_reason = "interrupted"
            self._pending_ids = (pending + own_ids + reply.ids)[self._cache.length - start :]
            answer = self._grounds.answer(
                reply, self.trace, self._policy, self._settings.policy, started, start
            )
            self.reading.finish(self.trace, reply.ids)
        except BaseException:  # a fault, or nobody listens any more: as if never asked
            self._forget_to(*self._marks.pop())
            raise
        self.turns.append(PastTurn(question, answer, answer_settings(self._settings)))
        yield answer

    def ask_each(
        self, questions: Iterable[tuple[int, str]], most: int = MOST_PLACES
    ) -> Iterator[Answered]:
        """Answer each question from the documents alone, up to `most` at once, in no order.

        questions: numbers from 1, by which their seeds go, and texts. One that does not fit the
        window is answered by why. Ctrl-C ends it. Raises UsageError for an empty question.
        """
        assert not self.turns, "questions that are answered at once follow no other"
        decoder, cache, settings = self._decoder, self._cache, self._settings
        fitting: list[Question] = []
        for number, text in questions:
            ids = self._question_ids(text)
            try:
                room = min(settings.max_tokens, self._room(cache.length, len(ids)))
            except ContextError as error:
                yield Answered(number, why_not=str(error))
                continue
            sampling = self._sampling.of_question(number)
            fitting.append(Question(number, ids, room, sampling))
        yield from answer_all(
            decoder, cache, self._policy, settings, self._grounds, self._tokenizer, fitting, most
        )

    def undo(self) -> bool:
        """Forget the last turn; False where there is none."""
        if not self.turns:
            return False
        self.turns.pop()
        self.reading.forget()
        self._forget_to(*self._marks.pop())
        return True

    def configure(self, settings: Settings) -> None:
        """Take another policy, budget or sampling for the next question; UsageError if bad."""
        sampling = _sampling(settings)
        policy = context.answering_policy(settings, self._decoder, len(self._prompt.token_ids))
        token_ids = torch.from_numpy(self._prompt.token_ids).long()
        policy.prepare(self._cache, DocumentRereader(self._decoder, token_ids))
        self._settings, self._sampling, self._policy = settings, sampling, policy

    def restore(self, turns: Sequence[PastTurn]) -> Iterator[Event]:
        """Put saved turns back on the cache, as if they had just been asked."""
        for turn in turns:
            ids = self._pending_ids + self._question_ids(turn.question)
            mark = (self._cache.length, self._pending_ids)
            start = self._cache.length
            self._policy.start_turn(Turn(start + len(self._pending_ids), start + len(ids)))
            self._decoder.extend(torch.tensor(ids), self._cache, self._policy)
            self._marks.append(mark)
            self._pending_ids = self._tokenizer.encode(turn.answer.text)
            self.turns.append(turn)
        yield from ()

    def close(self) -> None:
        """Free the device's memory; the session cannot be used after."""
        self._cache.truncate(0)
        del self._cache, self._decoder, self._policy

    def _open(
        self,
        sources: Sequence[str],
        pages: str | None,
        password: PasswordFn | None,
        stdin: BinaryIO | None,
        emit: Emit,
    ) -> Opened:
        started = time.perf_counter()
        settings = self._settings
        self._sampling = _sampling(settings)
        model_dir = prepare(settings.model, settings.models_dir, emit, emit)
        self._config = load_config(model_dir)
        self._tokenizer = Tokenizer.load(model_dir)
        self._chat = ChatFormat.load(model_dir)
        store = None
        if not settings.no_cache:
            store = Store(settings.cache_dir, settings.cache_max_bytes)
        tokenized, record_keys = read_documents(
            sources,
            self._tokenizer,
            store,
            emit,
            pages=pages,
            password=password,
            stdin=stdin,
        )
        reserve = context.QUESTION_RESERVE + settings.max_tokens
        way = context.way_to_read(settings, self._tokenizer, self._chat, tokenized, self._config)
        self._config = way.config(self._config)
        self._prompt: DocumentPrompt
        self._prompt, truncated = fit_prompt(
            self._tokenizer, self._chat, tokenized, self._config, reserve, settings.truncate
        )
        if truncated:
            num_read = sum(len(item.token_ids) for item in self._prompt.documents)
            num_all = sum(len(item.token_ids) for item in tokenized)
            emit(Notice(f"only the first {num_read:,} of {num_all:,} tokens are read (--truncate)"))
        self._decoder: Decoder = Decoder.load(
            model_dir,
            settings.device,
            settings.dtype,
            weights=choose_weights(settings, model_dir, emit, emit),
            past_window=way.reading,
            stretch=way.stretch,
        )
        num_rows = len(self._prompt.token_ids)
        if notice := context.reading_notice(settings, way, self._decoder, num_rows):
            emit(notice)
        if slow := self._decoder.slow_because():
            emit(Notice(f"answers come through torch's own operations, which is slow: {slow}"))
        self._cache: KVCache = self._decoder.new_cache(
            context.rows_for(settings, self._config, num_rows)
        )
        self._policy = context.answering_policy(settings, self._decoder, num_rows)
        base = base_key(self._decoder, self._tokenizer, self._chat, settings)
        prefill_started = time.perf_counter()
        cache_use = fill_cache(
            self._prompt,
            self._decoder,
            self._cache,
            self._policy,
            settings,
            store,
            base,
            record_keys,
            emit,
        )
        ended = time.perf_counter()
        self.documents = tuple(map(document_info, self._prompt.documents))
        mass = blank_mass(self._decoder, self._cache, self._ids_of("", first=True))
        self._grounds = Grounds(
            self._config.name,
            self._prompt,
            row_mass(mass, self._prompt),
            cache_use,
            truncated,
            open_s=time.perf_counter() - started,
            prefill_s=0.0 if cache_use.hit else ended - prefill_started,
        )
        self.reading = Reading(self._prompt, self._tokenizer, self._config)
        return Opened(self.documents, cache_use)

    def _room(self, num_before: int, num_own: int) -> int:
        """Tokens that an answer may have. Raises ContextError where there is none."""
        room = self._config.window - num_before - num_own
        if room > 0:
            return room
        remedy = "start a new conversation, or undo turns" if self.turns else "shorten it"
        raise ContextError(
            f"{num_before:,} tokens come before the question's {num_own:,}, but "
            f"the window of {self._config.name} is {self._config.window:,}: {remedy}"
        )

    def _forget_to(self, num_rows: int, pending_ids: list[int]) -> None:
        self._cache.truncate(num_rows)
        self._pending_ids = pending_ids

    def _question_ids(self, question: str) -> list[int]:
        if not question.strip():
            raise UsageError("the question is empty")
        return self._ids_of(question, first=not self.turns)

    def _ids_of(self, question: str, *, first: bool) -> list[int]:
        names = [info.name for info in self.documents]
        return question_ids(self._tokenizer, self._chat, question, names, first)


def _sampling(settings: Settings) -> SamplingParams:
    return SamplingParams(settings.temperature, settings.top_p, settings.seed)
