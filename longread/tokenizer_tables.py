"""What a model's tokenizer.json comes down to, kept in one small file beside it.

Owns the cached tables, the fuzz corpus that tiktoken must read as `tokenizers` does, and the
verdict: parsing and checking take seconds, so they are done once for each tokenizer.json.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import random
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unicodedata import normalize

import numpy as np
import xxhash

from longread.errors import ModelError
from longread.tiktoken_bpe import Ranks, TiktokenBpe, read_ranks
from longread.vocabulary import AddedToken, Unsupported, Vocabulary

if TYPE_CHECKING:
    import tokenizers

_FILE = "tokenizer_tables.bin"  # a checksum of 16 bytes, then arrays in numpy's npz
_FORMAT = 1  # counts up with every change of what is stored or of how it is checked
_NUM_RANDOM_TEXTS = 4000
_LINES_PER_TEXT = 16
_SEED = 20240607


@dataclass(frozen=True)
class Tables:
    """One tokenizer, ready for use. `ranks` is None where `tokenizers` must do the encoding."""

    identity: str  # SHA-256 of tokenizer.json, hex
    vocabulary: Vocabulary
    ranks: Ranks | None
    reason: str  # why there are no ranks; empty where there are


def load_tables(model_dir: Path) -> Tables:
    """Read the tables of `model_dir`/tokenizer.json, from the cached file where it is current.

    Otherwise they are made, checked and kept; a directory that cannot be written is no error.
    Raises ModelError for a missing, damaged or unsupported tokenizer.json.
    """
    path = model_dir / "tokenizer.json"
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ModelError(
            f"cannot read {path}: {error.strerror}; "
            f"run `longread models rm {model_dir.name}` and try again"
        ) from error
    identity = hashlib.sha256(data).hexdigest()
    tables = _read(model_dir / _FILE, identity)
    if tables is None:
        tables = _make(path, data, identity)
        with suppress(OSError):
            _write(model_dir / _FILE, tables)
    return tables


def load_reference(path: Path) -> tokenizers.Tokenizer:
    """The model's own tokenizer from a tokenizer.json: special tokens in text are plain text.

    It neither cuts, pads nor adds anything. Raises ModelError where the file cannot be read.
    """
    import tokenizers
    from tokenizers.processors import TemplateProcessing

    try:
        reference = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing narrower
        raise ModelError(
            f"{path} is not a tokenizer that `tokenizers` {tokenizers.__version__} reads: {error}"
        ) from error
    reference.no_truncation()
    reference.no_padding()
    # The byte-level post-processor would trim white space off the offsets.
    reference.post_processor = TemplateProcessing(single="$A", pair="$A $B", special_tokens=[])
    reference.encode_special_tokens = True
    return reference


def _make(path: Path, data: bytes, identity: str) -> Tables:
    try:
        spec = json.loads(data)
        vocabulary = Vocabulary.from_spec(spec)
    except Unsupported as error:
        raise ModelError(
            f"{path} is not supported: {error}; use a model of the llama, mistral or qwen families"
        ) from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(
            f"{path} is damaged ({error!r}); "
            f"run `longread models rm {path.parent.name}` and try again"
        ) from error
    try:
        ranks = read_ranks(spec, vocabulary)
    except Unsupported as error:
        return Tables(identity, vocabulary, None, str(error))
    difference = find_difference(TiktokenBpe(vocabulary, ranks), load_reference(path), vocabulary)
    if difference is not None:
        return Tables(identity, vocabulary, None, f"tiktoken reads {difference!r:.80} differently")
    return Tables(identity, vocabulary, ranks, "")


def find_difference(
    fast: TiktokenBpe, reference: tokenizers.Tokenizer, vocabulary: Vocabulary
) -> str | None:
    """The first text of the fuzz corpus that the two read differently, or None.

    Texts that `fast` hands back are the reference's anyway.
    """
    for text in fuzz_texts(vocabulary):
        try:
            ids = fast.encode(normalize("NFC", text) if vocabulary.nfc else text)
        except ValueError:  # tiktoken could not be built from these ranks or this pattern
            return text
        if ids is None:
            continue
        # One by one: a batch would start threads, after which the library complains at each fork.
        if ids.tolist() != reference.encode(text, add_special_tokens=False).ids:
            return text
    return None


def fuzz_texts(vocabulary: Vocabulary) -> Iterator[str]:
    """Every token on a line of its own, then seeded mixtures of tokens, scripts and white space."""
    tokens = []
    for token_id in range(len(vocabulary.ends)):
        with suppress(UnicodeDecodeError):
            tokens.append(vocabulary.token_bytes(token_id).decode())
    for start in range(0, len(tokens), _LINES_PER_TEXT):
        yield "\n".join(tokens[start : start + _LINES_PER_TEXT])
    words = [token.strip() for token in tokens if token.strip().isalpha()]
    pools: list[list[str]] = [
        [token.content for token in vocabulary.added] or [""],
        [chr(point) for point in range(0x3001) if chr(point).isspace()],
        [" ", "\n", "\t", "\r\n", "  ", "\n\n"],
        ["'s", "'T", "'re", "'VE", "'m", "'ll", "'D", "'\u017f", "\u2019s", "'", "''"],
        list('!?.,;:()[]<>{}|/\\-_*#@&%$^~`"+='),
        list("0123456789\u0663\u096a\u00bd\u2167\u3007\u00b2"),
        # Cased, uncased, titlecase and composing letters of several scripts
        list("az\u00e9\u00df\u0130\u01c5\u0434\u05e9\u0639\u0927\u093f\u0e33\u4e2d\u3042\uac00"),
        # Marks, joiners, controls, an emoji, a flag half and a tag
        list(
            "\u0301\u0323\u200d\ufe0f\u00ad\ufeff\ufffd\x00\x1f\x7f\U0001f600\U0001f1e9\U000e0041"
        ),
        tokens or [""],
        words or ["a"],
    ]
    source = random.Random(_SEED)
    for _ in range(_NUM_RANDOM_TEXTS):
        chosen = source.choices(pools, k=source.randint(1, 3))
        yield "".join(source.choice(source.choice(chosen)) for _ in range(source.randint(1, 12)))
    for space in " \n\t\u00a0\u3000":
        for length in (2, 3, 17, 300):
            yield f"a{space * length}b 1{space * length}2{space * length}"


def _library_versions() -> list[str]:
    return [version("tiktoken"), version("tokenizers")]


def _write(path: Path, tables: Tables) -> None:
    vocabulary, ranks = tables.vocabulary, tables.ranks
    meta = {
        "format": _FORMAT,
        "libraries": _library_versions(),
        "identity": tables.identity,
        "reason": tables.reason,
        "pattern": ranks.pattern if ranks else None,
        "byte_level": vocabulary.byte_level,
        "strip_leading": vocabulary.strip_leading,
        "nfc": vocabulary.nfc,
        "missing_bytes": list(vocabulary.missing_bytes),
        "added": [asdict(token) for token in vocabulary.added],
    }
    buffer = io.BytesIO()
    np.savez(
        buffer,
        meta=np.frombuffer(json.dumps(meta).encode(), np.uint8),
        blob=np.frombuffer(vocabulary.blob, np.uint8),
        ends=vocabulary.ends,
        rank_ids=ranks.ids if ranks else np.zeros(0, np.int32),
    )
    fd, temp = tempfile.mkstemp(dir=path.parent, prefix=".tmp-")
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(xxhash.xxh3_128_digest(buffer.getvalue()) + buffer.getvalue())
        os.replace(temp, path)
    except BaseException:
        os.unlink(temp)
        raise


def _read(path: Path, identity: str) -> Tables | None:
    """The tables in `path` if they are whole, and made from this file with these libraries."""
    try:
        data = path.read_bytes()
    except OSError:
        return None
    if xxhash.xxh3_128_digest(data[16:]) != data[:16]:
        return None
    with np.load(io.BytesIO(data[16:]), allow_pickle=False) as arrays:
        meta: dict[str, Any] = json.loads(arrays["meta"].tobytes())
        current = (_FORMAT, _library_versions(), identity)
        if (meta["format"], meta["libraries"], meta["identity"]) != current:
            return None
        vocabulary = Vocabulary(
            byte_level=meta["byte_level"],
            strip_leading=meta["strip_leading"],
            nfc=meta["nfc"],
            missing_bytes=bytes(meta["missing_bytes"]),
            blob=arrays["blob"].tobytes(),
            ends=arrays["ends"],
            added=tuple(AddedToken(**token) for token in meta["added"]),
        )
        pattern = meta["pattern"]
        ranks = None if pattern is None else Ranks(pattern, arrays["rank_ids"])
        return Tables(identity, vocabulary, ranks, meta["reason"])
