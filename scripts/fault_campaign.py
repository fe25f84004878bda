"""Every kind of fault against the store and the sessions, and one figure in the end.

    python scripts/fault_campaign.py > docs/campaigns/faults.txt

Killed writers and damaged files are kill_campaign.py's and mutate_store.py's, and count too. Here
come the others: a full disk at each writing call in turn, several processes on one document,
clocks that jump, an entry of an older format, a million random bytes in place of each file, and a
cache on another file system. After each fault all is read again: rows, index and record must be
right, and what was durable before must be there, unless its own file is what was damaged.
"""

from __future__ import annotations

import argparse
import errno
import os
import random
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import kill_campaign
import mutate_store
import torch

from longread import history
from longread.errors import StoreError
from longread.history import SavedSession
from longread.store import Store

NUM_RANDOM_BYTES = 1_000_000
WRITING_CALLS = ("write", "fsync", "replace", "mkdir", "link", "open")
JUMPS_S = (-20 * 365 * 86400.0, -86400.0, 86400.0, 20 * 365 * 86400.0)
OTHER_FILE_SYSTEM = Path("/dev/shm")


@dataclass
class Tally:
    """Faults by kind, what came out wrong, and entries that were gone without a fault of theirs."""

    faults: dict[str, int] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)

    def add(self, kind: str, number: int = 1) -> None:
        self.faults[kind] = self.faults.get(kind, 0) + number


def use(store: Store, tally: Tally, kind: str, *, may_lack: bool) -> None:
    """Read everything and mend it; what lacks is lost, unless the fault was in its own file."""
    problems: list[str] = []
    absent, _ = mutate_store.use(store, problems)
    tally.wrong += [f"{kind}: {problem}" for problem in problems]
    if absent and not may_lack:
        tally.lost.append(f"{kind}: {absent} parts")
    for result in store.verify():
        tally.wrong += [f"{kind}: verify: {problem}" for problem in result.problems]


@contextmanager
def full_after(num_calls: int) -> Iterator[list[str]]:
    """The disk is full from the call number `num_calls` of WRITING_CALLS on; yields what failed."""
    real = {name: getattr(os, name) for name in WRITING_CALLS}
    failed: list[str] = []
    seen = 0

    def guarded(name: str) -> Callable[..., object]:
        def call(*arguments: object, **named: object) -> object:
            nonlocal seen
            if name != "open" or (len(arguments) > 1 and int(str(arguments[1])) & os.O_CREAT):
                seen += 1
                if seen > num_calls:
                    failed.append(name)
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return real[name](*arguments, **named)

        return call

    for name in WRITING_CALLS:
        setattr(os, name, guarded(name))
    try:
        yield failed
    finally:
        for name, function in real.items():
            setattr(os, name, function)


def full_disk(pristine: Path, work: Path, tally: Tally) -> None:
    """An appended document is written while the disk fills up at each call in turn."""
    for num_calls in range(1000):
        shutil.copytree(pristine, work)
        store = mutate_store.open_store(work)
        first, *others = (entry.key for entry in store.list_entries())
        store.remove(first)
        with full_after(num_calls) as failed:
            try:
                mutate_store.use(store, [])
            except StoreError:
                pass
        if failed:
            tally.add("full disk")
        there = {entry.key for entry in store.list_entries() if entry.state == "complete"}
        tally.lost += [f"full disk at call {num_calls}: {key}" for key in set(others) - there]
        use(store, tally, f"full disk at call {num_calls}", may_lack=True)
        shutil.rmtree(work)
        if not failed:
            return
    raise AssertionError("the disk never sufficed")


def crowd(num_processes: int, work: Path, tally: Tally) -> None:
    """So many processes read, write and mend the same documents at once."""
    children = []
    for _ in range(num_processes):
        pid = os.fork()
        if pid == 0:
            problems: list[str] = ["did not end"]
            try:
                problems = []
                mutate_store.use(mutate_store.open_store(work), problems)
            finally:
                os._exit(1 if problems else 0)
        children.append(pid)
    for pid in children:
        _, status = os.waitpid(pid, 0)
        tally.add(f"{num_processes} processes at once")
        if status:
            tally.wrong.append(f"one of {num_processes} processes ended with status {status}")
    use(mutate_store.open_store(work), tally, f"{num_processes} processes", may_lack=False)
    shutil.rmtree(work)


