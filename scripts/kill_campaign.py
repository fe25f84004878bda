"""Kill a writer of the store with SIGKILL at random moments, and check what the next process finds.

    python scripts/kill_campaign.py --rounds 200 > docs/campaigns/kill_store.txt

Each round forks a child that does what a session does (save a document record, write the blocks of
an entry, keep an index with it, finish, remove an older entry) and kills it somewhere in between.
Then: every row that is ready is the right one, everything that the child had confirmed is there,
no entry is damaged, the entry can be finished and the whole store verifies. About half the rounds
leave the entry unfinished, so that the next child resumes it and is killed again; about half the
documents begin like an earlier one, so that links to another entry's blocks are cut short too.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from campaign_rows import ROW_DIMS, is_right, rows

from longread.entry import Entry
from longread.events import Notice
from longread.store import Store

BLOCK_LEN = 64
BASE = Store.base_key({"model": "campaign"})
INDEX = "index-int8"


@dataclass
class Findings:
    """What the rounds came to."""

    killed_in: Counter[str] = field(default_factory=Counter)
    not_killed: int = 0
    blocks_confirmed: int = 0
    blocks_beyond: int = 0  # durable although the child did not live to say so
    problems: list[str] = field(default_factory=list)


def index_of(token_ids: np.ndarray) -> dict[str, torch.Tensor]:
    """Something an entry keeps beside its blocks."""
    return {"codes": torch.from_numpy(token_ids % 120).to(torch.int8)}


def record_key(token_ids: np.ndarray) -> str:
    return f"{int(token_ids.sum()):016x}"


def write_all(store: Store, token_ids: np.ndarray, old_key: str | None, fd: int) -> None:
    """The child's work; says on `fd` what it is about to do and which rows are durable."""

    def say(line: str) -> None:
        os.write(fd, f"{line}\n".encode())

    say("record")
    store.save_record(record_key(token_ids), {"ids": token_ids})
    say("opening")
    with store.entry(BASE, token_ids, row_dims=ROW_DIMS) as entry:
        say(f"ready {entry.num_ready // BLOCK_LEN}")
        finish(entry, token_ids, say)
    if old_key is not None:
        say("removing")
        store.remove(old_key)
    say("done")


def finish(entry: Entry, token_ids: np.ndarray, say: Callable[[str], None]) -> None:
    """Read what is ready, write the rest, keep the index."""
    for _ in entry.read_blocks():
        pass
    entry.reserve(1 << 20)
    while entry.num_ready < entry.num_tokens:
        start = entry.num_ready - entry.num_ready % BLOCK_LEN
        end = min(start + BLOCK_LEN, entry.num_tokens)
        say("blocks")
        entry.write_block(start, end, rows(token_ids, start, end))
        say(f"ready {entry.num_ready // BLOCK_LEN}")
    say("index")
    entry.write_extra(INDEX, index_of(token_ids))
    say("finishing")
    entry.finish()


