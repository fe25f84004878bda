"""The manifest of one KV entry: what it holds, for which tokens, with every file's checksum.

Owns the JSON form, its own checksum, the keys and the chain of block hashes. The files it names
are entry.py's.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
import xxhash

from longread.atomic import Damaged, FileStamp, disk_errors, write_atomic

FORMAT_VERSION = 1
MANIFEST_NAME = "manifest.json"
TOKENS_NAME = "tokens.i32"
BLOCK_LEN = 4096


class OtherVersion(Exception):
    """The manifest was written by a longread with another store format."""


def base_key(parts: Mapping[str, object]) -> str:
    """Hex SHA-256 over all that KV rows depend on beside the tokens; `parts` is JSON data."""
    text = json.dumps(dict(parts), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def entry_key(
    base: str, token_ids: np.ndarray, block_len: int, row_dims: Mapping[str, int | None]
) -> str:
    """Hex SHA-256 over the store's format, base, layout and token ids ([N] little-endian int32)."""
    layout = json.dumps(dict(row_dims), sort_keys=True)
    head = f"longread kv {FORMAT_VERSION}\n{base}\n{block_len}\n{layout}\n".encode()
    return hashlib.sha256(head + token_ids.tobytes()).hexdigest()


def chain_hashes(base: str, token_ids: np.ndarray, block_len: int) -> list[str]:
    """One hash a block, over the one before and the block's ids: equal hash, equal prefix."""
    hashes, last = [], base
    for start in range(0, len(token_ids), block_len):
        block = token_ids[start : start + block_len].tobytes()
        last = hashlib.sha256(last.encode() + block).hexdigest()
        hashes.append(last)
    return hashes


@dataclass
class Manifest:
    """`blocks` maps block number to stamp; blocks may be missing from the middle after damage."""

    key: str
    base: str
    block_len: int
    num_tokens: int
    tokens: FileStamp
    chain: list[str]
    row_dims: dict[str, int | None]
    created_s: float  # seconds since the epoch
    names: list[str]  # of the documents, for people
    model: str
    records: list[str]  # keys of the document records that belong to the entry
    expected_bytes: int = 0  # what the writer has announced that the entry will hold
    complete: bool = False
    blocks: dict[int, FileStamp] = field(default_factory=dict)
    extras: dict[str, FileStamp] = field(default_factory=dict)

    @property
    def num_blocks(self) -> int:
        return len(self.chain)

    @property
    def num_bytes(self) -> int:
        """Bytes of the payload files."""
        stamps = [self.tokens, *self.blocks.values(), *self.extras.values()]
        return sum(stamp.num_bytes for stamp in stamps)

    @property
    def num_ready(self) -> int:
        """Tokens of the unbroken run of blocks from the start."""
        block_idx = 0
        while block_idx in self.blocks:
            block_idx += 1
        return min(block_idx * self.block_len, self.num_tokens)

    def files(self) -> dict[str, FileStamp]:
        """Every payload file by name."""
        named = {TOKENS_NAME: self.tokens}
        named |= {block_name(block_idx): stamp for block_idx, stamp in sorted(self.blocks.items())}
        named |= {extra_name(name): stamp for name, stamp in sorted(self.extras.items())}
        return named

    def save(self, entry_dir: Path) -> None:
        """Replace the entry's manifest atomically. Raises StoreError."""
        fields = asdict(self)
        fields["blocks"] = {str(number): stamp for number, stamp in fields["blocks"].items()}
        write_atomic(entry_dir / MANIFEST_NAME, [_seal(fields)])

    @classmethod
    def load(cls, entry_dir: Path) -> Manifest:
        """Read and verify. Raises Damaged, OtherVersion, StoreError."""
        path = entry_dir / MANIFEST_NAME
        with disk_errors("read", path):
            try:
                raw = path.read_bytes()
            except (FileNotFoundError, NotADirectoryError):
                raise Damaged("is missing") from None
        fields = _unseal(raw)
        try:
            return cls._parse(fields)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise Damaged("lacks fields") from error

    @classmethod
    def _parse(cls, fields: dict) -> Manifest:
        stamps = {name: FileStamp(**stamp) for name, stamp in fields.pop("extras").items()}
        blocks = {int(number): FileStamp(**stamp) for number, stamp in fields.pop("blocks").items()}
        tokens = FileStamp(**fields.pop("tokens"))
        return cls(tokens=tokens, blocks=blocks, extras=stamps, **fields)


def block_name(block_idx: int) -> str:
    """File name of a block inside its entry."""
    return f"block-{block_idx:05d}.safetensors"


def extra_name(name: str) -> str:
    """File name of an extra inside its entry."""
    return f"extra-{name}.safetensors"


def _canonical(fields: object) -> bytes:
    return json.dumps(fields, sort_keys=True, separators=(",", ":")).encode()


def _seal(fields: dict) -> bytes:
    body = _canonical(fields)
    checksum = xxhash.xxh3_128_hexdigest(body)
    return _canonical({"version": FORMAT_VERSION, "checksum": checksum, "entry": fields}) + b"\n"


def _unseal(raw: bytes) -> dict:
    try:
        sealed = json.loads(raw)
        version, fields = sealed["version"], sealed["entry"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise Damaged("is not a manifest") from error
    if isinstance(version, int) and version != FORMAT_VERSION:
        raise OtherVersion(str(version))
    # The bytes must be the ones that we would write: a change that JSON forgives is damage too.
    if not isinstance(fields, dict) or raw != _seal(fields):
        raise Damaged("does not match its checksum")
    return fields
