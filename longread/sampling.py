"""Logits to the next token id: greedy, or temperature and top-p with a seed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from longread.errors import UsageError

_SEEDS = 1 << 63


@dataclass(frozen=True)
class SamplingParams:
    """temperature 0 is greedy; top_p in (0, 1]."""

    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0

    def of_question(self, number: int) -> SamplingParams:
        """Those of a question among others, by its number from 1: the first has this seed."""
        return replace(self, seed=(self.seed + number - 1) % _SEEDS)

    def __post_init__(self) -> None:
        if self.temperature < 0:
            raise UsageError(f"temperature must be 0 or more, not {self.temperature}")
        if not 0 < self.top_p <= 1:
            raise UsageError(f"top-p must be over 0 and at most 1, not {self.top_p}")


class Sampler:
    """Draws ids; the same seed and logits give the same ids."""

    def __init__(self, params: SamplingParams, device: torch.device) -> None:
        self._params = params
        self._generator = torch.Generator(device=device).manual_seed(params.seed)

    @property
    def is_greedy(self) -> bool:
        """Whether it takes the likeliest token."""
        return self._params.temperature == 0

    def sample(self, logits: Tensor) -> Tensor:
        """logits: [V]; returns the id as a [1] int64 tensor on the same device."""
        if self.is_greedy:
            return logits.argmax(dim=-1, keepdim=True)
        # In double precision and from the maximum down, so that no temperature overflows.
        above = (logits - logits.max()).double() / self._params.temperature
        probs = torch.softmax(above, dim=-1)
        if self._params.top_p < 1:
            # Keep the smallest set of ids whose probabilities reach top_p (arXiv 1904.09751).
            ordered, ids = probs.sort(descending=True)
            outside = ordered.cumsum(dim=-1) - ordered >= self._params.top_p
            outside[:1] = False
            probs = torch.zeros_like(probs).scatter_(-1, ids, ordered.masked_fill(outside, 0.0))
        return torch.multinomial(probs, 1, generator=self._generator)


def sample_each(samplers: Sequence[Sampler], logits: Tensor) -> list[int]:
    """The ids that the samplers draw from a row of logits [n, V] each."""
    if all(sampler.is_greedy for sampler in samplers):
        return logits.argmax(dim=-1).tolist()
    return [int(sampler.sample(row)) for sampler, row in zip(samplers, logits, strict=True)]
