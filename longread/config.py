"""Settings: every option with its default, where its value came from, and the directories.

The only file that reads the environment. It knows option values as text and numbers; what a policy
or a device does with them belongs to the layers above.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import os
import re
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import platformdirs

from longread import values
from longread.errors import UsageError

POLICY_NAMES = (
    "tokenselect",
    "dense",
    "streaming",
    "butler",
    "quest",
    "snapkv",
    "pyramidkv",
    "h2o",
    "razor",
    "xkv",
)
VOTE_NAMES = ("group", "group-max", "all", "threshold", "none")
INDEX_NAMES = ("int8", "fp8", "exact")
DTYPE_NAMES = ("auto", "bfloat16", "float32")
KV_DTYPE_NAMES = ("bf16", "int8")
WEIGHTS_NAMES = ("auto", "bf16", "int8", "int4")
CONTEXT_NAMES = ("auto", "dense", "select", "yarn")

PROJECT_FILE = "longread.toml"
ENV_PREFIX = "LONGREAD_"


@dataclass(frozen=True)
class Budget:
    """Rows that a KV head may choose per step: a count or a share, never both."""

    tokens: int | None = None
    fraction: float | None = None

    def resolve(self, num_rows: int, most: int | None = None) -> int | None:
        """Return the count for documents of `num_rows` rows, at least 1; None for all rows.

        most: rows that a share is at most, but for a share of 100%.
        """
        if self.tokens is not None:
            return self.tokens
        if self.fraction == 1.0:
            return None
        assert self.fraction is not None, "a budget is tokens or a fraction"
        # The subtraction keeps binary fractions from asking for a row more than the decimal says.
        count = max(1, math.ceil(self.fraction * num_rows - 1e-6))
        return min(num_rows, count) if most is None else min(num_rows, count, most)


def parse_budget(text: str) -> Budget:
    """Read `512` as tokens, `0.2` and `20%` as a fraction in (0, 1]; UsageError otherwise."""
    word = text.strip()
    if re.fullmatch(r"[0-9]{1,18}", word):
        if int(word) > 0:
            return Budget(tokens=int(word))
    elif match := re.fullmatch(r"([0-9]+\.?[0-9]*|\.[0-9]+)(%?)", word):
        fraction = float(match[1]) / (100.0 if match[2] else 1.0)
        if 0.0 < fraction <= 1.0:
            return Budget(fraction=fraction)
    raise UsageError(
        f"budget {text!r} is not a budget: give a number of tokens (512), "
        "a fraction up to 1.0 (0.2) or a percentage up to 100% (20%)"
    )


def _default_cache_dir() -> Path:
    return Path(platformdirs.user_cache_dir("longread", appauthor=False))


def _default_models_dir() -> Path:
    return Path(platformdirs.user_data_dir("longread", appauthor=False)) / "models"


def _default_sessions_dir() -> Path:
    return Path(platformdirs.user_data_dir("longread", appauthor=False)) / "sessions"


def user_config_path() -> Path:
    """Return the user's own settings file, which need not exist."""
    return Path(platformdirs.user_config_dir("longread", appauthor=False)) / "config.toml"


@dataclass(frozen=True)
class Settings:
    """Every option of one run; sizes in bytes, lengths in tokens."""

    model: str = "qwen2.5-coder-1.5b"
    device: str = "auto"
    dtype: str = "auto"
    weights: str = "auto"
    kv_dtype: str = "bf16"
    context: str = "auto"
    policy: str = "tokenselect"
    budget: str = "20%"
    vote: str = "group"
    min_votes: int = 1
    index: str = "int8"
    index_dim: int = 0
    sink_size: int = 4
    window_size: int = 256
    reselect: int = 1
    butler: str = ""
    neighbours: int = 0
    max_tokens: int = 512
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    cache_dir: Path = field(default_factory=_default_cache_dir)
    models_dir: Path = field(default_factory=_default_models_dir)
    sessions_dir: Path = field(default_factory=_default_sessions_dir)
    cache_max_bytes: int = 20 * 1024**3
    no_wait: bool = False
    no_cache: bool = False
    threads: int = 0
    truncate: bool = False


@dataclass(frozen=True)
class Resolved:
    """Settings and, for each option's name, where its value came from."""

    settings: Settings
    origins: dict[str, str]


def _budget(value: object) -> str:
    word = values.text(value)
    parse_budget(word)
    return word


@dataclass(frozen=True)
class _Option:
    parse: Callable[[object], object]
    field_name: str = ""  # where it differs from the option's name


