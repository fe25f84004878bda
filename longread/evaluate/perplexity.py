"""Perplexity of a text under each form of the weights, beside the first.

The text is cut into pieces that are read by themselves; each token after a piece's first is
predicted from those before it, with dense attention and every product through the form's matrices.
The difference between two forms is taken token by token, so that its error is that of the forms
and not that of the text.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from longread.events import Progress, ProgressFn
from longread.model import Decoder
from longread.policies import Dense

_CHUNK_TOKENS = 128  # of which the logits are in memory at once


@dataclass(frozen=True)
class Losses:
    """losses: [N] fp64, the negative log of each predicted token's probability."""

    form: str
    losses: Tensor
    seconds: float

    @property
    def perplexity(self) -> float:
        """e to the mean loss."""
        return math.exp(float(self.losses.mean()))

    def beside(self, reference: Losses) -> tuple[float, float]:
        """By what share the perplexity is higher than the reference's, and its standard error."""
        difference = self.losses - reference.losses
        ratio = math.exp(float(difference.mean()))
        error = float(difference.std()) / math.sqrt(len(difference))
        return ratio - 1, ratio * error


def pieces(token_ids: Sequence[int], length: int, most: int) -> list[Tensor]:
    """The first `most` pieces of `length` tokens; one shorter where the text is."""
    starts = range(0, max(1, len(token_ids) - length + 1), length)
    return [torch.tensor(token_ids[start : start + length]) for start in starts][:most]


def measure(decoder: Decoder, form: str, texts: Sequence[Tensor], progress: ProgressFn) -> Losses:
    """Read each piece. progress is told of tokens. Raises ContextError past the window."""
    started = time.perf_counter()
    num_tokens = sum(len(text) for text in texts)
    losses, done = [], 0
    for text in texts:
        for loss in _losses(decoder, text):
            losses.append(loss)
            done += _CHUNK_TOKENS
            progress(Progress(f"perplexity {form}", min(done, num_tokens), num_tokens, "tokens"))
    return Losses(form, torch.cat(losses), time.perf_counter() - started)


def _losses(decoder: Decoder, text: Tensor) -> Iterator[Tensor]:
    cache, policy = decoder.new_cache(len(text)), Dense()
    wanted = text[1:].to(decoder.device)
    for start in range(0, len(text) - 1, _CHUNK_TOKENS):
        end = min(start + _CHUNK_TOKENS, len(text) - 1)
        logits = decoder.all_logits(text[start:end], cache, policy)
        chosen = logits.gather(1, wanted[start:end, None])[:, 0]
        yield (logits.logsumexp(dim=1) - chosen).double().cpu()
