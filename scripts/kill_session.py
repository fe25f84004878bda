"""Kill whole sessions with SIGKILL while they read a document, and check what the next run redoes.

    python scripts/kill_session.py --model MODEL book.txt > docs/campaigns/kill_session.txt

Each round starts `Session.open` on an empty cache in a process of its own and kills it at a random
moment of prefill or save. Then: the next run reuses all but at most one block of what the killed
one had read, and its rows are bit for bit those of a run that was never interrupted.
"""

from __future__ import annotations

import argparse
import multiprocessing
import random
import sys
import tempfile
import time
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from pathlib import Path

from longread.config import Settings
from longread.events import Notice, Opened, Progress
from longread.manifest import BLOCK_LEN
from longread.session import Session


@dataclass
class Findings:
    """What the rounds came to."""

    rounds: int = 0
    too_late: int = 0
    in_prefill: int = 0
    in_save: int = 0
    redone_most: int = 0
    problems: list[str] = field(default_factory=list)


def read_document(settings: Settings, document: str, said: Connection) -> None:
    """The child's work; sends the number of tokens read, again and again."""
    for event in Session(settings).open([document]):
        if isinstance(event, Progress) and event.stage == "prefill":
            said.send(event.done)
    said.send(-1)


def run_child(settings: Settings, document: str, delay_s: float) -> tuple[int, bool]:
    """Tokens read when a child was killed `delay_s` after its first, and whether it had ended."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["longread.session"])
    reader, writer = context.Pipe(duplex=False)
    child = context.Process(target=read_document, args=(settings, document, writer))
    child.start()
    writer.close()
    num_read = reader.recv()
    time.sleep(delay_s)
    child.kill()
    child.join()
    ended = False
    try:
        while True:
            done = reader.recv()
            ended = ended or done == -1
            num_read = max(num_read, done)
    except EOFError:
        return num_read, ended


def reopened(settings: Settings, document: str) -> tuple[Session, Opened, list[str]]:
    """A session on what a child left, and the notices on the way."""
    session, notices = Session(settings), []
    for event in session.open([document]):
        if isinstance(event, Notice):
            notices.append(event.message)
    assert isinstance(event, Opened), "the last event is Opened"
    return session, event, notices


def check(session: Session, opened: Opened, whole: Session, num_read: int) -> list[str]:
    """What is wrong with the run after a kill."""
    problems = []
    redone = num_read - opened.cache.tokens_reused
    if redone > BLOCK_LEN:
        problems.append(f"{redone} tokens were read again, over one block of {BLOCK_LEN}")
    num_rows = len(whole._prompt.token_ids)
    for name in ("k", "v"):
        found, expected = getattr(session._cache, name), getattr(whole._cache, name)
        if not found[:, :, :num_rows].equal(expected[:, :, :num_rows]):
            problems.append(f"rows of {name} differ from those of an uninterrupted run")
    if not session._cache.q_moment.allclose(whole._cache.q_moment, rtol=1e-4):
        problems.append("the query statistics differ from those of an uninterrupted run")
    return problems


def campaign(model: str, document: str, num_rounds: int, seed: int) -> Findings:
    """Run all rounds, each with a cache of its own."""
    chance, findings = random.Random(seed), Findings()
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        settings = Settings(model=model, models_dir=root / "models", cache_dir=root / "whole")
        reopened(settings, document)  # what only a first run does must not count
        started = time.perf_counter()
        whole, opened, _ = reopened(replace(settings, cache_dir=root / "again"), document)
        whole_s = time.perf_counter() - started
        assert opened.cache.tokens_prefilled > 2 * BLOCK_LEN, "the document is too short"
        for round_idx in range(num_rounds):
            cache_dir = root / f"round-{round_idx}"
            settings = replace(settings, cache_dir=cache_dir)
            num_read, ended = run_child(settings, document, chance.uniform(0, 1.2 * whole_s))
            session, opened, notices = reopened(settings, document)
            findings.rounds += 1
            findings.too_late += ended
            at_block_end = num_read % BLOCK_LEN == 0 or num_read == len(whole._prompt.token_ids)
            findings.in_save += not ended and at_block_end
            findings.in_prefill += not ended and not at_block_end
            redone = max(num_read - opened.cache.tokens_reused, 0)
            findings.redone_most = max(findings.redone_most, redone)
            findings.problems += check(session, opened, whole, num_read)
            findings.problems += [f"unexpected notice: {text}" for text in notices]
            if not reopened(settings, document)[1].cache.hit:
                findings.problems.append("the entry was not whole after the next run")
    return findings


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("document")
    parser.add_argument("--model", required=True)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    findings = campaign(arguments.model, arguments.document, arguments.rounds, arguments.seed)
    print(f"kill campaign of sessions: {findings.rounds} rounds, seed {arguments.seed}")
    print(f"killed in prefill  {findings.in_prefill}")
    print(f"killed in save     {findings.in_save}")
    print(f"too late           {findings.too_late}")
    print(f"most tokens read again: {findings.redone_most} (a block is {BLOCK_LEN})")
    print(f"problems: {len(findings.problems)}")
    for problem in findings.problems:
        print(f"  {problem}")
    return 1 if findings.problems else 0


if __name__ == "__main__":
    sys.exit(main())
