"""Tables that go on over pages: the heads they repeat, and the remarks that they go on.

Owns what stands at the edge of pages because something was cut there. Works on cleaned texts
whose running heads are gone.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import pairwise

_REMARK = re.compile(
    r"[(\[]?(?:(?:table|figure) \S+ ?[:.–—-]? ?)?(?:contd\.?|continue[sd])"
    r" (?:on|from) (?:the )?(?:next|previous|preceding|following|last) page[)\]]?[.…]*",
    re.IGNORECASE,
)
_REMARK_LINES = 6  # of a page's beginning or end: further in it would be a sentence
_HEAD_LINES = 6
_HEAD_LEN = 200  # characters
_HEAD_WORDS = 2
_WORD = re.compile(r"[^\W\d_]{2,}")


def drop_repeats(pages: Sequence[str]) -> list[str]:
    """Return `pages` without remarks such as `continued from previous page` and repeated heads.

    Lines at a page's beginning are a repeated head where three pages in a row begin with them: a
    speaker's name or a line of code may well stand so twice. The first head stays.
    """
    split = [_without_remarks(page.split("\n")) for page in pages]
    firsts = [_first_lines(lines) for lines in split]
    repeats = [0, *(_num_repeated(lines, before) for before, lines in pairwise(firsts))]
    kept = []
    for place, lines in enumerate(split):
        around = repeats[place - 1 : place] + repeats[place + 1 : place + 2]
        is_in_row = place > 0 and repeats[place] > 0 and any(around)
        kept.append("\n".join(_without_first(lines, repeats[place] if is_in_row else 0)))
    return kept


def _without_remarks(lines: list[str]) -> list[str]:
    filled = [i for i, line in enumerate(lines) if line.strip()]
    edges = (*filled[:_REMARK_LINES], *filled[-_REMARK_LINES:])
    remarks = {i for i in edges if _REMARK.fullmatch(lines[i].strip())}
    if len(remarks) == len(filled):
        return lines
    return [line for i, line in enumerate(lines) if i not in remarks]


def _first_lines(lines: list[str]) -> list[str]:
    first = [line for line in lines if line.strip()][: _HEAD_LINES + 1]
    return first if len(first) > _HEAD_LINES else first[:-1]  # a page is not all head


def _num_repeated(lines: list[str], before: list[str]) -> int:
    """How many of the first lines hold the same words as the first ones of the page before.

    Words in any order: the cells of a head that has two lines are read by rows or by columns.
    """
    known = [sorted(" ".join(before[:end]).split()) for end in range(1, len(before) + 1)]
    for end in range(len(lines), 0, -1):
        head = " ".join(lines[:end])
        if _could_be_head(head) and sorted(head.split()) in known:
            return end
    return 0


def _could_be_head(head: str) -> bool:
    return (
        len(_WORD.findall(head)) >= _HEAD_WORDS
        and len(head) <= _HEAD_LEN
        and head.rstrip()[-1] not in ".,;:!?"
    )


def _without_first(lines: list[str], number: int) -> list[str]:
    filled = [i for i, line in enumerate(lines) if line.strip()]
    return lines[filled[number - 1] + 1 :] if number else lines
