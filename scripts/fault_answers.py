"""Answers of a tiny random model while its cache is damaged, full, or read-only: always the same.

    python scripts/fault_answers.py

A document is read and asked about once; each fault meets a fresh copy of that cache (or an empty
one) and the question is asked again. The answer, its citations and its passages must be those of
the first time, or an error must say what to do; then it is asked once more, with the disk in order.
Killed sessions are kill_session.py's and count too. The model is the tests' own (tests/tiny.py).
"""

from __future__ import annotations

import argparse
import random
import shutil
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path

import kill_session
import torch
from faulty_disk import FULL, READ_ONLY, from_call, refuse

from longread.config import Settings
from longread.errors import StoreError
from longread.events import Answer
from longread.session import Session

REPO = Path(__file__).resolve().parent.parent
DOCUMENT = REPO / "sample_docs" / "us_constitution.txt"
NUM_CHARS = 12_000  # two blocks of the cache with the tiny model's tokens
NUM_CHARS_TO_KILL = 26_000  # over two whole blocks
QUESTION = "How are senators chosen?"
NUM_RANDOM_BYTES = 1_000_000


@dataclass
class Findings:
    """Faults by kind, and what came out wrong."""

    faults: Counter[str] = field(default_factory=Counter)
    refused: int = 0
    wrong: list[str] = field(default_factory=list)


def answer(settings: Settings, document: Path) -> Answer:
    """What a new session says."""
    session = Session(settings)
    for _ in session.open([str(document)]):
        pass
    *_, last = session.ask(QUESTION)
    assert isinstance(last, Answer), "the last event is the answer"
    return last


class Trial:
    """One document, one cache, and what is right."""

    def __init__(self, root: Path) -> None:
        sys.path.insert(0, str(REPO / "tests"))
        import tiny

        folder = tiny.save_hf_folder(root / "hf", "qwen2", max_position_embeddings=16384)
        model_dir = tiny.convert(folder, root / "models")
        self.document = root / "document.txt"
        self.document.write_text(DOCUMENT.read_text(encoding="utf-8")[:NUM_CHARS])
        self.pristine, self.work = root / "pristine", root / "work"
        settings = Settings(
            model=str(model_dir), dtype="float32", models_dir=root, max_tokens=12, threads=1
        )
        self.settings = replace(settings, cache_dir=self.work)
        self.expected = answer(replace(settings, cache_dir=self.pristine), self.document)
        self.findings = Findings()

    def check(self, name: str) -> None:
        """Ask on the cache as it now is."""
        try:
            found = answer(self.settings, self.document)
        except StoreError as error:
            self.findings.refused += 1
            if "--no-cache" not in str(error):
                self.findings.wrong.append(f"{name}: no remedy: {error}")
            return
        for part in ("text", "citations"):
            if getattr(found, part) != getattr(self.expected, part):
                self.findings.wrong.append(f"{name}: the answer's {part} differ")
        if found.selection.passages != self.expected.selection.passages:
            self.findings.wrong.append(f"{name}: the passages differ")


def killed_sessions(trial: Trial, root: Path, rounds: int, seed: int) -> None:
    """Sessions that read a longer document are killed; the next one goes on where they were."""
    document = root / "longer.txt"
    document.write_text(DOCUMENT.read_text(encoding="utf-8")[:NUM_CHARS_TO_KILL])
    killed = kill_session.campaign(trial.settings.model, str(document), rounds, seed)
    trial.findings.faults["sessions killed while they read"] += rounds - killed.too_late
    trial.findings.wrong += [f"killed session: {problem}" for problem in killed.problems]


def campaign(seed: int, stride: int, rounds: int) -> Findings:
    """All faults; of the writing calls, only each so many-th. rounds: of killed sessions."""
    chance = random.Random(seed)
    with tempfile.TemporaryDirectory() as directory:
        trial = Trial(Path(directory))
        files = sorted(path for path in trial.pristine.rglob("*") if path.is_file())
        for path in files:
            if path.suffix == ".lock":
                continue
            name = path.relative_to(trial.pristine)
            shutil.copytree(trial.pristine, trial.work)
            (trial.work / name).write_bytes(chance.randbytes(NUM_RANDOM_BYTES))
            trial.findings.faults["answers from a cache with noise"] += 1
            trial.check(str(name))
            trial.check(f"{name}, again")
            shutil.rmtree(trial.work)
        for kind, (number, names) in (("a full disk", FULL), ("a read-only disk", READ_ONLY)):
            for is_new in (True, False):
                for num_calls in range(0, 10_000, stride):
                    if not is_new:
                        shutil.copytree(trial.pristine, trial.work)
                    with from_call(num_calls, names, refuse(number)) as struck:
                        trial.check(f"{kind} at call {num_calls}")
                    trial.check(f"after {kind} at call {num_calls}")
                    shutil.rmtree(trial.work, ignore_errors=True)
                    if not struck:
                        break
                    trial.findings.faults[f"answers on {kind}"] += 1
        killed_sessions(trial, Path(directory), rounds, seed)
    return trial.findings


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--stride", type=int, default=7)
    parser.add_argument("--rounds", type=int, default=40)
    options = parser.parse_args()
    torch.set_num_threads(1)
    findings = campaign(options.seed, options.stride, options.rounds)
    for kind, number in findings.faults.items():
        print(f"{kind:<40} {number:>5}")
    print(f"refused with a remedy: {findings.refused}; wrong answers: {len(findings.wrong)}")
    for problem in findings.wrong:
        print(f"  {problem}")
    return 1 if findings.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
