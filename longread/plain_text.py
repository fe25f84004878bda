"""Text that is safe to print: control characters out, lines joined, sizes and counts spelled.

Documents and models decide what the text says; nothing in it may steer a terminal. Owns no stream.
"""

from __future__ import annotations

import json
import re

# C0 without tab and newline, DEL, C1, and the characters that turn the writing direction round
# (what follows them on the line would show in another order than it stands).
_UNSAFE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
_SURROGATE = re.compile("[\ud800-\udfff]")
NO_SUPPORT = "no passage stands out as the source of this answer"
HEADING_MARK = "§"  # begins the label of a place that has a heading and no page


def clean(text: str) -> str:
    """Return `text` without control characters; half surrogates become U+FFFD."""
    return _SURROGATE.sub("\ufffd", _UNSAFE.sub("", text))


def one_line(text: str, max_len: int | None = None) -> str:
    """Return cleaned `text` with white space collapsed, cut with an ellipsis to `max_len`."""
    line = " ".join(clean(text.replace("\r", " ").replace("\f", " ")).split())
    if max_len is not None and len(line) > max_len:
        line = line[: max(0, max_len - 1)].rstrip() + "…"
    return line


def json_text(record: object, *, indent: int | None = None) -> str:
    """Return `record` as JSON in plain UTF-8 text; unsafe characters stay, escaped as \\uXXXX."""
    dumped = json.dumps(record, ensure_ascii=False, indent=indent)
    # Inside JSON such characters can only stand in strings, where an escape means the same.
    escaped = _UNSAFE.sub(lambda match: f"\\u{ord(match[0]):04x}", dumped)
    return _SURROGATE.sub(lambda match: f"\\u{ord(match[0]):04x}", escaped)


def place_text(page: int, label: str | None) -> str:
    """Return `p. 12`, `p. 12 (label xii)` where the document prints another, or `§ Heading`."""
    if label and label.startswith(HEADING_MARK):
        return label
    return f"p. {page} (label {label})" if label and label != str(page) else f"p. {page}"


def size_text(num_bytes: int) -> str:
    """Return bytes for people: `98.4 MB`, powers of 1000."""
    amount = float(num_bytes)
    for unit in ("B", "kB", "MB", "GB"):
        if amount < 999.95:
            return f"{amount:.0f} B" if unit == "B" else f"{amount:.1f} {unit}"
        amount /= 1000
    return f"{amount:.1f} TB"


def count_text(number: int, noun: str, plural: str | None = None) -> str:
    """Return `1 page`, `10,214 tokens`."""
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"
