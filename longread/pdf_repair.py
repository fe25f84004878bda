"""A PDF without a table of its objects gets a new one, from the objects that stand in it.

Owns the last resort for files that no engine opens. What an object holds is not looked at, but for
what kind it is. Encrypted files lose their key with the trailer and stay closed.
"""

from __future__ import annotations

import re
from itertools import zip_longest

_OBJECT = re.compile(rb"(?<![0-9])(\d{1,8})[ \t\r\n]+(\d{1,5})[ \t\r\n]+obj\b")
_KIND = re.compile(rb"/Type[ \t\r\n]*/(Catalog|Pages|Page)\b")
_PARENT = re.compile(rb"/Parent\b")
_HEAD_LEN = 4096  # bytes of an object in which its type stands
_MAX_OBJECTS = 200_000


def rebuild(data: bytes) -> bytes | None:
    """The same file with a new table and trailer; None where it holds no page.

    A file whose list of pages is lost gets one in the order in which its pages stand.
    """
    places: dict[int, tuple[int, int]] = {}
    matches = list(_OBJECT.finditer(data))[:_MAX_OBJECTS]
    kinds: dict[int, str] = {}
    parented: set[int] = set()
    for match, following in zip_longest(matches, matches[1:]):
        number = int(match[1])
        end = following.start() if following else len(data)
        head = data[match.end() : min(end, match.end() + _HEAD_LEN)].split(b"stream")[0]
        if following is None and b"endobj" not in data[match.end() :]:
            continue  # cut in the middle
        places[number] = (match.start(), int(match[2]))
        kind = _KIND.search(head)
        kinds[number] = kind[1].decode() if kind else ""
        (parented.add if _PARENT.search(head) else parented.discard)(number)
    pages = [number for number, kind in kinds.items() if kind == "Page"]
    if not pages:
        return None
    out = bytearray(data)
    roots = [n for n, kind in kinds.items() if kind == "Pages" and n not in parented]
    catalogs = [number for number, kind in kinds.items() if kind == "Catalog"]
    next_number = max(places) + 1

    def add(body: bytes) -> int:
        nonlocal next_number
        number, next_number = next_number, next_number + 1
        out.extend(b"\n")
        places[number] = (len(out), 0)
        out.extend(b"%d 0 obj\n%s\nendobj\n" % (number, body))
        return number

    if roots and catalogs:
        catalog = catalogs[-1]
    else:
        if roots:
            root = roots[-1]
        else:
            kids = b" ".join(b"%d %d R" % (n, places[n][1]) for n in sorted(pages, key=places.get))  # type: ignore[arg-type]
            root = add(b"<< /Type /Pages /Count %d /Kids [%s] >>" % (len(pages), kids))
        catalog = add(b"<< /Type /Catalog /Pages %d 0 R >>" % root)
    start = len(out) + 1
    out.extend(b"\nxref\n0 1\n0000000000 65535 f \n")
    for number in sorted(places):
        offset, generation = places[number]
        out.extend(b"%d 1\n%010d %05d n \n" % (number, offset, generation))
    out.extend(b"trailer\n<< /Size %d /Root %d 0 R >>\n" % (next_number, catalog))
    out.extend(b"startxref\n%d\n%%%%EOF\n" % start)
    return bytes(out)
