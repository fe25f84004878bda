"""Raw page texts to the text a model reads: characters, line-end hyphens, running heads, quality.

Owns what is done to text once it has been extracted or decoded. Knows no file format, opens
nothing. Every function is linear in its input, since one page may hold a whole book.
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Sequence

# A part of every document record's key: raise it whenever any text could come out differently.
NORMALIZER = f"normalize 1, unicode {unicodedata.unidata_version}"

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

_EDGE_LINES = 2  # a running head or foot stands in the first or last two lines of its page
_EDGE_LINE_LEN = 400  # with the gap between its parts
_HEAD_LEN = 80  # without
_RUNNING_SHARE = 0.4  # of the pages: heads that alternate between left and right pages have half
_RUNNING_PAGES = 3
# A gap of three spaces sets a page number apart from the head beside it; "Section 7" is content.
_WIDE_GAP = re.compile(r"\s{3,}|\t")
_NUMBER = r"[-–—\[(. ]*(?:[Pp]age|[Pp]\.)? ?(\d{1,5})(?: ?(?:of|/) ?\d{1,5})?[-–—\]). ]*"
_BARE_NUMBER = re.compile(_NUMBER)
_HEAD_THEN_NUMBER = re.compile(rf"(\S.*?)\t{_NUMBER}")
_HEAD_THEN_PAGE = re.compile(r"(\S.*?) [\[(]?[Pp]age (\d{1,5})(?: of \d{1,5})?[\])]?")
_NUMBER_THEN_HEAD = re.compile(rf"{_NUMBER}\t(\S.*)")

_RUN_ON_WORD = re.compile(r"[A-Za-z]{25,}")
_LETTERS = re.compile(r"[A-Za-z]+")
# Private use, the replacement character, and glyph names or codes written out (`/g18/g152`).
_UNMAPPED = re.compile(
    r"[\ue000-\uf8ff\ufffd\U000f0000-\U0010fffd]|(?:/g\d+){3,}|(?:\(cid:\d+\)){3,}"
)
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
            is_compound = left.lower() in known and right.lower() in known
        return f"{left}-{right}" if is_compound else left + right

    return [_LINE_END_HYPHEN.sub(join, page) for page in pages]


def drop_running_lines(pages: Sequence[str], page_indices: Sequence[int]) -> list[str]:
    """Return `pages` without page numbers and without heads and feet repeated on most pages.

    pages: cleaned texts, spaces inside lines untouched; page_indices: their positions in the
    file, from 0. Only lines at a page's edge go: page numbers that count with the pages, and
    lines that are the same but for such a number. The first page that shows a head keeps it, and
    a page keeps everything rather than become empty, so no wording is lost.
    """
    num_pages_by_key: Counter[tuple[str, ...]] = Counter()
    candidates: list[dict[int, tuple[str, ...]]] = []
    split = [page.split("\n") for page in pages]
    for lines, page_idx in zip(split, page_indices, strict=True):
        keys = _running_keys(lines, page_idx)
        candidates.append(keys)
        num_pages_by_key.update(set(keys.values()))
    num_with_text = sum(1 for page in pages if page.strip())
    needed = max(_RUNNING_PAGES, round(_RUNNING_SHARE * num_with_text))
    seen: set[tuple[str, ...]] = set()
    kept = []
    for page, lines, keys in zip(pages, split, candidates, strict=True):
        dropped = set()
        for line_idx, key in keys.items():
            if num_pages_by_key[key] < needed:
                continue
            if key in seen or not key[1]:
                dropped.add(line_idx)
            seen.add(key)
        rest = [line for line_idx, line in enumerate(lines) if line_idx not in dropped]
        kept.append("\n".join(rest) if any(map(str.strip, rest)) else page)
    return kept


def _running_keys(lines: list[str], page_idx: int) -> dict[int, tuple[str, ...]]:
    """Line index -> (edge, wording, number minus page_idx) for what could be a running line."""
    filled = [line_idx for line_idx, line in enumerate(lines) if line.strip()]
    edges = [(line_idx, "top") for line_idx in filled[:_EDGE_LINES]]
    edges += [(line_idx, "bottom") for line_idx in filled[_EDGE_LINES:][-_EDGE_LINES:]]
    keys: dict[int, tuple[str, ...]] = {}
    for line_idx, edge in edges:
        line = lines[line_idx].strip()
        if len(line) > _EDGE_LINE_LEN:
            continue
        line = _WIDE_GAP.sub("\t", line)
        number: int | None = None
        head = line
        if match := _BARE_NUMBER.fullmatch(line):
            head, number = "", int(match[1])
        elif match := _HEAD_THEN_NUMBER.fullmatch(line) or _HEAD_THEN_PAGE.fullmatch(line):
            head, number = match[1], int(match[2])
        elif match := _NUMBER_THEN_HEAD.fullmatch(line):
            head, number = match[2], int(match[1])
        # What ends like a sentence may be the text's own.
        elif line[-1] in ".,;:!?" or not any(map(str.isalpha, line)):
            continue
        if len(head) <= _HEAD_LEN:
            keys[line_idx] = (edge, head, "" if number is None else str(number - page_idx))
    return keys


def quality_warnings(text: str) -> list[str]:
    """Return what suggests that `text` is not what its pages show: one sentence for each sign."""
    warnings = []
    num_unmapped = sum(len(match[0]) for match in _UNMAPPED.finditer(text))
    if num_unmapped and num_unmapped >= _UNMAPPED_SHARE * len(text):
        warnings.append(
            f"{num_unmapped} of {len(text)} characters have no known meaning (the file's fonts "
            "do not say what they show); answers may suffer"
        )
    num_letters = sum(len(word) for word in _LETTERS.findall(text))
    num_run_on = sum(len(word) for word in _RUN_ON_WORD.findall(text))
    if num_run_on and num_run_on >= _RUN_ON_SHARE * num_letters:
        warnings.append(
            f"{num_run_on / num_letters:.0%} of the text runs together without spaces between "
            "words; answers may suffer"
        )
    return warnings
