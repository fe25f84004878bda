"""Reading again: for the policies that need the queries of the documents or of another text, and
for evidence, which compares an answer with a question that has no words.

Owns that the cache comes out as it went in; what is made of the queries is the policies' matter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from longread.cache import KVCache
from longread.model import Decoder
from longread.policies import Dense, Policy
from longread.trace import Trace

_CHUNK_TOKENS = 2048


@dataclass(frozen=True)
class DocumentRereader:
    """A policies.base.Rereader of the documents whose tokens are `token_ids` [S] int64."""

    decoder: Decoder
    token_ids: Tensor

    @property
    def num_rows(self) -> int:
        return self.token_ids.shape[0]

    @property
    def vocab_size(self) -> int:
        return self.decoder.config.vocab_size

    @property
    def window(self) -> int:
        return self.decoder.config.window

    @property
    def model(self) -> str:
        return self.decoder.config.name

    @property
    def identity(self) -> str:
        return self.decoder.config.identity

    def documents(self, cache: KVCache, observer: Policy) -> None:
        """Show `observer` the documents' queries, layer by layer and chunk by chunk.

        As much work as reading them was. The cache's first S rows are those of the documents; the
        rows of a chunk are written anew meanwhile, and put back as they were.
        """
        length, cache.length = cache.length, 0
        try:
            for chunk in self.token_ids.split(_CHUNK_TOKENS):
                start, end = cache.length, cache.length + chunk.shape[0]
                slabs = (cache.k[:, :, start:end], cache.v[:, :, start:end])
                saved = [rows.clone() for rows in slabs]
                try:
                    self.decoder.extend(chunk, cache, observer)
                finally:
                    for rows, old in zip(slabs, saved, strict=True):
                        rows.copy_(old)
        finally:
            cache.length = length

    def rope_rows(self, start: int, end: int) -> tuple[Tensor, Tensor]:
        return self.decoder.network.rope_rows(start, end)

    def text(self, token_ids: Tensor, observer: Policy) -> None:
        """Show `observer` the queries of other tokens [T] int64, read into a cache of their own."""
        cache = self.decoder.new_cache(token_ids.shape[0])
        observer.prepare(cache)
        self.decoder.extend(token_ids, cache, observer)


def blank_mass(decoder: Decoder, cache: KVCache, token_ids: Sequence[int]) -> Tensor:
    """What the last of `token_ids`, an empty question, attends to on the cache's rows.

    All rows are read, whatever the policy of the answers. Returns [L, H_kv, S] fp32; the cache
    comes out as it went in.
    """
    num_rows, config = cache.length, decoder.config
    shape = (config.num_hidden_layers, config.num_key_value_heads, num_rows)
    trace = Trace(*shape, device=decoder.device)
    try:
        decoder.extend(torch.tensor(token_ids), cache, Dense(), trace)
    finally:
        cache.truncate(num_rows)
    return trace.mass
