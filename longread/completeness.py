"""How much of a known text an extraction holds: words found in order, words missing, words extra.

Owns the comparison of two texts word by word. Reads no files; a word is a run of letters and
digits in NFKC, whatever its case, so that hyphens, quotes and line breaks do not count.
"""

from __future__ import annotations

import re
import unicodedata
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from itertools import accumulate

_WORD = re.compile(r"\w+")
_ANCHOR_LENS = (6, 3, 1)  # words in a row that are rare in either text hold the texts together
_MAX_REPEATS = 4  # of such a run in a text
_SMALL_GAP = 400  # words between anchors that are compared one with another
_MOVED_LEN = 2  # words of a passage that counts as moved
_MAX_PLACES = 50  # of one passage that are compared
_MAX_SAMPLES = 20
_SAMPLE_LEN = 8  # words


@dataclass(frozen=True)
class Difference:
    """Words in a row that are not found in order; indices count words from 0."""

    kind: str  # elsewhere, extra or missing
    num_words: int
    read_idx: int | None  # of the first word, None where it is missing
    expected_idx: int | None  # None where it is extra
    text: str  # the first words


@dataclass(frozen=True)
class Completeness:
    """Counts in words; `missing` and `extra` show the longest runs, most words first."""

    num_expected: int
    num_read: int
    num_found: int  # in order
    num_moved: int  # found elsewhere, in passages of two words or more, such as notes
    missing: tuple[str, ...]
    extra: tuple[str, ...]
    differences: tuple[Difference, ...] = ()  # the longest of each kind, most words first

    @property
    def found_share(self) -> float:
        """Of the expected words."""
        return self.num_found / self.num_expected if self.num_expected else 1.0

    @property
    def moved_share(self) -> float:
        """Of the expected words, those found in another place."""
        return self.num_moved / self.num_expected if self.num_expected else 0.0

    @property
    def extra_share(self) -> float:
        """Words read that are not expected, by the number of expected ones."""
        num_extra = self.num_read - self.num_found - self.num_moved
        return num_extra / self.num_expected if self.num_expected else float(num_extra > 0)


def compare(read: str, expected: str, *, num_differences: int = _MAX_SAMPLES) -> Completeness:
    """Align the words of `read` with those of `expected`. Memory and time stay near linear.

    num_differences: of each kind, that are named.
    """
    read_words, expected_words = words(read), words(expected)
    found_read = bytearray(len(read_words))
    found_expected = bytearray(len(expected_words))
    num_found = 0
    for i, j, length in _matches(read_words, expected_words):
        num_found += length
        found_read[i : i + length] = b"\1" * length
        found_expected[j : j + length] = b"\1" * length
    moved = _mark_moved(read_words, found_read, expected_words, found_expected)
    missing, extra = _left(found_expected), _left(found_read)
    differences = [
        Difference("elsewhere", length, i, j, _shown(read_words, i, length))
        for length, i, j in sorted(moved, reverse=True)[:num_differences]
    ]
    for length, i in extra[:num_differences]:
        differences.append(Difference("extra", length, i, None, _shown(read_words, i, length)))
    for length, j in missing[:num_differences]:
        differences.append(
            Difference("missing", length, None, j, _shown(expected_words, j, length))
        )
    return Completeness(
        len(expected_words),
        len(read_words),
        num_found,
        sum(length for length, _, _ in moved),
        tuple(_shown(expected_words, j, length) for length, j in missing[:_MAX_SAMPLES]),
        tuple(_shown(read_words, i, length) for length, i in extra[:_MAX_SAMPLES]),
        tuple(sorted(differences, key=lambda run: -run.num_words)),
    )


def words(text: str) -> list[str]:
    """The words of `text` as they are compared."""
    text = unicodedata.normalize("NFKC", text).replace("\xad", "").casefold()
    return [word for run in _WORD.findall(text) for word in run.split("_") if word]


def word_starts(parts: Sequence[str]) -> list[int]:
    """How many words stand before each part; no word goes over from one to the next."""
    return [0, *accumulate(len(words(part)) for part in parts)][:-1]


