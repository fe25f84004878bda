"""Logits to the next token id: greedy, or temperature and top-p with a seed."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from longread.errors import UsageError


@dataclass(frozen=True)
class SamplingParams:
    """temperature 0 is greedy; top_p in (0, 1]."""

    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0

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

    def sample(self, logits: Tensor) -> Tensor:
        """logits: [V]; returns the id as a [1] int64 tensor on the same device."""
        if self._params.temperature == 0:
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
