"""Mutated PDFs: whatever the damage, reading ends in text or in one line, in time, with no child.

Usage: python scripts/mutate_pdf.py EVALDATA [--number 2000] [--seed 1]

Seeded byte flips, truncations, splices of two files and doubled or zeroed pieces of the evaluation
PDFs. Each is read as a user's file is, in child processes. Prints a table and exits with 1 where
there is a problem: a traceback, a hang, a child left behind, or a control character in the text.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import time
import unicodedata
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from longread.document import RawDocument, document_text, extract
from longread.errors import LongreadError

MAX_FILE_LEN = 400_000  # a mutation of a long file tests the same and takes longer
MAX_S = 60.0
KINDS = ("flips", "truncated", "spliced", "zeroed", "repeated", "deleted")


def sources(folder: Path) -> list[Path]:
    """The evaluation PDFs that are mutated, in a fixed order."""
    paths = sorted(folder.glob("pdfs/*/*.pdf"))
    return [path for path in paths if 0 < path.stat().st_size <= MAX_FILE_LEN]


def mutate(rng: random.Random, data: bytes, other: bytes, kind: str) -> bytes:
    """`data` with damage of one kind."""
    out = bytearray(data)
    start = rng.randrange(len(out))
    length = min(len(out) - start, int(2 ** rng.uniform(0, 13)))
    if kind == "flips":
        for _ in range(int(2 ** rng.uniform(0, 9))):
            out[rng.randrange(len(out))] ^= 1 << rng.randrange(8)
    elif kind == "truncated":
        del out[max(8, start) :]
    elif kind == "spliced":
        cut = rng.randrange(len(other))
        out[start:] = other[cut:] if rng.random() < 0.5 else other[cut : cut + length] + out[start:]
    elif kind == "zeroed":
        out[start : start + length] = bytes(length)
    elif kind == "repeated":
        out[start:start] = out[start : start + length] * rng.randrange(1, 20)
    else:
        del out[start : start + length]
    return bytes(out)


def read(data: bytes) -> tuple[str, str | None]:
    """How reading ends (`text`, `code 3`, ...), and what is wrong with that."""
    raw = RawDocument("mutated.pdf", "mutated.pdf", "pdf", "0" * 64, data)
    start = time.monotonic()
    problem = None
    try:
        document = extract(raw)
    except LongreadError as error:
        outcome = f"code {error.exit_code}"
        message = str(error)
        if "\n" in message or len(message) > 400 or _controls(message):
            problem = f"message {message!r}"
    except BaseException as error:
        outcome, problem = "traceback", repr(error)
    else:
        outcome = "text with warnings" if document.warnings else "text"
        controls = _controls(document_text(document) + "".join(document.warnings))
        if controls:
            problem = f"control characters {controls!r}"
    if time.monotonic() - start > MAX_S:
        problem = f"took {time.monotonic() - start:.0f} s"
    return outcome, problem or _children()


def _controls(text: str) -> str:
    return "".join({c for c in text if unicodedata.category(c) == "Cc" and c not in "\n\t"})


def _children() -> str | None:
    try:
        pid, status = os.waitpid(-1, os.WNOHANG)
    except ChildProcessError:
        return None
    return f"child left behind (pid {pid}, status {status})"


def mutations(folder: Path, number: int, seed: int) -> Iterator[tuple[str, Path, bytes]]:
    """What kind of damage, to which file, and the result."""
    paths = sources(folder)
    for i in range(number):
        rng = random.Random(f"{seed}-{i}")
        kind, path, other = rng.choice(KINDS), rng.choice(paths), rng.choice(paths)
        yield kind, path, mutate(rng, path.read_bytes(), other.read_bytes(), kind)


def main() -> int:
    """Run the campaign."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("evaldata", type=Path)
    parser.add_argument("--number", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    outcomes: Counter[tuple[str, str]] = Counter()
    problems = []
    longest = 0.0
    start = time.monotonic()
    for i, (kind, path, data) in enumerate(
        mutations(arguments.evaldata, arguments.number, arguments.seed)
    ):
        began = time.monotonic()
        outcome, problem = read(data)
        longest = max(longest, time.monotonic() - began)
        outcomes[kind, outcome] += 1
        if problem:
            problems.append(f"  {i} {kind} {path.name}: {problem}")
        if sys.stderr.isatty():
            print(f"\r{i + 1}", end="", file=sys.stderr)
    print(
        f"mutated PDFs: {arguments.number} mutations of {len(sources(arguments.evaldata))} files, "
        f"seed {arguments.seed}"
    )
    names = sorted({outcome for _, outcome in outcomes})
    print("  ".join([f"{'':10}", *(f"{name:>18}" for name in names)]))
    for kind in KINDS:
        print("  ".join([f"{kind:10}", *(f"{outcomes[kind, name]:>18}" for name in names)]))
    print(f"longest {longest:.1f} s, all {time.monotonic() - start:.0f} s")
    print(f"problems: {len(problems)}")
    print("\n".join(problems), end="\n" if problems else "")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
