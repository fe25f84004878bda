"""Coverage: whether a policy reads the text that an answer must copy, at the steps that copy it.

TokenButler's hit rate (arXiv 2503.07518) and two figures beside it. A session reads the question
densely, so the answer's first token sees every row. Here the question's last token is a decode step
of its own, so that the policy selects for the token that begins the copy; the tokens of the copy
are then given, whatever the model would say.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from longread.cache import KVCache
from longread.evaluate.together import Together
from longread.model import Decoder
from longread.policies import Policy, Turn
from longread.prompt import DocumentPrompt
from longread.trace import Trace


def rows_of(text: str, document: str, prompt: DocumentPrompt) -> range:
    """The rows of a prompt of one document whose tokens touch the first `text` in it."""
    at = document.index(text)
    (tokenized,), ((first, _),) = prompt.documents, prompt.document_spans
    start = int(np.searchsorted(tokenized.char_ends, at, side="right"))
    end = int(np.searchsorted(tokenized.char_starts, at + len(text)))
    return range(first + start, first + end)


@torch.inference_mode()
def coverage(
    decoder: Decoder,
    cache: KVCache,
    group: Together,
    question: Sequence[int],
    copied: Sequence[int],
    rows: range,
) -> list[dict[str, float]]:
    """Of each policy of the group, from 0 to 1:

    `coverage, heads`: the share of (layer, KV head) pairs that read one of `rows` or more at the
    step that predicts the first copied token; `coverage, rows`: the share of `rows` that they read
    there, in the mean over all pairs; `coverage, any`: whether each of `rows` was read by any pair
    at any step that copies.

    question, copied: token ids; the cache holds the document, for which the group is prepared.
    """
    start = cache.length
    *asked, last = question
    group.start_turn(Turn(start, start + len(asked)))
    decoder.extend(torch.tensor(asked), cache, group)
    end = cache.length
    found = []
    for policy in group.policies:
        cache.truncate(end)
        read = _rows_read(decoder, cache, policy, (last, *copied[:-1]), rows)
        found.append(
            {
                "coverage, heads": float(read[0].any(dim=-1).double().mean()),
                "coverage, rows": float(read[0].double().mean()),
                "coverage, any": float(read.flatten(0, 2).any(dim=0).all()),
            }
        )
    return found


def _rows_read(
    decoder: Decoder, cache: KVCache, policy: Policy, token_ids: Sequence[int], rows: range
) -> Tensor:
    """Which of `rows` each head read at the step of each token, bool [steps, L, H_kv, rows]."""
    trace = _Reads(decoder, rows)
    for token_id in token_ids:
        decoder.decode_with_torch(torch.tensor([token_id]), cache, policy, trace)
    return torch.stack(trace.read).unflatten(0, (len(token_ids), -1))


class _Reads(Trace):
    """Which of some rows each KV head reads, [H_kv, rows] a step and layer; no attention mass."""

    def __init__(self, decoder: Decoder, rows: range) -> None:
        config = decoder.config
        shape = (config.num_hidden_layers, config.num_key_value_heads)
        super().__init__(*shape, 0, device=decoder.device)
        self._rows = torch.arange(rows.start, rows.stop, device=decoder.device)
        self.read: list[Tensor] = []

    def record(self, layer_idx: int, indices: Tensor | None, probs: Tensor) -> None:
        num_kv_heads = self.mass.shape[1]
        if indices is None:
            read = self._rows.new_ones((num_kv_heads, len(self._rows)), dtype=torch.bool)
        else:
            sets = torch.stack([torch.isin(self._rows, own) for own in indices])
            # One set for all heads, one a KV head, or one for each of its query heads.
            groups = sets.expand(max(len(sets), num_kv_heads), -1)
            read = groups.unflatten(0, (num_kv_heads, -1)).any(dim=1)
        self.read.append(read)
