"""The store after a crash: at every system call that writes (simulated), and by SIGKILL."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from kv_rows import BASE, BLOCK_LEN, ROW_DIMS, SCRIPTS, Notices, ids, make_store, read_ready, rows

from longread.store import Store

FIRST = ids(2 * BLOCK_LEN + 30)
SECOND = np.concatenate([FIRST, ids(BLOCK_LEN, seed=1)])
WRITING_CALLS = ("write", "fsync", "replace", "rename", "link", "unlink", "mkdir", "rmdir")


@pytest.fixture(autouse=True)
def no_fsync(monkeypatch: pytest.MonkeyPatch) -> None:
    """The order of calls is what counts here; the campaigns run in processes of their own."""
    monkeypatch.setattr(os, "fsync", lambda fd: None)


class Crash(BaseException):
    """The process dies here; nothing may clean up behind it."""


class Fuse:
    """Lets `num_calls` writing system calls pass; at the next one, and ever after, it crashes."""

    def __init__(self, num_calls: int) -> None:
        self.left = num_calls

    def burn(self) -> bool:
        self.left -= 1
        return self.left < 0

    def guard(self, name: str, call: Callable) -> Callable:
        def guarded(*arguments: object, **options: object) -> object:
            if not self.burn():
                return call(*arguments, **options) if name != "fsync" else None
            if name == "write" and self.left == -1:
                fd, content = arguments
                call(fd, content[: len(content) // 2])  # torn
            raise Crash

        return guarded


def read_book(store: Store, token_ids: np.ndarray, confirmed: list[int]) -> None:
    """What a session does to the store; `confirmed` collects the rows known to be durable."""
    store.save_record("ab12", {"ids": token_ids})
    with store.entry(BASE, token_ids, row_dims=ROW_DIMS, names=["a.pdf"]) as entry:
        read_ready(entry, token_ids)
        while entry.num_ready < entry.num_tokens:
            start = entry.num_ready // BLOCK_LEN * BLOCK_LEN
            end = min(start + BLOCK_LEN, entry.num_tokens)
            entry.write_block(start, end, rows(token_ids, start, end))
            confirmed.append(end)
        entry.write_extra("index", rows(token_ids, 0, 1))
        entry.finish()


def crash_at(store: Store, num_calls: int, token_ids: np.ndarray, confirmed: list[int]) -> bool:
    """Run `read_book` with a fuse; False when it ended before the fuse did."""
    fuse = Fuse(num_calls)
    with pytest.MonkeyPatch.context() as patch:
        for name in WRITING_CALLS:
            patch.setattr(os, name, fuse.guard(name, getattr(os, name)))
        try:
            read_book(store, token_ids, confirmed)
        except Crash:
            return True
    return False


@pytest.mark.parametrize("token_ids", [FIRST, SECOND], ids=["new", "appended"])
def test_every_crash_point_resumes(tmp_path: Path, token_ids: np.ndarray) -> None:
    num_calls = 0
    while True:
        store = make_store(tmp_path / str(num_calls))
        if token_ids is SECOND:
            assert not crash_at(store, 1 << 30, FIRST, [])
        confirmed = [0]
        crashed = crash_at(store, num_calls, token_ids, confirmed)
        assert "damaged" not in {entry.state for entry in store.list_entries()}
        notices = Notices()
        with store.entry(BASE, token_ids, row_dims=ROW_DIMS, notice=notices) as entry:
            num_ready = read_ready(entry, token_ids)
            assert num_ready >= confirmed[-1]
            extra = entry.read_extra("index")
            assert extra is not None or not entry.complete
        record = store.load_record("ab12", notice=notices)
        assert record is None or len(record["ids"]) in (len(FIRST), len(token_ids))
        read_book(store, token_ids, [])
        assert {result.state for result in store.verify()} == {"ok"}
        store.prune()
        names = {path.name for path in store.root.rglob("*")}
        assert not any(name.startswith(".tmp") or name.endswith((".new", ".del")) for name in names)
        assert notices == []
        if not crashed:
            break
        num_calls += 1
    assert num_calls > 30


def test_every_crash_point_of_a_removal(tmp_path: Path) -> None:
    for num_calls in range(100):
        store = make_store(tmp_path / str(num_calls))
        for token_ids in (FIRST, SECOND):
            assert not crash_at(store, 1 << 30, token_ids, [])
        fuse = Fuse(num_calls)
        with pytest.MonkeyPatch.context() as patch:
            for name in WRITING_CALLS:
                patch.setattr(os, name, fuse.guard(name, getattr(os, name)))
            try:
                store.prune(older_than_s=-10)
                crashed = False
            except Crash:
                crashed = True
        assert {entry.state for entry in store.list_entries()} <= {"complete"}
        assert {result.state for result in store.verify()} <= {"ok"}
        store.prune(max_bytes=0)
        assert store.info().used_bytes == 0
        assert list((store.root / "kv").iterdir()) == []
        if not crashed:
            break
    assert 5 < num_calls < 99


@pytest.mark.parametrize(
    "command",
    [
        ["kill_campaign.py", "--rounds", "10"],
        ["mutate_store.py", "--mutations", "60"],
        ["fault_campaign.py", "--kills", "2", "--mutations", "2", "--stride", "37"],
    ],
    ids=["kill", "mutate", "other faults"],
)
def test_a_sample_of_the_campaign(command: list[str]) -> None:
    result = _run([str(SCRIPTS / command[0]), *command[1:], "--seed", "3"])
    assert result.returncode == 0, result.stdout + result.stderr
    assert "problems: 0" in result.stdout or "0 wrong answers, 0 lost entries" in result.stdout


@pytest.mark.parametrize("broken", ("is_right = lambda *a: False", "RECORD_KEY = 'cd' * 32"))
def test_the_campaign_would_notice(broken: str) -> None:
    """Rows that are never right are wrong answers; a record that is not there is lost."""
    result = _run(
        [
            "-c",
            "import pathlib, tempfile, fault_campaign as f, mutate_store as m\n"
            "root = pathlib.Path(tempfile.mkdtemp()) / 'root'\n"
            "m.use(m.open_store(root), [])\n"
            f"m.{broken}\n"
            "tally = f.Tally()\n"
            "f.use(m.open_store(root), tally, 'made', may_lack=0)\n"
            "print(len(tally.wrong), len(tally.lost))",
        ]
    )
    wrong, lost = map(int, result.stdout.split())
    assert (wrong > 0, lost > 0) == ("is_right" in broken, "RECORD" in broken)


@pytest.mark.parametrize("fails", ("problems.append('x')", "raise KeyError"))
def test_the_campaign_would_notice_a_process_that_fails(fails: str) -> None:
    result = _run(
        [
            "-c",
            "import pathlib, tempfile, fault_campaign as f, mutate_store as m\n"
            "root = pathlib.Path(tempfile.mkdtemp()) / 'root'\n"
            "tally, use, parent = f.Tally(), m.use, f.os.getpid()\n"
            "def fail(store, problems):\n"
            f"    if f.os.getpid() != parent: {fails}\n"
            "    return use(store, problems)\n"
            "m.use = fail\n"
            "f.crowd(2, root, tally)\n"
            "print(len([p for p in tally.wrong if 'ended with' in p]))",
        ]
    )
    assert result.stdout == "2\n", result.stderr


def _run(arguments: list[str]) -> subprocess.CompletedProcess[str]:
    paths = os.pathsep.join((str(SCRIPTS.parent), str(SCRIPTS)))
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120)
