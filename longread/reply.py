"""One answer as it grows: read the question, then sample token after token."""

from __future__ import annotations

import time
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass, field

import torch

from longread.cache import KVCache
from longread.events import Text
from longread.model import Decoder
from longread.policies import Policy, Turn
from longread.sampling import Sampler
from longread.tokenizer import Tokenizer
from longread.trace import Trace


@dataclass
class Reply:
    """What was said so far; finish_reason is `length` until something else ends the answer."""

    num_pending: int  # tokens of the answer before, read with the question
    num_question: int
    max_tokens: int
    ids: list[int] = field(default_factory=list)
    pieces: list[str] = field(default_factory=list)
    finish_reason: str = "length"
    first_token_at: float | None = None  # time.perf_counter

    def take(self, token_id: int, end_ids: Container[int]) -> bool:
        """Add a sampled token, if it is not one that ends the answer; returns whether to go on."""
        self.first_token_at = self.first_token_at or time.perf_counter()
        if token_id in end_ids:
            self.finish_reason = "stop"
            return False
        self.ids.append(token_id)
        return len(self.ids) < self.max_tokens


def generate(
    decoder: Decoder,
    cache: KVCache,
    policy: Policy,
    tokenizer: Tokenizer,
    sampler: Sampler,
    prompt_ids: Sequence[int],
    trace: Trace,
    reply: Reply,
) -> Iterator[Text]:
    """Read `prompt_ids` and sample until an end token or the reply's cap; fills `reply`.

    The last sampled token is not in the cache. Raises ModelError where weights are damaged.
    """
    start = cache.length
    policy.start_turn(Turn(start + reply.num_pending, start + len(prompt_ids)))
    stream = tokenizer.stream_decoder()
    logits = decoder.extend(torch.tensor(prompt_ids), cache, policy, trace)
    decoder.check_finite(logits)
    trace.end_step()
    while True:
        token = sampler.sample(logits)
        token_id = int(token)
        goes_on = reply.take(token_id, decoder.config.eos_token_ids)
        if reply.finish_reason != "stop" and (piece := stream.push(token_id)):
            reply.pieces.append(piece)
            yield Text(piece)
        if not goes_on:
            break
        logits = decoder.decode(token, cache, policy, trace)
        trace.end_step()
    if tail := stream.flush():
        reply.pieces.append(tail)
        yield Text(tail)
