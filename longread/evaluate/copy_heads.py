"""How well each head copies: its attention on the right sentence of a text made for the purpose.

The text strews facts of invented places into filler; each fact is asked for, and its answer, which
is known, is read as if the model had said it. A retrieval head (Wu et al., arXiv 2404.15574) looks
at the fact.
"""

from __future__ import annotations

import random

import torch
from torch import Tensor

from longread.document import Document, Page
from longread.model import Decoder
from longread.policies.dense import Dense
from longread.prompt import ChatFormat, build_prompt, question_ids, tokenize_document
from longread.tokenizer import Tokenizer
from longread.trace import Trace

_SEED = 0
_PLACES = (
    *("Arlen", "Bexmoor", "Corvale", "Dunmere", "Elstow", "Farrow", "Gildern", "Harwick"),
    *("Istrel", "Jolby", "Kelso", "Lunden", "Marsk", "Norrby", "Ostrey", "Pellworm"),
    *("Quarley", "Rossby", "Stavern", "Tolmin", "Upsley", "Vardo", "Wexcombe", "Yarrow"),
)
_NAMES = (
    *("Anna Brandt", "Piotr Nowak", "Lucia Ferri", "Omar Haddad", "Greta Lund", "Ivan Petrov"),
    *("Mei Tanaka", "Jonas Weber", "Clara Dubois", "Samuel Okoro", "Nina Kovac", "Hugo Silva"),
)
_THINGS = ("bridge", "library", "harbour", "mill", "school", "tower", "market", "theatre")
_FILLER = (
    "The road goes on along the river, and the fields are green in spring.",
    "Travellers say that the inns there are clean and the bread is good.",
    "In winter the snow lies deep, and few carts come over the pass.",
    "The people keep bees, sell honey, and mend their own nets.",
)


def calibration() -> tuple[str, list[tuple[str, str, str]]]:
    """A text, and of each fact in it: its sentence, a question and the answer."""
    rng = random.Random(_SEED)
    text, facts = [], []
    for number, place in enumerate(_PLACES):
        thing, name = rng.choice(_THINGS), rng.choice(_NAMES)
        year, price = str(rng.randrange(1500, 1990)), str(rng.randrange(100, 999))
        fact = f"The {thing} of {place} was opened in {year} by {name}, who paid {price} crowns."
        asked = (
            (f"In which year was the {thing} of {place} opened?", year),
            (f"Who opened the {thing} of {place}?", name),
            (f"How many crowns were paid for the {thing} of {place}?", price),
        )[number % 3]
        text += [rng.choice(_FILLER), rng.choice(_FILLER), fact]
        facts.append((fact, *asked))
    return " ".join(text), facts


def copying_heads(decoder: Decoder, tokenizer: Tokenizer, chat: ChatFormat) -> Tensor:
    """The share of each head's attention on the text that lies on the right fact, [L, H_kv] fp64.

    Mean over the tokens of all answers; on the decoder's device.
    """
    text, facts = calibration()
    document = Document("facts", "", "text", "", 1, (Page(0, None, text),), ())
    tokenized = tokenize_document(tokenizer, document)
    prompt = build_prompt(tokenizer, chat, [tokenized])
    ((first, end),) = prompt.document_spans
    starts = torch.from_numpy(tokenized.char_starts).long()
    num_rows = len(prompt.token_ids)
    cache = decoder.new_cache(num_rows)
    decoder.prefill(torch.from_numpy(prompt.token_ids).long(), cache)
    config, policy = decoder.config, Dense()
    shape = (config.num_hidden_layers, config.num_key_value_heads)
    right = torch.zeros(shape, device=decoder.device, dtype=torch.float64)
    whole = torch.zeros_like(right)
    for fact, question, answer in facts:
        trace = Trace(*shape, num_rows, device=decoder.device)
        ids = question_ids(tokenizer, chat, question, ["facts"], True)
        decoder.extend(torch.tensor(ids), cache, policy, trace)
        for token_id in tokenizer.encode(answer)[:-1]:
            decoder.decode_with_torch(torch.tensor([token_id]), cache, policy, trace)
        cache.truncate(num_rows)
        at = text.index(fact)
        rows = torch.searchsorted(starts, torch.tensor([at, at + len(fact)])) + first
        right += trace.mass[:, :, int(rows[0]) : int(rows[1])].double().sum(dim=-1)
        whole += trace.mass[:, :, first:end].double().sum(dim=-1)
    return right / whole.clamp(min=1e-12)