def run_child(
    store: Store, token_ids: np.ndarray, old_key: str | None, num_lines: int, delay_s: float
) -> list[str]:
    """What a child said before it was killed, `delay_s` seconds after it said `num_lines` lines."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            os.close(reader)
            write_all(store, token_ids, old_key, writer)
            code = 0
        finally:
            os._exit(code)
    os.close(writer)
    with os.fdopen(reader) as lines:
        said = [line for _, line in zip(range(num_lines), lines, strict=False)]
        time.sleep(delay_s)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        return [line.strip() for line in [*said, *lines]]


def check(store: Store, token_ids: np.ndarray, said: list[str], findings: Findings) -> None:
    """Compare the store with what the child had said."""
    confirmed = max([int(line.split()[1]) for line in said if line.startswith("ready")], default=0)
    stages = [line for line in said if not line.startswith("ready")]
    stage = stages[-1] if stages else "starting"
    if stage == "done":
        findings.not_killed += 1
    else:
        findings.killed_in[stage] += 1
    notices: list[str] = []

    def keep(notice: Notice) -> None:
        notices.append(notice.message)

    states = [entry.state for entry in store.list_entries()]
    findings.problems += [
        f"an entry is listed as {state}" for state in states if state == "damaged"
    ]
    record = store.load_record(record_key(token_ids), notice=keep)
    if record is None and stage not in ("starting", "record"):
        findings.problems.append("a saved record is gone")
    if record is not None and not np.array_equal(record["ids"], token_ids):
        findings.problems.append("a record is wrong")
    with store.entry(BASE, token_ids, row_dims=ROW_DIMS, notice=keep) as entry:
        for block in entry.read_blocks():
            if not is_right(token_ids, block.start, block.end, block.tensors):
                findings.problems.append("rows are wrong")
        num_ready = entry.num_ready // BLOCK_LEN
        index = entry.read_extra(INDEX)
        if entry.complete and index is None:
            findings.problems.append("a complete entry lost its index")
        if index is not None and not torch.equal(index["codes"], index_of(token_ids)["codes"]):
            findings.problems.append("an index is wrong")
    if stage == "done" and num_ready < len(token_ids) // BLOCK_LEN:
        findings.problems.append("a finished entry is not whole")
    if num_ready < confirmed:
        findings.problems.append(f"{confirmed - num_ready} confirmed blocks are gone")
    findings.blocks_confirmed += confirmed
    findings.blocks_beyond += max(num_ready - confirmed, 0)
    findings.problems += [f"unexpected notice: {text}" for text in notices]


def new_document(chance: random.Random, earlier: list[np.ndarray]) -> np.ndarray:
    """[N] int32 token ids; about every second one begins like an earlier document."""
    token_ids = np.array([chance.randrange(50000) for _ in range(chance.randint(200, 700))])
    if earlier and chance.random() < 0.5:
        start = chance.choice(earlier)
        token_ids = np.concatenate([start[: chance.randint(1, len(start))], token_ids])
    return token_ids.astype(np.int32)


def campaign(num_rounds: int, seed: int) -> Findings:
    """Run all rounds in one store of their own."""
    chance = random.Random(seed)
    findings = Findings()
    with tempfile.TemporaryDirectory() as directory:
        store = Store(Path(directory) / "cache", 1 << 30, block_len=BLOCK_LEN)
        started = time.perf_counter()
        num_lines = len(run_child(store, new_document(chance, []), None, 1000, 0.0))
        step_s = (time.perf_counter() - started) / num_lines
        finished: list[np.ndarray] = []
        token_ids = new_document(chance, finished)
        for _ in range(num_rounds):
            entries = store.list_entries()
            old_key = entries[-1].key if len(entries) > 3 else None
            when = chance.randrange(num_lines), chance.uniform(0, 2 * step_s)
            said = run_child(store, token_ids, old_key, *when)
            check(store, token_ids, said, findings)
            if chance.random() < 0.5:
                continue
            with store.entry(BASE, token_ids, row_dims=ROW_DIMS) as entry:
                finish(entry, token_ids, lambda line: None)
            for result in store.verify():
                findings.problems += [f"verify: {problem}" for problem in result.problems]
            finished = [*finished[-3:], token_ids]
            token_ids = new_document(chance, finished)
    return findings


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(1)
    findings = campaign(options.rounds, options.seed)
    print(f"kill campaign of the store: {options.rounds} rounds, seed {options.seed}")
    print("killed while:")
    for stage in ("starting", "record", "opening", "blocks", "index", "finishing", "removing"):
        print(f"  {stage:<10} {findings.killed_in[stage]:>4}")
    print(f"  {'too late':<10} {findings.not_killed:>4}")
    print(f"blocks confirmed by the child and found again: {findings.blocks_confirmed}")
    print(f"blocks found beyond those confirmed: {findings.blocks_beyond}")
    print(f"problems: {len(findings.problems)}")
    for problem in findings.problems:
        print(f"  {problem}")
    return 1 if findings.problems else 0


if __name__ == "__main__":
    sys.exit(main())
