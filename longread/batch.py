"""Answers to several questions on the same documents, a token of each in one step.

Each question has a place: rows behind the documents' own, a policy, a trace and a sampler. A place
is given to the next question when its answer is done. The weights are read once for all places;
what is read of the cache differs from place to place. `TorchPlaces` runs anywhere; branches.py has
the places of a captured step.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from longread.cache import KVCache, Remembered
from longread.memory import free_bytes
from longread.model import Decoder
from longread.policies import Butler, Policy, Quest, Rereader, TokenSelect, Turn
from longread.reply import Reply
from longread.sampling import Sampler, SamplingParams, sample_each
from longread.trace import Trace

MOST_PLACES = 64
_MEMORY_SHARE = 2  # of what is free, a half may be taken
_MARGIN_ROWS = 64


@dataclass(frozen=True)
class Question:
    """What is read of a question, from 1 on, and how it is answered."""

    number: int
    ids: Sequence[int]
    max_tokens: int
    sampling: SamplingParams


@dataclass
class Asked:
    """A question in its place, and its answer so far; next_id was sampled, and is not yet read."""

    question: Question
    trace: Trace
    sampler: Sampler
    reply: Reply
    started: float  # time.perf_counter
    next_id: int = 0
    ended: bool = False

    def take(self, token_id: int, end_ids: Container[int]) -> None:
        """Add a sampled token."""
        self.trace.end_step()
        self.next_id, self.ended = token_id, not self.reply.take(token_id, end_ids)


class Places(Protocol):
    """Where answers grow side by side. refills: whether one begins while others go on."""

    num_places: int
    refills: bool

    def read(self, place: int, ids: Sequence[int], trace: Trace) -> Tensor:
        """Read a question into a place that is free; returns the logits [V] of its last token."""

    def step(self, tokens: Mapping[int, int]) -> Tensor:
        """Append a token to each of these places; logits [n, V] fp32, valid until the next step."""


@torch.inference_mode()
def answer_each(
    decoder: Decoder,
    places: Places,
    questions: Iterable[Question],
    new_trace: Callable[[], Trace],
) -> Iterator[Asked]:
    """Yield each question when its answer is whole, in no order.

    Its trace holds until the next one is asked for. Raises ModelError where weights are damaged.
    """
    waiting, active = iter(questions), dict[int, Asked]()
    end_ids = decoder.config.eos_token_ids
    while True:
        if places.refills or not active:
            free = (place for place in range(places.num_places) if place not in active)
            for place, question in zip(free, waiting, strict=False):
                asked = active[place] = Asked(
                    question,
                    new_trace(),
                    Sampler(question.sampling, decoder.device),
                    Reply(0, len(question.ids), question.max_tokens),
                    time.perf_counter(),
                )
                logits = places.read(place, question.ids, asked.trace)
                decoder.check_finite(logits)
                asked.take(int(asked.sampler.sample(logits)), end_ids)
        if not active:
            return
        ended = [place for place, asked in active.items() if asked.ended]
        for place in ended:
            yield active.pop(place)
        if not ended:
            logits = places.step({place: asked.next_id for place, asked in active.items()})
            samplers = [asked.sampler for asked in active.values()]
            sampled = sample_each(samplers, logits)
            for asked, token_id in zip(active.values(), sampled, strict=True):
                asked.take(token_id, end_ids)


def affordable_places(
    decoder: Decoder, cache: KVCache, policy: Policy, most: int, num_own: int
) -> int:
    """How many questions to answer at once, up to `most`; num_own: rows of one with its answer."""
    num_heads = cache.num_layers * cache.k.shape[1]
    counted = num_heads * cache.length * 8  # a trace: four bytes of mass, four of a count
    rows = num_own * cache.num_bytes // cache.capacity
    scores = (cache.length + num_own) * 4 * (decoder.config.num_attention_heads + cache.k.shape[1])
    own = (2 * counted if policy.evicts else 0) + (cache.num_bytes if policy.rebuilds else 0)
    free = free_bytes(decoder.device)
    if free is not None:
        free -= cache.num_bytes // 2  # a slab of a cache that grows is there twice
        most = min(most, free // _MEMORY_SHARE // (counted + rows + scores + own))
    return max(1, most)


class Siblings:
    """A policy for each place. What they make of the documents is made once, where that can be."""

    def __init__(
        self,
        first: Policy,
        make_policy: Callable[[], Policy],
        cache: KVCache,
        rereader: Rereader,
    ) -> None:
        """first: prepared on this cache, and not asked since; make_policy: makes others like it."""
        self.policies = [first]
        self._make_policy = make_policy
        self._cache, self._rereader = cache, rereader
        self._extras = Remembered()

    def reserve(self, num_places: int) -> None:
        """Make policies until each of so many places has one."""
        first = self.policies[0]
        while len(self.policies) < num_places:
            policy = self._make_policy()
            if isinstance(policy, TokenSelect) and isinstance(first, TokenSelect):
                policy.borrow_index(first)
            elif isinstance(policy, Quest) and isinstance(first, Quest):
                policy.borrow_bounds(first)
            elif isinstance(policy, Butler) and isinstance(first, Butler):
                policy.borrow_keys(first)
            else:
                self._prepare(policy)
            self.policies.append(policy)

    def begin(self, place: int, turn: Turn) -> Policy:
        """The policy of a place, for a question on the documents alone."""
        policy = self.policies[place]
        if policy.evicts or policy.rebuilds:
            self._prepare(policy)
        policy.start_turn(turn)
        return policy

    def _prepare(self, policy: Policy) -> None:
        self._cache.by_products = self._extras
        policy.prepare(self._cache, self._rereader)
        self._cache.by_products = None


class TorchPlaces:
    """Steps in torch operations. The questions' own rows are put behind the documents' in turn."""

    refills = True

    def __init__(self, decoder: Decoder, cache: KVCache, siblings: Siblings) -> None:
        self.num_places = len(siblings.policies)
        self._decoder = decoder
        self._cache = cache
        self._siblings = siblings
        self._tokens = decoder.new_cache(self.num_places)  # the rows of one step
        self._answers: dict[int, _Rows] = {}

    def read(self, place: int, ids: Sequence[int], trace: Trace) -> Tensor:
        cache, start = self._cache, self._cache.length
        policy = self._siblings.begin(place, Turn(start, start + len(ids)))
        logits = self._decoder.extend(torch.tensor(ids), cache, policy, trace)
        own = cache.k[:, :, start : cache.length], cache.v[:, :, start : cache.length]
        self._answers[place] = _Rows(policy, trace, len(ids), *map(_with_margin, own))
        cache.truncate(start)
        return logits

    @torch.inference_mode()
    def step(self, tokens: Mapping[int, int]) -> Tensor:
        decoder, network, cache = self._decoder, self._decoder.network, self._cache
        answers = [self._answers[place] for place in tokens]
        ends = [cache.length + answer.num_rows + 1 for answer in answers]
        cache.reserve(max(ends))
        for answer, end in zip(answers, ends, strict=True):
            answer.reserve()
            answer.trace.start_step(end)
        with decoder.on_device():
            turned = [decoder.attention.rope(end - 1, end) for end in ends]
            cos, sin = (torch.cat(tables) for tables in zip(*turned, strict=True))
            hidden, normed = network.embedded(torch.tensor(list(tokens.values())))
            for layer_idx in range(cache.num_layers):
                q = network.queries(layer_idx, normed, cos, sin, self._tokens)
                attended = [
                    self._attend(layer_idx, row, answer, q[row])
                    for row, answer in enumerate(answers)
                ]
                hidden, normed = network.finish(layer_idx, hidden, torch.stack(attended))
            for answer in answers:
                answer.num_rows += 1
            return network.logits(normed).float()

    def _attend(self, layer_idx: int, row: int, answer: _Rows, q: Tensor) -> Tensor:
        """One answer's token, whose key and value are in `row` of the step's; q: [H_q, D]."""
        cache, start = self._cache, self._cache.length
        end = start + answer.num_rows + 1
        for slab, own, new in (
            (cache.k, answer.k, self._tokens.k),
            (cache.v, answer.v, self._tokens.v),
        ):
            own[layer_idx, :, answer.num_rows] = new[layer_idx, :, row]
            slab[layer_idx, :, start:end] = own[layer_idx, :, : answer.num_rows + 1]
        answer.policy.appended(layer_idx, start, end)
        attention = self._decoder.attention
        return attention.step(q, cache, layer_idx, end, answer.policy, answer.trace)


@dataclass
class _Rows:
    """A question's own rows, k and v [L, H_kv, n, D], of which `num_rows` count."""

    policy: Policy
    trace: Trace
    num_rows: int
    k: Tensor
    v: Tensor

    def reserve(self) -> None:
        """Make room for a token."""
        if self.num_rows == self.k.shape[2]:
            self.k, self.v = _with_margin(self.k), _with_margin(self.v)


def _with_margin(rows: Tensor) -> Tensor:
    """A copy with room for as many rows again, and some."""
    layers, heads, num_rows, head_dim = rows.shape
    new = rows.new_empty((layers, heads, 2 * num_rows + _MARGIN_ROWS, head_dim))
    new[:, :, :num_rows] = rows
    return new
