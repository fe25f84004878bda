"""BM25: passages ranked by the words that they share with a question, the baseline of sources.

Robertson and Zaragoza, "The Probabilistic Relevance Framework: BM25 and Beyond" (2009), with the
inverse document frequency log(1 + (N - n + 0.5) / (n + 0.5)), which is never negative.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

_K1 = 1.5  # how soon further occurrences of a word stop counting
_B = 0.75  # how much long passages pay for their length


def words(text: str) -> list[str]:
    """The words of a text in lower case; punctuation parts them."""
    return re.findall(r"[^\W_]+", text.lower())


def rarity(passages: Sequence[Iterable[str]]) -> Callable[[str], float]:
    """How much a word tells passages apart, by the number of passages (lists of words) with it."""
    num_with = Counter(word for passage in passages for word in set(passage))
    num_all = len(passages)
    return lambda word: math.log(1 + (num_all - num_with[word] + 0.5) / (num_with[word] + 0.5))


def coverage(query: str, passages: Sequence[str], chosen: Sequence[str]) -> float:
    """The share of the query's words, by their rarity, that stand in the chosen passages."""
    weight = rarity([words(passage) for passage in passages])
    there = {word for passage in chosen for word in words(passage)}
    asked = set(words(query))
    whole = sum(map(weight, asked))
    return sum(map(weight, asked & there)) / whole if whole else 0.0


def bm25(query: str, passages: Sequence[str]) -> list[float]:
    """The score of each passage, 0 where it shares no word with the query."""
    counts = [Counter(words(passage)) for passage in passages]
    lens = [count.total() for count in counts]
    mean_len = max(sum(lens) / max(len(lens), 1), 1e-12)
    weight = rarity(counts)
    weights = {word: weight(word) for word in dict.fromkeys(words(query))}
    found = []
    for count, length in zip(counts, lens, strict=True):
        norm = _K1 * (1 - _B + _B * length / mean_len)
        score = sum(
            weight * count[word] * (_K1 + 1) / (count[word] + norm)
            for word, weight in weights.items()
        )
        found.append(score)
    return found
