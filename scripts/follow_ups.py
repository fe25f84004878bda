"""Follow-ups: what each policy still answers once it has chosen for another question.

Usage: python scripts/follow_ups.py [POLICY ...] [--budget 5%] [--model smollm2-135m]

Five facts stand in a novel's paragraphs. Five conversations of three questions ask for each fact
once at each turn. Prints for each policy how many of five were right at each turn, and the rows
read over rows cached.
"""

from __future__ import annotations

import argparse
import dataclasses
import tempfile
from pathlib import Path

from longread.config import POLICY_NAMES, Settings
from longread.events import Answer
from longread.session import Session

NOVEL = Path(__file__).resolve().parent.parent / "sample_docs" / "northanger_abbey.txt"
NUM_PARAGRAPHS, NUM_TURNS = 12, 3
FACTS = (
    ("The password of the blue door is 4817.", "What is the password of the blue door?", "4817"),
    (
        "The best thing to eat in Bristol is the plum cake.",
        "What is the best thing to eat in Bristol?",
        "plum",
    ),
    (
        "The train to Oxford leaves from platform 23.",
        "From which platform does the train to Oxford leave?",
        "23",
    ),
    (
        "The treasure is buried under the old oak tree in Pemberton.",
        "Where is the treasure buried?",
        "oak",
    ),
    ("The gardener's cat is called Pepper.", "What is the gardener's cat called?", "Pepper"),
)
PLACES = ((1, 0), (3, 2), (5, 3), (7, 4), (9, 1))  # before which paragraph stands which fact


def document() -> str:
    """Paragraphs of the novel with the facts between them."""
    paragraphs = (" ".join(part.split()) for part in NOVEL.read_text().split("\n\n"))
    parts = [part for part in paragraphs if len(part) > 200][:NUM_PARAGRAPHS]
    for place, fact in PLACES:
        parts.insert(place, FACTS[fact][0])
    return "\n\n".join(parts)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("policies", nargs="*", metavar="POLICY", help=", ".join(POLICY_NAMES))
    parser.add_argument("--budget", default="5%")
    parser.add_argument("--model", default="smollm2-135m")
    options = parser.parse_args()
    settings = Settings(
        model=options.model,
        budget=options.budget,
        no_cache=True,
        policy="dense",
        window_size=64,
        max_tokens=24,
    )
    session = Session(settings)
    with tempfile.TemporaryDirectory(prefix="longread-follow-ups-") as folder:
        path = Path(folder) / "novel.txt"
        path.write_text(document(), encoding="utf-8")
        list(session.open([str(path)]))
    for policy in options.policies or POLICY_NAMES:
        right, shares = [0] * NUM_TURNS, []
        for first in range(len(FACTS)):
            while session.undo():
                pass
            session.configure(dataclasses.replace(settings, policy=policy))
            for turn in range(NUM_TURNS):
                _, question, wanted = FACTS[(first + 2 * turn) % len(FACTS)]
                *_, answer = session.ask(question)
                assert isinstance(answer, Answer)
                right[turn] += wanted.lower() in answer.text.lower()
                shares.append(answer.selection.fraction_kept)
        turns = " / ".join(map(str, right))
        print(f"{policy:12} {turns}   {sum(shares) / len(shares):.3f}", flush=True)


if __name__ == "__main__":
    main()
