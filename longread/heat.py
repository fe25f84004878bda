"""From a trace to a heat map: how much attention and how many choices each passage got.

Owns the sums per layer, KV head and answer token over passages; what a passage is, and which of
them are sources, is evidence.py's.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from longread.document import document_text
from longread.errors import UsageError
from longread.evidence import Span, cut_passages
from longread.model_config import ModelConfig
from longread.prompt import DocumentPrompt
from longread.reading import Heat, ReadDocument, ReadPage
from longread.tokenizer import Tokenizer
from longread.trace import Trace


def read_pages(prompt: DocumentPrompt) -> tuple[ReadDocument, ...]:
    """The documents as the model read them, with the passages of `cut_passages` in each page."""
    ranges: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for span in cut_passages(prompt):
        ranges.setdefault((span.document_idx, span.page_idx), []).append(
            (span.char_start, span.char_end)
        )
    found = []
    for document_idx, tokenized in enumerate(prompt.documents):
        document = tokenized.document
        text = document_text(document)
        read_end = int(tokenized.char_ends[-1]) if len(tokenized.char_ends) else 0
        pages = []
        for page_idx, page in enumerate(document.pages):
            start = int(tokenized.page_char_starts[page_idx])
            if start >= read_end and page_idx:  # cut to fit before this page
                break
            inside = ranges.get((document_idx, page_idx), ())
            pages.append(
                ReadPage(
                    page.page_idx + 1,
                    page.label,
                    text[start : min(start + len(page.text), read_end)],
                    tuple((a - start, b - start) for a, b in inside),
                )
            )
        found.append(ReadDocument(document.name, document.kind, tuple(pages)))
    return tuple(found)


class PassageBounds:
    """The rows of each passage, for sums over them on the trace's device."""

    def __init__(self, spans: Sequence[Span], device: torch.device) -> None:
        self.starts = torch.tensor([span.token_start for span in spans], device=device).long()
        self.ends = torch.tensor([span.token_end for span in spans], device=device).long()

    def sums(self, rows: Tensor) -> Tensor:
        """Sum the rows of each passage: [..., S] to float64 [..., passages]."""
        cumulative = rows.double().cumsum(-1)
        zero = torch.zeros_like(cumulative[..., :1])
        cumulative = torch.cat((zero, cumulative), dim=-1)
        return cumulative[..., self.ends] - cumulative[..., self.starts]


class TokenHeat:
    """The sums of each step of an answer; a trace calls it when one is done."""

    def __init__(self, bounds: PassageBounds) -> None:
        self._bounds = bounds
        self._mass: list[Tensor] = []  # cumulative, [passages] each
        self._chosen: list[Tensor] = []
        self._asked: Tensor | None = None

    def __call__(self, trace: Trace) -> None:
        """Keep where the sums over all layers and KV heads stand now."""
        mass = trace.mass.sum(dim=(0, 1), dtype=torch.float64)
        self._mass.append(self._bounds.sums(mass))
        self._chosen.append(self._bounds.sums(trace.selected.sum(dim=(0, 1))))
        if not trace.num_steps:
            # A trace counts no choices while the question is read; what was read has some mass.
            self._asked = self._bounds.sums((trace.mass > 0).sum(dim=(0, 1)))

    def per_step(self, queries_per_kv: int) -> tuple[np.ndarray, np.ndarray]:
        """What each step added: mass and choices, float64 [steps, passages].

        queries_per_kv: a choice is counted once for each query head.
        """
        chosen = _differences(self._chosen) / queries_per_kv
        if self._asked is not None:
            chosen[0] = self._asked.cpu().numpy()
        return _differences(self._mass), chosen


class Reading:
    """What a session read, and the heat of its last answer.

    With `follows_tokens` the next answers' tokens are told apart, at the price of a sum over the
    trace at each step; without it there is no heat.
    """

    def __init__(self, prompt: DocumentPrompt, tokenizer: Tokenizer, config: ModelConfig) -> None:
        self.follows_tokens = False
        self._prompt = prompt
        self._tokenizer = tokenizer
        self._queries_per_kv = config.num_attention_heads // config.num_key_value_heads
        self._last: tuple[Trace, TokenHeat, Sequence[int]] | None = None

    @cached_property
    def documents(self) -> tuple[ReadDocument, ...]:
        """The pages that the model read."""
        return read_pages(self._prompt)

    def follow(self, trace: Trace) -> None:
        """An answer begins, with this trace."""
        self._last = None
        if self.follows_tokens:
            trace.at_step_end = TokenHeat(PassageBounds(self._spans, trace.mass.device))

    def finish(self, trace: Trace, token_ids: Sequence[int]) -> None:
        """The answer is whole, or as whole as it gets."""
        if isinstance(trace.at_step_end, TokenHeat):
            self._last = trace, trace.at_step_end, token_ids

    def forget(self) -> None:
        """There is no last answer any more."""
        self._last = None

    def heat(self) -> Heat:
        """The heat of the last answer; UsageError where it was not followed."""
        if self._last is None:
            raise UsageError("where the last answer looked is not known any more; ask it again")
        trace, steps, token_ids = self._last
        stream = self._tokenizer.stream_decoder()
        pieces = [stream.push(token_id) for token_id in token_ids]
        if pieces:
            pieces[-1] += stream.flush()
        return heat_of(trace, self._spans, pieces, steps, self._queries_per_kv)

    @cached_property
    def _spans(self) -> list[Span]:
        return cut_passages(self._prompt)


def heat_of(
    trace: Trace,
    spans: Sequence[Span],
    tokens: Sequence[str],
    steps: TokenHeat,
    queries_per_kv: int,
) -> Heat:
    """The heat of one answer. tokens: its pieces, one a token; steps: one a token, or more."""
    bounds = PassageBounds(spans, trace.mass.device)
    lens = (bounds.ends - bounds.starts).double().cpu().numpy()
    # A layer at a time: all of them in float64 would be twice the trace.
    mass = np.stack([bounds.sums(layer).cpu().numpy() for layer in trace.mass])
    chosen = np.stack([bounds.sums(layer).cpu().numpy() for layer in trace.selected])
    num_layers, num_kv_heads = mass.shape[:2]
    step_mass, step_chosen = steps.per_step(queries_per_kv)
    num_tokens = min(len(tokens), len(step_mass))
    step_chosen = step_chosen[:num_tokens] / (lens * num_layers * num_kv_heads)
    step_mass = step_mass[:num_tokens]
    step_mass = step_mass / step_mass.sum(axis=-1, keepdims=True).clip(min=1e-12)
    return Heat(
        attention=(mass / max(float(mass.sum()), 1e-12)).astype(np.float32),
        chosen=(chosen / (lens * queries_per_kv * max(trace.num_steps, 1))).astype(np.float32),
        tokens=tuple(tokens[:num_tokens]),
        token_attention=step_mass.astype(np.float32),
        token_chosen=step_chosen.clip(0.0, 1.0).astype(np.float32),
    )


def _differences(cumulative: Sequence[Tensor]) -> np.ndarray:
    if not cumulative:
        return np.zeros((0, 0))
    stacked = torch.stack(list(cumulative)).cpu().numpy()
    return np.diff(stacked, axis=0, prepend=0.0)
