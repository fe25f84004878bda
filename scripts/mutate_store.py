"""Damage files of the store at random, and check that no wrong data ever comes out.

    python scripts/mutate_store.py --mutations 2000 > docs/campaigns/mutate_store.txt

The store holds two entries, the second an appended document that shares the first one's blocks,
an index with each, and a document record. Each mutation changes one file of a fresh copy (a bit
flipped, a stretch inverted, cut, lengthened, emptied, deleted, or another file's content). Then all
is read: what comes back must be right, and the damage must have been noticed or its data absent.
In the end both entries are finished and the store must verify.
"""

from __future__ import annotations

import argparse
import random
import shutil
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from campaign_rows import ROW_DIMS, is_right, rows

from longread.events import Notice
from longread.store import Store

BLOCK_LEN = 64
BASE = Store.base_key({"model": "campaign"})
INDEX = "index-int8"
RECORD_KEY = "ab" * 32
KINDS = ("flip", "invert", "cut", "lengthen", "empty", "delete", "swap")


@dataclass
class Findings:
    """What the mutations came to."""

    mutated: Counter[str] = field(default_factory=Counter)
    noticed: int = 0
    absent: int = 0
    problems: list[str] = field(default_factory=list)


def documents() -> list[np.ndarray]:
    """The token ids [N] int32 of the two entries."""
    token_ids = np.random.default_rng(5).integers(0, 50000, 600, dtype=np.int32)
    return [token_ids[:330], token_ids]


def index_of(token_ids: np.ndarray) -> dict[str, torch.Tensor]:
    """Something an entry keeps beside its blocks."""
    return {"codes": torch.from_numpy(token_ids % 120).to(torch.int8)}


def open_store(root: Path) -> Store:
    return Store(root, 1 << 30, block_len=BLOCK_LEN)


def use(store: Store, problems: list[str]) -> tuple[int, list[str]]:
    """Read everything, then write what is missing; how many parts were absent, and the notices."""
    notices: list[str] = []
    absent = 0

    def keep(notice: Notice) -> None:
        notices.append(notice.message)

    record = store.load_record(RECORD_KEY, notice=keep)
    absent += record is None
    if record is not None and not np.array_equal(record["ids"], documents()[0]):
        problems.append("a record is wrong")
    store.save_record(RECORD_KEY, {"ids": documents()[0]})
    for token_ids in documents():
        with store.entry(BASE, token_ids, row_dims=ROW_DIMS, notice=keep) as entry:
            while True:
                num_read = 0
                for block in entry.read_blocks():
                    num_read = block.end
                    if not is_right(token_ids, block.start, block.end, block.tensors):
                        problems.append("rows are wrong")
                if num_read == entry.num_tokens:
                    break
                absent += 1
                start = entry.num_ready - entry.num_ready % BLOCK_LEN
                end = min(start + BLOCK_LEN, entry.num_tokens)
                entry.write_block(start, end, rows(token_ids, start, end))
            index = entry.read_extra(INDEX)
            absent += index is None
            if index is not None and not torch.equal(index["codes"], index_of(token_ids)["codes"]):
                problems.append("an index is wrong")
            entry.write_extra(INDEX, index_of(token_ids))
            entry.finish()
    return absent, notices


def mutate(path: Path, kind: str, chance: random.Random, others: list[Path]) -> None:
    """Change the file so that its bytes differ for certain."""
    content = bytearray(path.read_bytes())
    position = chance.randrange(len(content))
    if kind == "flip":
        content[position] ^= 1 << chance.randrange(8)
    elif kind == "invert":
        stretch = content[position : position + 512]
        content[position : position + len(stretch)] = bytes(byte ^ 255 for byte in stretch)
    elif kind == "cut":
        del content[position:]
    elif kind == "lengthen":
        content += chance.randbytes(chance.randint(1, 64))
    elif kind == "empty":
        content.clear()
    elif kind == "swap":
        content = bytearray(chance.choice(others).read_bytes())
    if kind == "delete":
        path.unlink()
    else:
        path.write_bytes(content)


def campaign(num_mutations: int, seed: int) -> Findings:
    """Damage one file at a time; each file in turn, so that all kinds of files are met."""
    chance = random.Random(seed)
    findings = Findings()
    with tempfile.TemporaryDirectory() as directory:
        pristine, copy = Path(directory) / "pristine", Path(directory) / "copy"
        use(open_store(pristine), findings.problems)
        names = sorted(path for path in pristine.rglob("*") if path.is_file())
        names = [path.relative_to(pristine) for path in names if path.suffix != ".lock"]
        for number in range(num_mutations):
            shutil.copytree(pristine, copy)
            name, kind = names[number % len(names)], chance.choice(KINDS)
            different = [copy / other for other in names]
            before = (copy / name).read_bytes()
            different = [path for path in different if path.read_bytes() != before]
            mutate(copy / name, kind, chance, different)
            kind_of_file = "record" if name.parent.name == "documents" else name.name.split("-")[0]
            findings.mutated[kind_of_file] += 1
            store = open_store(copy)
            absent, notices = use(store, findings.problems)
            findings.noticed += bool(notices)
            findings.absent += bool(absent)
            if not absent and not notices:
                findings.problems.append(f"{kind} of {name.name} was not noticed")
            for result in store.verify():
                findings.problems += [f"verify: {problem}" for problem in result.problems]
            shutil.rmtree(copy)
    return findings


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--mutations", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(1)
    findings = campaign(options.mutations, options.seed)
    print(f"mutated files of the store: {options.mutations} mutations, seed {options.seed}")
    for name, count in sorted(findings.mutated.items()):
        print(f"  {name:<14} {count:>5}")
    print(f"told the user so: {findings.noticed}; data absent and made again: {findings.absent}")
    print(f"problems: {len(findings.problems)}")
    for problem in findings.problems:
        print(f"  {problem}")
    return 1 if findings.problems else 0


if __name__ == "__main__":
    sys.exit(main())
