"""Raw page texts to the text a model reads: characters, line-end hyphens, quality.

Owns what is done to text once it has been extracted or decoded. Knows no file format, opens
nothing. Every function is linear in its input, since one page may hold a whole book.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence

# A part of every document record's key: raise it whenever any text could come out differently.
NORMALIZER = f"normalize 3, unicode {unicodedata.unidata_version}"

_SURROGATE = re.compile("[\ud800-\udfff]")
_LINE_BREAK = re.compile("\r\n|[\r\x0b\x85\u2028\u2029]")
_SOFT_HYPHEN_BREAK = re.compile("\xad[ \t]*\n[ \t]*")
# Controls but tab, line feed and form feed; soft hyphens; zero-width marks; direction overrides,
# which can make a terminal show something else than the text says; non-characters. The joiners
# U+200C and U+200D stay: Persian and Indic spelling and emoji need them.
_INVISIBLE = re.compile(
    "[\x00-\x08\x0e-\x1f\x7f-\x9f\xad\u200b\u200e\u200f\u202a-\u202e\u2060\u2066-\u2069"
    "\ufeff\ufff9-\ufffb\ufffe\uffff]"
)

# Possessive, and never begun inside a word: linear also on a page that is one word of a megabyte.
_LETTER = r"[^\W\d_]"
_COMPOUND = rf"{_LETTER}++(?:-{_LETTER}++)*+"
_WORDS = re.compile(_COMPOUND)
_LINE_END_HYPHEN = re.compile(
    rf"(?<!{_LETTER})(?<!{_LETTER}-)({_COMPOUND})( ?)[-\u2010]\n({_LETTER}++)"
)

_PREFIX_LEN = 4  # `semi` and `demi` stand in compounds, and make words without a hyphen too

_RUN_ON_WORD = re.compile(r"[A-Za-z]{25,}")
_LETTERS = re.compile(r"[A-Za-z]+")
# Private use, the replacement character, and glyph names or codes written out (`/g18/g152`).
_UNMAPPED = re.compile(
    r"[\ue000-\uf8ff\ufffd\U000f0000-\U0010fffd]|(?:/g\d+){3,}|(?:\(cid:\d+\)){3,}"
)
_VOWELS = "aeiouyAEIOUY"
_GAP = re.compile(r" {2,}|\t")
_WORDS_TO_JUDGE = 8
_SPACED_SHARE = 0.6  # of the words are one letter
_RUN_ON_SHARE = 0.02
_UNMAPPED_SHARE = 0.01


def clean_text(text: str, *, keep_form_feeds: bool = False) -> str:
    """Return `text` in NFKC with `\\n` line ends and no control or invisible characters.

    Form feeds become line breaks unless `keep_form_feeds`. Lone surrogates become U+FFFD, line
    ends lose trailing spaces. Cleaning twice gives the same as cleaning once.
    """
    if _SURROGATE.search(text):
        # Through UTF-16, so that two halves of a pair become their character again.
        text = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    text = _LINE_BREAK.sub("\n", text)
    if not keep_form_feeds:
        text = text.replace("\f", "\n")
    text = _INVISIBLE.sub("", _SOFT_HYPHEN_BREAK.sub("", text))
    text = unicodedata.normalize("NFKC", text)
    # Not a regular expression: ` +\n` takes quadratic time on a long run of spaces.
    return "\n".join(line.rstrip(" \t") for line in text.split("\n"))


def clean_line(text: str) -> str:
    """Return `text` as one line that is safe in a message: for file names, labels and reasons."""
    return " ".join(clean_text(text).split())


def join_hyphens(pages: Sequence[str], *, typeset: bool) -> list[str]:
    """Undo hyphenation at line ends, taking the document's other words as the dictionary.

    `numer-\\nous` becomes `numerous`; a compound that is broken at its own hyphen keeps it
    (`well-\\nknown` becomes `well-known`); a capital or a digit on the next line is left alone.
    With `typeset` false (plain text, whose writers seldom hyphenate) a join needs the whole word
    elsewhere in the document.
    """
    if not any(_LINE_END_HYPHEN.search(page) for page in pages):
        return list(pages)
    known: set[str] = set()
    for page in pages:
        # Without the halves of broken words, which are no words.
        known.update(_WORDS.findall(_LINE_END_HYPHEN.sub(" ", page).lower()))
    parts = known | {part for word in known if "-" in word for part in word.split("-")}

    def join(match: re.Match[str]) -> str:
        left, space, right = match.groups()
        *_, last = left.split("-")
        whole, compound = (last + right).lower(), f"{left}-{right}".lower()
        is_lower = right[0].islower()
        is_known = whole in known and compound not in known
        if is_known and (is_lower or (left + right).isupper()):
            return left + right
        # A hyphen after a space may be a dash, and plain text may mean what it says.
        if not is_lower or space or not typeset:
            return match[0]
        is_compound = compound in known or "-" in left
        if not is_compound and len(left) > 2 and len(right) > 2:
            is_left = left.lower() in (parts if len(left) > _PREFIX_LEN else known)
            is_compound = is_left and right.lower() in parts
        return f"{left}-{right}" if is_compound else left + right

    return [_LINE_END_HYPHEN.sub(join, page) for page in pages]


def join_spaced_letters(text: str) -> str:
    """Close the gaps of a page whose letters are set apart (`à À â`, or Chinese so spaced).

    Two spaces or more part words; a page where words prevail is left alone.
    """
    found = text.split()
    if len(found) < _WORDS_TO_JUDGE or not _is_spaced(found):
        return text
    return "\n".join(_join_line(line) for line in text.split("\n"))


def _is_spaced(found: Sequence[str]) -> bool:
    """Whether letters by themselves prevail; dots and the like do not count."""
    num_single = sum([len(word) == 1 and word.isalpha() for word in found])
    if num_single <= _SPACED_SHARE * sum([len(word) > 1 and word[0].isalnum() for word in found]):
        return False  # as on nearly every page; the whole count takes longer
    return num_single > _SPACED_SHARE * sum(1 for word in found if any(map(str.isalnum, word)))


def _join_line(line: str) -> str:
    groups = [group.split(" ") for group in _GAP.split(line.strip())]
    joined = [
        "".join(group)
        if sum(len(word) == 1 for word in group) * 2 > len(group)
        else " ".join(group)
        for group in groups
    ]
    return " ".join(joined)


def num_unmapped(text: str) -> int:
    """How many characters have no known meaning."""
    return sum(len(match[0]) for match in _UNMAPPED.finditer(text))


def num_run_on_letters(text: str) -> int:
    """How many letters stand in words too long to be one."""
    return sum(len(word) for word in _RUN_ON_WORD.findall(text))


def has_shifted_letters(text: str) -> bool:
    """Whether the letters are glyph numbers: 29 below the codes of what the page shows.

    Fonts that Windows programs cut down number their glyphs so, and a file that gives no meanings
    reads `3HQ` for `Pen`. Such text has no spaces and few vowels, and is plain when moved by 29.
    """
    words = text.split()
    if len(text) < 8 * len(words):
        return False
    visible = [char for char in text if "!" <= char <= "~"]
    if len(visible) < 12 or len(visible) < 8 * len(words):
        return False
    letters = [char for char in visible if char.isalpha()]
    moved = [chr(ord(char) + 29) for char in visible if ord(char) + 29 < 0x7F]
    moved_letters = [char for char in moved if char.isalpha()]
    if len(moved_letters) < 0.7 * len(visible):
        return False
    vowel_share = sum(char in _VOWELS for char in letters) / max(1, len(letters))
    moved_share = sum(char in _VOWELS for char in moved_letters) / len(moved_letters)
    return (
        vowel_share < 0.25
        and moved_share > max(0.25, vowel_share + 0.1)
        and sum(map(str.isupper, letters)) > 0.6 * len(letters)
        and sum(map(str.islower, moved)) > len(moved) / 2
    )


def quality_warnings(text: str) -> list[str]:
    """Return what suggests that `text` is not what its pages show: one sentence for each sign."""
    warnings = []
    unmapped = num_unmapped(text)
    if unmapped and unmapped >= _UNMAPPED_SHARE * len(text):
        warnings.append(
            f"{unmapped} of {len(text)} characters have no known meaning (the file's fonts "
            "do not say what they show); answers may suffer"
        )
    num_letters = sum(len(word) for word in _LETTERS.findall(text))
    num_run_on = num_run_on_letters(text)
    if num_run_on and num_run_on >= _RUN_ON_SHARE * num_letters:
        warnings.append(
            f"{num_run_on / num_letters:.0%} of the text runs together without spaces between "
            "words; answers may suffer"
        )
    return warnings
