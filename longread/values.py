"""Option values: text or TOML values to checked ones. Owns no option; `config` says which is which.

A parser takes what a flag, a variable or a file gave and returns the value, or raises ValueError
with the half sentence that tells the user what to give instead.
"""

from __future__ import annotations

import difflib
import re
import stat
from collections.abc import Callable
from pathlib import Path

_SIZE_UNITS = {"": 1, "k": 1000, "m": 1000**2, "g": 1000**3, "t": 1000**4}
_BINARY_UNITS = {"k": 1024, "m": 1024**2, "g": 1024**3, "t": 1024**4}
_TRUE_WORDS = ("1", "true", "yes", "on")
_FALSE_WORDS = ("0", "false", "no", "off")


def text(value: object) -> str:
    """Return the value without outer white space; empty text is refused."""
    word = str(value).strip()
    if not word:
        raise ValueError("it is empty")
    return word


def choice(names: tuple[str, ...]) -> Callable[[object], str]:
    """Return a parser that takes one of `names`."""

    def parse(value: object) -> str:
        word = text(value)
        if word not in names:
            near = difflib.get_close_matches(word, names, n=1)
            hint = f" (did you mean {near[0]}?)" if near else ""
            raise ValueError(f"choose one of {', '.join(names)}{hint}")
        return word

    return parse


def integer(low: int, high: int = 2**31 - 1) -> Callable[[object], int]:
    """Return a parser of whole numbers from `low` to `high`."""

    def parse(value: object) -> int:
        word = text(value)
        if isinstance(value, bool) or not re.fullmatch(r"[+-]?[0-9]{1,19}", word):
            raise ValueError("give a whole number")
        if not low <= int(word) <= high:
            raise ValueError(f"it must be from {low} to {high}")
        return int(word)

    return parse


def real(low: float, high: float, *, above_low: bool = False) -> Callable[[object], float]:
    """Return a parser of numbers from `low` (or above it) to `high`; NaN is refused."""

    def parse(value: object) -> float:
        try:
            number = float("nan") if isinstance(value, bool) else float(text(value))
        except ValueError:
            raise ValueError("give a number") from None
        if not low <= number <= high or (above_low and number == low):
            raise ValueError(f"it must be {'over' if above_low else 'from'} {low:g} to {high:g}")
        return number

    return parse


def switch(value: object) -> bool:
    """Read true or false, as TOML or as the usual words."""
    if isinstance(value, bool):
        return value
    word = text(value).lower()
    if word in _TRUE_WORDS:
        return True
    if word in _FALSE_WORDS:
        return False
    raise ValueError("give true or false")


def path(value: object) -> Path:
    """Return a path, a leading ~ replaced by the home it means; nothing need be there."""
    word = text(value)
    if "\0" in word:
        raise ValueError("it holds a NUL character, which no path can")
    try:
        return Path(word).expanduser()
    except RuntimeError:
        raise ValueError(f"no home of {word.split('/')[0]} is known; write the path out") from None


def directory(value: object) -> Path:
    """Return the absolute path of a directory, which need not exist yet but could."""
    try:
        found = path(value).absolute()
    except OSError:
        raise ValueError("the working directory is gone; give an absolute path") from None
    for place in (found, *found.parents):
        try:
            kind = place.stat().st_mode
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError as error:
            raise ValueError(f"it cannot be used: {error.strerror}; give another") from None
        if not stat.S_ISDIR(kind):
            raise ValueError(f"{'it' if place == found else place} is a file; give a directory")
        break
    return found


def size(value: object) -> int:
    """Read bytes: `20GB` (powers of 1000), `20GiB` (powers of 1024) or a plain number."""
    match = re.fullmatch(r"([0-9]{1,18}(?:\.[0-9]+)?)\s*([kmgt]?)(i?)b?", text(value).lower())
    if match and not (match[3] and not match[2]):
        units = _BINARY_UNITS if match[3] else _SIZE_UNITS
        num_bytes = int(float(match[1]) * units[match[2]])
        if num_bytes > 0:
            return num_bytes
    raise ValueError("give a size such as 20GB, 512MiB or a number of bytes")


def device(value: object) -> str:
    """Read a device's name; whether the machine has it is the runner's to say."""
    word = text(value)
    if not re.fullmatch(r"auto|cpu|cuda(:[0-9]{1,3})?", word):
        raise ValueError("choose auto, cpu, cuda or cuda:N")
    return word


def model(value: object) -> str:
    """Read a model's name, id or path; a leading ~ is the user's home."""
    word = text(value)
    return str(path(word)) if word.startswith("~") else word
