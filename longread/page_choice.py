"""Which of two engines' texts of one page to take, and what is wrong with it.

Owns the judgement of a page's raw text; knows the engines only as first and second.
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from dataclasses import dataclass

from longread.normalize import has_shifted_letters, num_run_on_letters, num_unmapped

_LETTER_OR_DIGIT = re.compile(r"[^\W_]")
_BAD_SHARE = 0.01
_SAME_LETTERS = 0.7  # of the longer text: below it the engines read different characters
_NEAR_LETTERS = 0.95
_GLUED_SHARE = 0.02  # of the words
_SPACED_SHARE = 0.4
_DOUBLED = 1.3
_WORDS_TO_JUDGE = 8


@dataclass(frozen=True)
class Second:
    """The second engine's text of a page, and what it knows of the layout."""

    text: str
    is_rtl: bool = False
    in_order: bool = True
    on_page: bool = True
    is_turned: bool = False  # the whole page
    has_marks: bool = False  # raised numbers, notes or a table's head are told apart


def bad_share(text: str) -> float:
    """The share of characters that cannot be what the page shows, 0 to 1."""
    length = len(text)
    if not length:
        return 0.0
    if has_shifted_letters(text):
        return 1.0
    num_bad = num_unmapped(text) + num_run_on_letters(text)
    for char in set(text):
        category = unicodedata.category(char)
        if (category in ("Cc", "Cn") and char not in "\n\r\t\f\ufffe") or category == "Cs":
            num_bad += text.count(char)
    return min(1.0, num_bad / length)


def single_share(text: str) -> float:
    """The share of words that are one letter; Chinese and Japanese words count where parted."""
    found = text.split()
    singles = sum(1 for word in found if len(word) == 1 and word.isalpha())
    return singles / len(found) if len(found) >= _WORDS_TO_JUDGE else 0.0


def needs_second_opinion(text: str) -> bool:
    """Whether `text` by itself looks wrong."""
    return (
        not _LETTER_OR_DIGIT.search(text)
        or bad_share(text) > _BAD_SHARE
        or single_share(text) > _SPACED_SHARE
    )


def choose(first: str | None, second: Second | None) -> tuple[bool, str]:
    """Whether to take the second text, and why; with none, the first stands.

    first is None where its engine failed, second where the other did.
    """
    if second is None:
        return False, ""
    if first is None:
        return True, "the first engine cannot read it"
    a, b = _letters(first), _letters(second.text)
    num_a, num_b = a.total(), b.total()
    if num_b == 0:
        return False, ""
    if num_a == 0:
        return True, "the first engine finds no text"
    if second.is_rtl:
        return True, "right-to-left text"
    bad_a, bad_b = bad_share(first), bad_share(second.text)
    if bad_a > _BAD_SHARE and bad_b < bad_a:
        return True, "the first engine's text has characters without meaning or glued words"
    shared = (a & b).total() / max(num_a, num_b)
    if shared < _SAME_LETTERS and bad_b <= max(bad_a, _BAD_SHARE):
        if num_a >= _DOUBLED * num_b and (a & b).total() >= _NEAR_LETTERS * num_b:
            if set(a) == set(b):
                return True, "the first engine reads text twice that is drawn twice"
            return False, ""
        # The same number of other characters, or more of them: an encoding that one knows.
        if num_b >= 0.5 * num_a:
            return True, "the first engine does not know the encoding"
        return False, ""
    if second.is_turned:
        return False, ""
    if not second.in_order:
        return True, "drawn in another order than it is read"
    if shared >= _NEAR_LETTERS:
        num_first, num_second = _num_words(first), _num_words(second.text)
        spaced_a, spaced_b = single_share(first), single_share(second.text)
        if num_first < (1 - _GLUED_SHARE) * num_second and spaced_b <= spaced_a + 0.05:
            return True, "the first engine's words run together"
        if spaced_a > _SPACED_SHARE and spaced_b < spaced_a:
            return True, "the first engine's letters stand apart"
        is_glued = num_second < (1 - _GLUED_SHARE) * num_first
        if second.has_marks and not is_glued and spaced_b <= spaced_a + 0.05:
            return True, "it has notes, raised numbers or a table's head drawn late"
    return False, ""


def _num_words(text: str) -> int:
    return sum(1 for word in text.split() if _LETTER_OR_DIGIT.search(word))


def _letters(text: str) -> Counter[str]:
    return Counter(_LETTER_OR_DIGIT.findall(unicodedata.normalize("NFKC", text)))
