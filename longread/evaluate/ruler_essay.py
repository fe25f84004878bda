"""Running prose in sentences: the haystack into which RULER's needles are laid.

Two novels and a book of speeches, all in the public domain, stand in for RULER's essays.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

from longread.evaluate.task import read_text

BOOKS = tuple(
    f"books/txt/{name}.txt" for name in ("pride_and_prejudice", "moby_dick", "sotu_1953_1980")
)

# A stop, the quotes and brackets it closes, and a space before what may begin a sentence.
_END = re.compile(r"[.!?][\"'”’)\]_]*( )(?=[\"'“‘(\[_]*[A-Z0-9])")
# Words whose full stop ends no sentence; single letters are initials.
_SHORT = re.compile(r"\b(?:[A-Z]|Mr|Mrs|Ms|Dr|St|Col|Capt|Gen|Lt|Rev|Hon|Messrs)\.\Z")


def sentences(text: str) -> list[str]:
    """Sentences of a text, its white space single spaces; joined by spaces they give it again."""
    text = " ".join(text.split())
    found, start = [], 0
    for end in _END.finditer(text):
        if not _SHORT.search(text, max(start, end.start() - 12), end.start() + 1):
            found.append(text[start : end.start(1)])
            start = end.end()
    return [*found, text[start:]] if text else []


@dataclass(frozen=True, eq=False)
class Essay:
    """A text to take the first words of."""

    sentences: Sequence[str]
    ends: Sequence[int]  # words up to the end of each sentence

    @classmethod
    def load(cls, paths: Sequence[Path]) -> Essay:
        """The texts of files, one after the other. Raises UsageError."""
        found = sentences(" ".join(map(read_text, paths)))
        return cls(found, list(accumulate(len(text.split()) for text in found)))

    def first(self, num_words: int) -> list[str]:
        """The first words in sentences, the last cut short; past its end the text begins again."""
        times, num_words = divmod(num_words, self.ends[-1])
        whole = bisect_right(self.ends, num_words)
        left = num_words - (self.ends[whole - 1] if whole else 0)
        cut = [" ".join(self.sentences[whole].split()[:left])] if left else []
        return [*self.sentences] * times + [*self.sentences[:whole]] + cut
