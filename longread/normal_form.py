"""Unicode's normal form C with a map back to the text it came from, and no lone surrogates.

Owns the shift of character offsets that composing causes; which tokenizers want NFC is theirs.
"""

from __future__ import annotations

import re
import unicodedata
from functools import cache
from itertools import pairwise

import numpy as np

_SURROGATES = re.compile("[\ud800-\udfff]")


def without_surrogates(text: str) -> str:
    """`text` with U+FFFD for each lone surrogate, which UTF-8 cannot hold; the length stays."""
    return _SURROGATES.sub("\ufffd", text)


def nfc_with_spans(text: str) -> tuple[str, np.ndarray, np.ndarray]:
    """NFC of `text`, and where each of its characters comes from: int32 starts and ends.

    A group of characters that changes maps to the whole group, and no finer.
    """
    cuts = [i for i, char in enumerate(text) if not _may_join(char)]
    cuts = [0, *cuts, len(text)] if not cuts or cuts[0] else [*cuts, len(text)]
    pieces: list[str] = []
    starts: list[int] = []
    ends: list[int] = []
    for start, end in pairwise(cuts):
        group = text[start:end]
        piece = unicodedata.normalize("NFC", group)
        same = piece == group
        pieces.append(piece)
        starts += range(start, end) if same else [start] * len(piece)
        ends += range(start + 1, end + 1) if same else [end] * len(piece)
    return "".join(pieces), np.array(starts, np.int32), np.array(ends, np.int32)


@cache
def _may_join(char: str) -> bool:
    """Whether NFC may change what stands before `char` together with it."""
    first = unicodedata.normalize("NFD", char)[0]
    return unicodedata.combining(first) != 0 or first in _composing_starters()


@cache
def _composing_starters() -> frozenset[str]:
    """Characters of combining class 0 that can compose with the one before them."""
    found = {chr(point) for point in (*range(0x1161, 0x1176), *range(0x11A8, 0x11C3))}  # Hangul
    for point in range(0x110000):
        pair = unicodedata.decomposition(chr(point)).split()
        if len(pair) == 2 and not pair[0].startswith("<"):
            found.add(chr(int(pair[1], 16)))
    return frozenset(char for char in found if unicodedata.combining(char) == 0)
