"""What is in the store, for people: listing, verifying and finding entries by a key's beginning.

Reads manifests only, so listing needs no torch; nothing here writes but `verify_entry`, which
quarantines what it finds damaged.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from longread.atomic import Damaged, check_file
from longread.entry import Entry
from longread.errors import UsageError
from longread.events import Notice, NoticeFn
from longread.manifest import MANIFEST_NAME, TOKENS_NAME, Manifest, OtherVersion
from longread.space import Item, Space


@dataclass(frozen=True)
class EntryInfo:
    """One KV entry as `cache ls` shows it."""

    key: str
    names: tuple[str, ...]  # of the documents
    model: str
    num_tokens: int
    num_ready: int
    num_bytes: int  # of all its files, those shared with other entries included
    created_s: float  # seconds since the epoch
    last_used_s: float
    state: str  # complete, partial, damaged or other version


@dataclass(frozen=True)
class StoreInfo:
    """The store as a whole; files that entries share count once in `used_bytes`."""

    root: Path
    max_bytes: int
    used_bytes: int
    free_bytes: int  # on the disk
    num_entries: int
    num_partial: int
    num_damaged: int
    num_records: int
    record_bytes: int
    quarantine_bytes: int


@dataclass(frozen=True)
class VerifyResult:
    """`problems` names each damaged file and what is wrong with it; empty where all is well."""

    key: str
    kind: str  # entry or record
    num_bytes: int
    state: str  # ok, damaged, in use or other version
    problems: tuple[str, ...] = ()


def entry_info(item: Item) -> EntryInfo:
    """Facts from the manifest; an entry whose files are not as it says is listed as damaged."""
    key = item.path.name
    blank = EntryInfo(key, (), "", 0, 0, item.num_bytes, 0.0, item.last_used_s, "damaged")
    try:
        manifest = Manifest.load(item.path)
    except OtherVersion:
        return replace(blank, state="other version")
    except Damaged:
        return blank
    sizes = {name: stamp.num_bytes for name, stamp in manifest.files().items()}
    whole = all(_size(item.path / name) == size for name, size in sizes.items())
    state = "complete" if manifest.complete else "partial"
    return EntryInfo(
        key=key,
        names=tuple(manifest.names),
        model=manifest.model,
        num_tokens=manifest.num_tokens,
        num_ready=manifest.num_ready,
        num_bytes=item.num_bytes,
        created_s=manifest.created_s,
        last_used_s=item.last_used_s,
        state=state if whole else "damaged",
    )


def match_key(prefix: str, keys: list[str]) -> str:
    """The one key that starts with `prefix`. Raises UsageError for none or several."""
    matches = [key for key in keys if prefix and key.startswith(prefix)]
    if prefix in matches:
        return prefix
    if not matches:
        raise UsageError(f"no cache entry starts with {prefix!r}; `longread cache ls` lists them")
    if len(matches) > 1:
        some = ", ".join(key[: len(prefix) + 8] for key in matches[:4])
        raise UsageError(f"{len(matches)} cache entries start with {prefix!r} ({some}, ...)")
    return matches[0]


def verify_entry(item: Item, space: Space, notice: NoticeFn) -> VerifyResult:
    """Check every byte of an entry whose lock is held; quarantine what is damaged."""
    key = item.path.name
    try:
        manifest = Manifest.load(item.path)
    except OtherVersion:
        return VerifyResult(key, "entry", item.num_bytes, "other version")
    except Damaged as error:
        problem = f"{MANIFEST_NAME} {error}"
        message = f"cache entry {key[:12]}: {problem}; quarantined, the document is read again"
        notice(Notice(message))
        space.quarantine(item.path / MANIFEST_NAME, key)
        space.delete(item.path)
        return VerifyResult(key, "entry", item.num_bytes, "damaged", (problem,))
    entry = Entry(item.path, manifest, space, notice)
    problems = []
    for name, stamp in list(manifest.files().items()):
        try:
            check_file(item.path / name, stamp)
        except Damaged as error:
            problems.append(f"{name} {error}")
            if name == TOKENS_NAME:  # written anew when the entry is next used
                notice(Notice(f"cache entry {key[:12]}: {problems[-1]}"))
            else:
                entry.drop_damaged(name, error)
    state = "damaged" if problems else "ok"
    return VerifyResult(key, "entry", item.num_bytes, state, tuple(problems))


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return -1