def clock_jumps(pristine: Path, work: Path, tally: Tally) -> None:
    """The clock jumps while files are there from before, and their times jump too."""
    real = time.time
    for jump_s in JUMPS_S:
        for moves_files in (False, True):
            shutil.copytree(pristine, work)
            for path in work.rglob("*") if moves_files else ():
                os.utime(path, (real() + jump_s, real() + jump_s))
            time.time = lambda jump_s=jump_s: real() + jump_s  # type: ignore[misc]
            try:
                use(mutate_store.open_store(work), tally, f"clock {jump_s:+.0f}", may_lack=False)
            finally:
                time.time = real  # type: ignore[misc]
            tally.add("clock jumps")
            shutil.rmtree(work)


def random_bytes(pristine: Path, work: Path, chance: random.Random, tally: Tally) -> None:
    """A million random bytes in place of each file in turn; what other files hold stays."""
    for path in sorted(pristine.rglob("*")):
        if path.is_dir() or path.suffix == ".lock":
            continue
        shutil.copytree(pristine, work)
        (work / path.relative_to(pristine)).write_bytes(chance.randbytes(NUM_RANDOM_BYTES))
        tally.add("a million random bytes")
        use(mutate_store.open_store(work), tally, f"noise in {path.name}", may_lack=True)
        shutil.rmtree(work)


def older_format(pristine: Path, work: Path, tally: Tally) -> None:
    """Manifests that say another format version: neither read as today's nor fatal."""
    for version in (0, 2):
        shutil.copytree(pristine, work)
        for path in work.rglob("manifest.json"):
            text = path.read_text(encoding="utf-8")
            path.write_text(re.sub(r'"version":\s*\d+', f'"version":{version}', text))
            tally.add("entries of another format")
        use(mutate_store.open_store(work), tally, f"format {version}", may_lack=True)
        shutil.rmtree(work)


def session(name: str, model: str) -> SavedSession:
    return SavedSession(
        name, "2026-01-01T00:00:00+00:00", model, ("/a.txt",), ("a" * 64,), None, ()
    )


def sessions(work: Path, chance: random.Random, tally: Tally) -> None:
    """Saving over a session on a full disk keeps the old one; noise in one leaves the others."""
    for name in ("first", "second", "third"):
        history.save(work, session(name, "old"))
    for num_calls in range(100):
        with full_after(num_calls) as failed:
            try:
                history.save(work, session("first", "new"))
            except StoreError:
                pass
        if history.load(work, "first").model not in ("old", "new"):
            tally.wrong.append("a session is neither the old one nor the new one")
        if not failed:
            break
        tally.add("full disk, a session")
    (path,) = (path for path in work.iterdir() if path.stem == "second")
    path.write_bytes(chance.randbytes(NUM_RANDOM_BYTES))
    tally.add("a million random bytes, a session")
    try:
        history.load(work, "second")
        tally.wrong.append("noise was read as a session")
    except StoreError:
        pass
    if history.load(work, "third").model != "old":
        tally.lost.append("another session than the damaged one")


def campaign(seed: int, crowds: tuple[int, ...]) -> Tally:
    """All kinds but killed writers and small damage."""
    tally, chance = Tally(), random.Random(seed)
    with tempfile.TemporaryDirectory() as directory:
        pristine, work = Path(directory) / "pristine", Path(directory) / "work"
        mutate_store.use(mutate_store.open_store(pristine), tally.wrong)
        full_disk(pristine, work, tally)
        for num_processes in crowds:
            crowd(num_processes, work, tally)
        clock_jumps(pristine, work, tally)
        older_format(pristine, work, tally)
        random_bytes(pristine, work, chance, tally)
        sessions(Path(directory) / "sessions", chance, tally)
    if os.access(OTHER_FILE_SYSTEM, os.W_OK):
        with tempfile.TemporaryDirectory(dir=OTHER_FILE_SYSTEM) as directory:
            crowd(2, Path(directory) / "work", tally)
            tally.add("on another file system")
    return tally


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kills", type=int, default=230)
    parser.add_argument("--mutations", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(1)
    tally = campaign(options.seed, (2, 8))
    killed = kill_campaign.campaign(options.kills, options.seed)
    tally.add("writers killed", options.kills - killed.not_killed)
    damaged = mutate_store.campaign(options.mutations, options.seed)
    tally.add("files damaged in part", options.mutations)
    gone = [problem for problem in killed.problems if "gone" in problem or "lost" in problem]
    tally.lost += gone
    tally.wrong += [p for p in (*killed.problems, *damaged.problems) if p not in gone]
    for kind, number in tally.faults.items():
        print(f"{kind:<36} {number:>5}")
    print(
        f"{sum(tally.faults.values())} faults, {len(tally.wrong)} wrong answers, "
        f"{len(tally.lost)} lost entries"
    )
    for problem in (*tally.wrong, *tally.lost):
        print(f"  {problem}")
    return 1 if tally.wrong or tally.lost else 0


if __name__ == "__main__":
    sys.exit(main())