_OPTIONS: dict[str, _Option] = {
    "model": _Option(values.model),
    "device": _Option(values.device),
    "dtype": _Option(values.choice(DTYPE_NAMES)),
    "weights": _Option(values.choice(WEIGHTS_NAMES)),
    "kv_dtype": _Option(values.choice(KV_DTYPE_NAMES)),
    "context": _Option(values.choice(CONTEXT_NAMES)),
    "policy": _Option(values.choice(POLICY_NAMES)),
    "budget": _Option(_budget),
    "vote": _Option(values.choice(VOTE_NAMES)),
    "min_votes": _Option(values.integer(1)),
    "index": _Option(values.choice(INDEX_NAMES)),
    "index_dim": _Option(values.integer(0)),
    "sink_size": _Option(values.integer(0)),
    "window_size": _Option(values.integer(0)),
    "reselect": _Option(values.integer(1)),
    "butler": _Option(str),
    "neighbours": _Option(values.integer(0, 1024)),
    "max_tokens": _Option(values.integer(1)),
    "temperature": _Option(values.real(0.0, 100.0)),
    "top_p": _Option(values.real(0.0, 1.0, above_low=True)),
    "seed": _Option(values.integer(0, 2**63 - 1)),
    "cache_dir": _Option(values.directory),
    "models_dir": _Option(values.directory),
    "sessions_dir": _Option(values.directory),
    "cache_size": _Option(values.size, "cache_max_bytes"),
    "no_wait": _Option(values.switch),
    "no_cache": _Option(values.switch),
    "threads": _Option(values.integer(0, 4096)),
    "truncate": _Option(values.switch),
}

OPTION_NAMES = tuple(_OPTIONS)


def option_value(settings: Settings, name: str) -> object:
    """Return the value of the option `name` as its user knows it."""
    return getattr(settings, _OPTIONS[name].field_name or name)


def load_settings(flags: Mapping[str, object | None], cwd: Path | None = None) -> Resolved:
    """Resolve every option: flag, `LONGREAD_*`, `longread.toml` in `cwd`, user file, default.

    A flag whose value is None was not given. Raises UsageError naming the option and the place
    of the bad value; a file's unknown option is an error as well, since it would do nothing.
    """
    unknown = set(flags) - set(_OPTIONS)
    assert not unknown, f"flags that are no options: {sorted(unknown)}"
    fields: dict[str, Any] = {}
    origins = dict.fromkeys(_OPTIONS, "default")
    # Later sources win.
    for source in (
        _from_file(user_config_path()),
        _from_file((cwd or _working_directory()) / PROJECT_FILE),
        _from_environment(),
        {name: (raw, _flag_name(name)) for name, raw in flags.items() if raw is not None},
    ):
        for name, (raw, origin) in source.items():
            option = _OPTIONS[name]
            try:
                fields[option.field_name or name] = option.parse(raw)
            except ValueError as error:
                raise UsageError(f"{name} is {str(raw)!r} (from {origin}): {error}") from None
            except UsageError as error:
                raise UsageError(f"{error} (from {origin})") from None
            origins[name] = origin
    return Resolved(dataclasses.replace(Settings(), **fields), origins)


def _flag_name(name: str) -> str:
    return "--" + name.replace("_", "-")


def _working_directory() -> Path:
    try:
        return Path.cwd()
    except OSError:  # it was deleted under us; there is no project file in it then
        return Path("/")


def _from_environment() -> dict[str, tuple[object, str]]:
    keys = {name: ENV_PREFIX + name.upper() for name in _OPTIONS}
    # An empty variable counts as unset, as in most shells' idiom.
    return {name: (os.environ[key], key) for name, key in keys.items() if os.environ.get(key)}


def _from_file(path: Path) -> dict[str, tuple[object, str]]:
    try:
        with path.open("rb") as file:
            table = tomllib.load(file)
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}; mend or remove it") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise UsageError(f"{path} is not valid TOML: {error}") from None
    found: dict[str, tuple[object, str]] = {}
    for key, value in table.items():
        name = key.replace("-", "_")
        if name not in _OPTIONS:
            near = difflib.get_close_matches(name, _OPTIONS, n=1)
            hint = f"did you mean {near[0]}?" if near else "see `longread config show`"
            raise UsageError(f"{path}: there is no option {key!r}; {hint}")
        if isinstance(value, dict | list):
            raise UsageError(f"{path}: {key} must be a single value")
        found[name] = (value, str(path))
    return found


def password() -> str | None:
    """Return the documents' password from `LONGREAD_PASSWORD`, or None."""
    return os.environ.get(ENV_PREFIX + "PASSWORD") or None
