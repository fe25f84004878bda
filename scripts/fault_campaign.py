"""Every kind of fault against store, sessions and answers, and one figure in the end.

    python scripts/fault_campaign.py > docs/campaigns/faults.txt

Randomly killed writers and damaged files are kill_campaign.py's and mutate_store.py's, answers of a
tiny model and killed sessions fault_answers.py's; they count too. Here come the others: a writer
that dies at each writing call in turn, a disk that is full or turns read-only at each, several
processes on one document, clocks that jump, another format version, a million random bytes in place
of each file, and a cache that is spread over two file systems. After each fault all is read again:
rows, index and record must be right, and what was durable before must be there, unless its own file
is what was damaged.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import kill_campaign
import mutate_store
import numpy as np
import torch
from campaign_rows import ROW_DIMS
from faulty_disk import CHANGES, FULL, READ_ONLY, die, from_call, in_child, refuse

from longread import history
from longread.errors import LongreadError, StoreError
from longread.history import SavedSession
from longread.manifest import MANIFEST_NAME, TOKENS_NAME
from longread.store import Store

NUM_RANDOM_BYTES = 1_000_000
JUMPS_S = (-20 * 365 * 86400.0, -86400.0, 86400.0, 20 * 365 * 86400.0)
OTHER_FILE_SYSTEM = Path("/dev/shm")
DISKS = {"full disk": FULL, "read-only disk": READ_ONLY}


@dataclass
class Tally:
    """Faults by kind, what came out wrong, and entries that were gone without a fault of theirs."""

    faults: dict[str, int] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)

    def add(self, kind: str, number: int = 1) -> None:
        self.faults[kind] = self.faults.get(kind, 0) + number

    def add_problems(self, kind: str, problems: list[str]) -> None:
        for problem in problems:
            is_loss = "gone" in problem or "lost" in problem
            (self.lost if is_loss else self.wrong).append(f"{kind}: {problem}")


@contextmanager
def copy_of(pristine: Path) -> Iterator[Path]:
    """A copy to damage, beside the directory."""
    work = pristine.with_name("work")
    shutil.copytree(pristine, work, symlinks=True)
    try:
        yield work
    finally:
        shutil.rmtree(work)


def use(store: Store, tally: Tally, kind: str, *, may_lack: int) -> None:
    """Read everything and mend it; more parts absent than the fault itself took are lost."""
    problems: list[str] = []
    absent, _ = mutate_store.use(store, problems)
    tally.wrong += [f"{kind}: {problem}" for problem in problems]
    if absent > may_lack:
        tally.lost.append(f"{kind}: {absent} parts, {may_lack} of them by the fault")
    for result in store.verify():
        tally.wrong += [f"{kind}: verify: {problem}" for problem in result.problems]


def deaths(pristine: Path, stride: int, tally: Tally) -> None:
    """A writer is killed at every writing call: a new document, then one that begins like it."""
    chance = random.Random(7)
    first = kill_campaign.new_document(chance, [])
    second = np.concatenate([first, kill_campaign.new_document(chance, [])])
    for token_ids, before in ((first, None), (second, first)):
        root = pristine.with_name("before")
        store = Store(root, 1 << 30, block_len=kill_campaign.BLOCK_LEN)
        old_key = None
        if before is not None:
            with store.entry(kill_campaign.BASE, before, row_dims=ROW_DIMS) as entry:
                kill_campaign.finish(entry, before, lambda line: None)
            old_key = entry.key
        store.list_entries()
        root.mkdir(exist_ok=True)
        for num_calls in range(0, 10_000, stride):
            with copy_of(root) as work:
                if not death(work, token_ids, old_key, num_calls, tally):
                    break
        shutil.rmtree(root)


def death(
    work: Path, token_ids: np.ndarray, old_key: str | None, num_calls: int, tally: Tally
) -> bool:
    """One writer, killed at this call; False where it ended before that."""
    store = Store(work, 1 << 30, block_len=kill_campaign.BLOCK_LEN)
    reader, writer = os.pipe()

    def write() -> bool:
        with from_call(num_calls, CHANGES, die, spared_fd=writer):
            kill_campaign.write_all(store, token_ids, old_key, writer)
        return True

    pid = in_child(write)
    os.close(writer)
    with os.fdopen(reader) as lines:
        said = [line.strip() for line in lines]
    _, status = os.waitpid(pid, 0)
    kind, findings = f"killed at call {num_calls}", kill_campaign.Findings()
    if os.WIFEXITED(status) and os.WEXITSTATUS(status):
        tally.wrong.append(f"{kind}: the writer raised")
    if old_key is not None and not {"removing", "done"} & set(said):
        states = {entry.key: entry.state for entry in store.list_entries()}
        if states.get(old_key) != "complete":
            tally.lost.append(f"{kind}: the older entry")
    kill_campaign.check(store, token_ids, said, findings)
    with store.entry(kill_campaign.BASE, token_ids, row_dims=ROW_DIMS) as entry:
        kill_campaign.finish(entry, token_ids, lambda line: None)
    for result in store.verify():
        findings.problems += [f"verify: {problem}" for problem in result.problems]
    tally.add_problems(kind, findings.problems)
    if os.WIFSIGNALED(status):
        tally.add("a writer killed at each writing call")
    return os.WIFSIGNALED(status)


def refusing_disk(pristine: Path, kind: str, stride: int, tally: Tally) -> None:
    """Documents are written while the disk begins to refuse at each call in turn."""
    number, names = DISKS[kind]
    for num_calls in range(0, 10_000, stride):
        with copy_of(pristine) as work:
            store, label = mutate_store.open_store(work), f"{kind} at call {num_calls}"
            first, *others = (entry.key for entry in store.list_entries())
            store.remove(first)
            problems: list[str] = []
            with from_call(num_calls, names, refuse(number)) as struck:
                try:
                    mutate_store.use(store, problems)
                except StoreError as error:
                    if "--no-cache" not in str(error):
                        problems.append(f"no remedy: {error}")
            there = {entry.key for entry in store.list_entries() if entry.state == "complete"}
            if set(others) - there:
                problems.append("an entry is gone")
            if store.load_record(mutate_store.RECORD_KEY) is None:
                problems.append("a record is gone")
            tally.add_problems(label, problems)
            use(store, tally, label, may_lack=1000)
            if not struck:
                return
            tally.add(kind)
    raise AssertionError("the disk never sufficed")


def crowd(num_processes: int, work: Path, tally: Tally, *, pruned: bool = False) -> None:
    """So many processes read, write and mend the same documents at once; one may empty the cache.

    Where it does, the others must still give right rows; an entry in use may not go.
    """

    def work_on_it() -> bool:
        problems: list[str] = []
        mutate_store.use(mutate_store.open_store(work), problems)
        return not problems

    def empty_it() -> bool:
        for _ in range(20):
            mutate_store.open_store(work).prune(max_bytes=0)
            time.sleep(0.01)
        return True

    kind = f"{num_processes} processes at once" + (", one empties the cache" if pruned else "")
    workers = [work_on_it] * (num_processes - pruned) + [empty_it] * pruned
    for pid in [in_child(worker) for worker in workers]:
        _, status = os.waitpid(pid, 0)
        if status:
            tally.wrong.append(f"{kind}: one ended with status {status}")
    tally.add(kind)
    use(mutate_store.open_store(work), tally, kind, may_lack=1000 if pruned else 0)
    shutil.rmtree(work)


def clock_jumps(pristine: Path, tally: Tally) -> None:
    """The clock jumps while files are there from before, and their times jump too."""
    real = time.time
    for jump_s in JUMPS_S:
        for moves_files in (False, True):
            with copy_of(pristine) as work:
                for path in work.rglob("*") if moves_files else ():
                    os.utime(path, (real() + jump_s, real() + jump_s))
                time.time = lambda jump_s=jump_s: real() + jump_s  # type: ignore[misc]
                try:
                    use(mutate_store.open_store(work), tally, f"clock {jump_s:+.0f}", may_lack=0)
                finally:
                    time.time = real
                tally.add("clock jumps")


def random_bytes(pristine: Path, chance: random.Random, tally: Tally) -> None:
    """A million random bytes in place of each file in turn; what other files hold stays."""
    for path in sorted(pristine.rglob("*")):
        if path.is_dir() or path.suffix == ".lock":
            continue
        may_lack = 0 if path.name == TOKENS_NAME else 1
        if path.name == MANIFEST_NAME:  # names all files of its entry
            may_lack = len(list(path.parent.iterdir())) - 2
        with copy_of(pristine) as work:
            (work / path.relative_to(pristine)).write_bytes(chance.randbytes(NUM_RANDOM_BYTES))
            tally.add("a million random bytes")
            use(mutate_store.open_store(work), tally, f"noise in {path.name}", may_lack=may_lack)


def other_formats(pristine: Path, tally: Tally) -> None:
    """Manifests, then records, of another format version: neither read as today's nor fatal."""
    for version in (0, 2):
        with copy_of(pristine) as work:
            for path in work.rglob(MANIFEST_NAME):
                text = path.read_text(encoding="utf-8")
                path.write_text(re.sub(r'"version":\s*\d+', f'"version":{version}', text))
                tally.add("another format version")
            use(mutate_store.open_store(work), tally, f"format {version}", may_lack=1000)
        with copy_of(pristine) as work:
            (path,) = (work / "documents").iterdir()
            path.write_bytes(path.read_bytes().replace(b"record 1\n", b"record %d\n" % version, 1))
            tally.add("another format version")
            use(mutate_store.open_store(work), tally, f"record {version}", may_lack=1)