def _matches(a: Sequence[str], b: Sequence[str]) -> Iterator[tuple[int, int, int]]:
    """Runs of equal words as (start in a, start in b, length), in order and disjoint."""
    stack = [(0, len(a), 0, len(b), 0)]
    while stack:
        a_start, a_end, b_start, b_end, depth = stack.pop()
        while a_start < a_end and b_start < b_end and a[a_start] == b[b_start]:
            yield a_start, b_start, 1
            a_start, b_start = a_start + 1, b_start + 1
        while a_start < a_end and b_start < b_end and a[a_end - 1] == b[b_end - 1]:
            a_end, b_end = a_end - 1, b_end - 1
            yield a_end, b_end, 1
        if a_start == a_end or b_start == b_end:
            continue
        if a_end - a_start <= _SMALL_GAP and b_end - b_start <= _SMALL_GAP:
            matcher = SequenceMatcher(None, a[a_start:a_end], b[b_start:b_end], autojunk=False)
            for block in matcher.get_matching_blocks():
                if block.size:
                    yield a_start + block.a, b_start + block.b, block.size
            continue
        if depth == len(_ANCHOR_LENS):
            continue  # no rare word in common: these are other texts
        length = _ANCHOR_LENS[depth]
        anchors = _anchors(a[a_start:a_end], b[b_start:b_end], length)
        # With anchors the gaps are new texts, in which more is rare.
        next_depth = 0 if anchors else depth + 1
        i = j = 0
        for anchor_i, anchor_j in [*anchors, (a_end - a_start, b_end - b_start)]:
            if anchor_i < i or anchor_j < j:
                continue
            if anchors and anchor_i < a_end - a_start:
                yield a_start + anchor_i, b_start + anchor_j, length
            stack.append(
                (a_start + i, a_start + anchor_i, b_start + j, b_start + anchor_j, next_depth)
            )
            i, j = anchor_i + length, anchor_j + length


def _mark_moved(
    a: Sequence[str], found_a: bytearray, b: Sequence[str], found_b: bytearray
) -> list[tuple[int, int, int]]:
    """Mark passages left over in both texts as found; gives (words, start in a, start in b)."""
    places: dict[tuple[str, ...], list[int]] = {}
    for j in range(len(b) - _MOVED_LEN + 1):
        if not any(found_b[j : j + _MOVED_LEN]):
            places.setdefault(tuple(b[j : j + _MOVED_LEN]), []).append(j)
    moved = []
    i = 0
    while i <= len(a) - _MOVED_LEN:
        length, start = 0, 0
        if not any(found_a[i : i + _MOVED_LEN]):
            for j in places.get(tuple(a[i : i + _MOVED_LEN]), ())[:_MAX_PLACES]:
                n = 0
                while (
                    i + n < len(a)
                    and j + n < len(b)
                    and a[i + n] == b[j + n]
                    and not found_a[i + n]
                    and not found_b[j + n]
                ):
                    n += 1
                if n > length:
                    length, start = n, j
        if length >= _MOVED_LEN:
            found_a[i : i + length] = found_b[start : start + length] = b"\1" * length
            moved.append((length, i, start))
        i += max(length, 1)
    return moved


def _anchors(a: Sequence[str], b: Sequence[str], length: int) -> list[tuple[int, int]]:
    """Places of rare runs of `length` words in both: the longest rising sequence."""
    places_a, places_b = _once(a, length), _once(b, length)
    pairs = [(i, places_b[run]) for run, i in places_a.items() if run in places_b]
    tails: list[int] = []
    tail_pairs: list[int] = []
    previous = [-1] * len(pairs)
    for k, (_, j) in enumerate(pairs):
        place = bisect_left(tails, j)
        previous[k] = tail_pairs[place - 1] if place else -1
        tails[place : place + 1] = [j]
        tail_pairs[place : place + 1] = [k]
    chain = []
    k = tail_pairs[-1] if tail_pairs else -1
    while k >= 0:
        chain.append(pairs[k])
        k = previous[k]
    return chain[::-1]


def _once(words: Sequence[str], length: int) -> dict[tuple[tuple[str, ...], int], int]:
    """Places of runs by the run and the number of times it came before; rare runs only."""
    runs = [tuple(words[i : i + length]) for i in range(len(words) - length + 1)]
    counts = Counter(runs)
    before: Counter[tuple[str, ...]] = Counter()
    places = {}
    for i, run in enumerate(runs):
        if counts[run] <= _MAX_REPEATS:
            places[run, before[run]] = i
            before[run] += 1
    return places


def _left(found: bytearray) -> list[tuple[int, int]]:
    """Runs that are not found, as (words, start), the longest first."""
    runs = ((match.end() - match.start(), match.start()) for match in re.finditer(b"\0+", found))
    return sorted(runs, key=lambda run: (-run[0], run[1]))


def _shown(words: Sequence[str], start: int, length: int) -> str:
    text = " ".join(words[start : start + min(length, _SAMPLE_LEN)])
    return f"{text} (and {length - _SAMPLE_LEN} more)" if length > _SAMPLE_LEN else text
