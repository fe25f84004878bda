"""Words, names and codes that RULER's tasks are made of, drawn from a given `random.Random`.

English words are the lists of the package wonderwords, as in RULER. Its second list, for prompts
of more words than these, is not to be had; made words of two to four syllables stand in for it.
"""

from __future__ import annotations

import random
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.resources import files

from longread.errors import UsageError

_CONSONANTS, _VOWELS = "bcdfghjklmnprstvwz", "aeiou"


@dataclass(frozen=True)
class WordLists:
    """The three lists, each sorted and without repetitions."""

    nouns: tuple[str, ...]
    adjectives: tuple[str, ...]
    verbs: tuple[str, ...]

    @classmethod
    def load(cls) -> WordLists:
        """Raises UsageError where the package is not installed."""
        try:
            folder = files("wonderwords.assets")
        except ModuleNotFoundError:
            raise UsageError(
                "this task needs word lists from one more library: pip install 'longread[eval]'"
            ) from None

        def words(name: str) -> tuple[str, ...]:
            text = (folder / f"{name}list.txt").read_text(encoding="utf-8")
            return tuple(sorted({line.strip() for line in text.splitlines()} - {""}))

        return cls(words("noun"), words("adjective"), words("verb"))

    def pair(self, draws: random.Random) -> str:
        """An adjective and a noun joined by a hyphen."""
        return f"{draws.choice(self.adjectives)}-{draws.choice(self.nouns)}"

    def at_least(self, num_words: int) -> list[str]:
        """All words, sorted; where these are too few, as many made words again, and so on.

        The made words are the same ones each time.
        """
        words = sorted({*self.nouns, *self.adjectives, *self.verbs})
        wanted = -(-num_words // len(words)) * len(words)
        made = distinct(_made_word, random.Random("made words"), words)
        return words + [next(made) for _ in range(wanted - len(words))]


def _made_word(draws: random.Random) -> str:
    syllables = range(draws.randint(2, 4))
    return "".join(draws.choice(_CONSONANTS) + draws.choice(_VOWELS) for _ in syllables)


def seven_digits(draws: random.Random) -> str:
    """Seven digits, the first not 0."""
    return str(draws.randint(1_000_000, 9_999_999))


def uuid4(draws: random.Random) -> str:
    """A UUID of version 4."""
    return str(uuid.UUID(int=draws.getrandbits(128), version=4))


def letters(alphabet: str, length: int) -> Callable[[random.Random], str]:
    """What draws names of `length` letters."""
    return lambda draws: "".join(draws.choice(alphabet) for _ in range(length))


def distinct(
    draw: Callable[[random.Random], str], draws: random.Random, taken: list[str] | None = None
) -> Iterator[str]:
    """What `draw` gives, without end and without repetitions or words of `taken`."""
    seen = set(taken or ())
    while True:
        drawn = draw(draws)
        if drawn not in seen:
            seen.add(drawn)
            yield drawn