def two_file_systems(pristine: Path, tally: Tally) -> None:
    """Each part of the cache in turn lies on another file system; a damaged block is set aside."""
    with tempfile.TemporaryDirectory(dir=OTHER_FILE_SYSTEM) as directory:
        elsewhere = Path(directory)
        for part in sorted(path.name for path in pristine.iterdir()):
            with copy_of(pristine) as work:
                shutil.move(work / part, elsewhere / part)
                (work / part).symlink_to(elsewhere / part)
                block = next((work / "kv").resolve().glob("*/block-00000*"))
                block.write_bytes(b"x" * 1000)
                use(mutate_store.open_store(work), tally, f"{part} elsewhere", may_lack=1)
                tally.add("parts on two file systems")
                shutil.rmtree(elsewhere / part)
        shutil.copytree(pristine, elsewhere / "whole")
        use(mutate_store.open_store(elsewhere / "whole"), tally, "all elsewhere", may_lack=0)
        crowd(2, elsewhere / "crowd", tally)
        tally.add("a cache on another file system")


def session(name: str, model: str) -> SavedSession:
    return SavedSession(
        name, "2026-01-01T00:00:00+00:00", model, ("/a.txt",), ("a" * 64,), None, ()
    )


def sessions(work: Path, num_mutations: int, chance: random.Random, tally: Tally) -> None:
    """Saving over a session is cut short at each call; noise and damage in one leave the others."""
    for name in ("first", "second", "third"):
        history.save(work, session(name, "old"))

    def check(kind: str) -> None:
        models = [history.load(work, name).model for name in history.list_names(work)]
        if models[0] not in ("old", "new") or models[1:] != ["old", "old"]:
            tally.wrong.append(f"{kind}: sessions {models}")

    def save_and_die(num_calls: int) -> bool:
        with from_call(num_calls, CHANGES, die):
            history.save(work, session("first", "new"))
        return True

    for num_calls in range(100):
        history.save(work, session("first", "old"))
        _, status = os.waitpid(in_child(lambda: save_and_die(num_calls)), 0)  # noqa: B023
        check("killed while it saves a session")
        if not os.WIFSIGNALED(status):
            break
        tally.add("killed while it saves a session")
    for kind, (number, names) in DISKS.items():
        for num_calls in range(100):
            history.save(work, session("first", "old"))
            with from_call(num_calls, names, refuse(number)) as struck:
                try:
                    history.save(work, session("first", "new"))
                except StoreError:
                    pass
            check(f"{kind}, a session")
            if not struck:
                break
            tally.add(f"{kind}, a session")
    saving = [in_child(lambda: bool(history.save(work, session("first", "new")))) for _ in range(8)]
    tally.wrong += ["a process that saved failed" for pid in saving if os.waitpid(pid, 0)[1]]
    check("8 processes save one session")
    tally.add("8 processes save one session")
    damaged_sessions(work, num_mutations, chance, tally)
    check("another session was damaged")


def damaged_sessions(work: Path, number: int, chance: random.Random, tally: Tally) -> None:
    """Noise in place of a session, then small damage: an error, or the session as it was.

    Another session's whole file is no damage: people copy and rename these files.
    """
    written = session("second", "old")
    kinds = [kind for kind in mutate_store.KINDS if kind != "swap"]
    for kind in ("noise", *(chance.choice(kinds) for _ in range(number))):
        path = history.save(work, written)
        if kind == "noise":
            path.write_bytes(chance.randbytes(NUM_RANDOM_BYTES))
        else:
            mutate_store.mutate(path, kind, chance, [])
        tally.add("damaged session files")
        try:
            if history.load(work, "second") != written:
                tally.wrong.append(f"{kind}: damage was read as a session")
        except LongreadError:
            pass
    history.save(work, written)


def campaign(seed: int, stride: int) -> Tally:
    """All kinds but randomly killed writers, small damage of the store, and answers.

    stride: of the writing calls, only each so many-th is taken.
    """
    tally, chance = Tally(), random.Random(seed)
    with tempfile.TemporaryDirectory() as directory:
        pristine = Path(directory) / "pristine"
        mutate_store.use(mutate_store.open_store(pristine), tally.wrong)
        deaths(pristine, stride, tally)
        for kind in DISKS:
            refusing_disk(pristine, kind, stride, tally)
        for num_processes in (2, 8) * max(10 // stride, 1):
            crowd(num_processes, pristine.with_name("crowd"), tally)
            crowd(num_processes, pristine.with_name("crowd"), tally, pruned=True)
        clock_jumps(pristine, tally)
        other_formats(pristine, tally)
        random_bytes(pristine, chance, tally)
        if os.access(OTHER_FILE_SYSTEM, os.W_OK):
            two_file_systems(pristine, tally)
        sessions(Path(directory) / "sessions", 300 // stride, chance, tally)
    return tally


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kills", type=int, default=230)
    parser.add_argument("--mutations", type=int, default=2000)
    parser.add_argument("--stride", type=int, default=1, help="take each so many-th writing call")
    parser.add_argument("--no-answers", action="store_true", help="leave the tiny model out")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(1)
    tally = campaign(options.seed, options.stride)
    killed = kill_campaign.campaign(options.kills, options.seed)
    tally.add("writers killed at random", options.kills - killed.not_killed)
    tally.add_problems("killed at random", killed.problems)
    damaged = mutate_store.campaign(options.mutations, options.seed)
    tally.add("files damaged in part", options.mutations)
    tally.add_problems("damaged in part", damaged.problems)
    if not options.no_answers:
        import fault_answers

        answers = fault_answers.campaign(options.seed, 7 * options.stride, 40 // options.stride)
        for kind, number in answers.faults.items():
            tally.add(kind, number)
        tally.wrong += answers.wrong
    for kind, number in tally.faults.items():
        print(f"{kind:<48} {number:>5}")
    print(
        f"{sum(tally.faults.values())} faults, {len(tally.wrong)} wrong answers, "
        f"{len(tally.lost)} lost entries"
    )
    for problem in (*tally.wrong, *tally.lost):
        print(f"  {problem}")
    return 1 if tally.wrong or tally.lost else 0


if __name__ == "__main__":
    sys.exit(main())
