"""A model's vocabulary: the bytes behind each token id and the added tokens, from tokenizer.json.

Owns what ids mean. How text becomes ids is tiktoken_bpe.py's and tokenizer.py's business.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from longread.errors import ModelError

_SPACE_MARK = "\u2581"  # SentencePiece's stand-in for a space


class Unsupported(ModelError):
    """A tokenizer.json of a kind that cannot be read; the message is completed by the loader."""


@dataclass(frozen=True)
class AddedToken:
    """A token that is found in text before any splitting; `special` ones only in templates."""

    id: int
    content: str
    special: bool
    lstrip: bool  # white space before it belongs to it
    rstrip: bool


@dataclass(frozen=True)
class Vocabulary:
    """Bytes of every id. The bytes of id i are `blob[ends[i - 1] : ends[i]]`; holes are empty."""

    byte_level: bool  # the tokens' bytes in a row are the text's UTF-8; else SentencePiece's pieces
    strip_leading: bool  # decoding drops one space at the start, which encoding had put there
    nfc: bool  # text is brought to NFC before it is cut
    missing_bytes: bytes  # values without a token in a byte-level vocabulary; they vanish from text
    blob: bytes
    ends: np.ndarray  # int32 [V]
    added: tuple[AddedToken, ...]

    @classmethod
    def from_spec(cls, spec: dict[str, Any]) -> Vocabulary:
        """Read a parsed tokenizer.json. Raises Unsupported where it is not a BPE we know."""
        model = spec["model"]
        if model.get("type", "BPE") != "BPE" or not isinstance(model.get("vocab"), dict):
            raise Unsupported(f"it is a {model.get('type', 'different')} model, not BPE")
        steps = [*parts(spec.get("decoder")), *parts(spec.get("pre_tokenizer"))]
        kinds = {step["type"] for step in steps}
        byte_level = "ByteLevel" in kinds
        if not byte_level and not kinds & {"ByteFallback", "Metaspace"}:
            raise Unsupported("its pieces are neither byte-level nor SentencePiece's")
        added = tuple(
            AddedToken(
                id=token["id"],
                content=token["content"],
                special=token.get("special", False),
                lstrip=token.get("lstrip", False),
                rstrip=token.get("rstrip", False),
            )
            for token in spec.get("added_tokens") or ()
        )
        as_bytes = _byte_level_bytes if byte_level else _sentencepiece_bytes
        by_id = {token_id: as_bytes(piece) for piece, token_id in model["vocab"].items()}
        by_id.update((token.id, token.content.encode()) for token in added)
        chunks = [by_id.get(token_id, b"") for token_id in range(max(by_id, default=-1) + 1)]
        return cls(
            byte_level=byte_level,
            strip_leading=not byte_level and _strips_leading(parts(spec.get("decoder"))),
            nfc=[step["type"] for step in parts(spec.get("normalizer"))] == ["NFC"],
            missing_bytes=bytes(
                value for letter, value in _BYTE_OF.items() if letter not in model["vocab"]
            )
            if byte_level
            else b"",
            blob=b"".join(chunks),
            ends=np.cumsum([len(chunk) for chunk in chunks], dtype=np.int32),
            added=added,
        )

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """Ids of the special tokens, which decode to nothing unless asked."""
        return frozenset(token.id for token in self.added if token.special)

    @cached_property
    def starts(self) -> np.ndarray:
        """int32 [V]: where the bytes of each id begin in `blob`."""
        return np.concatenate((np.zeros(1, np.int32), self.ends[:-1]))

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of one id; nothing for an id that the vocabulary does not have."""
        if not 0 <= token_id < len(self.ends):
            return b""
        return self.blob[self.starts[token_id] : self.ends[token_id]]

    def byte_lens(self, ids: np.ndarray) -> np.ndarray:
        """int64 [N]: number of bytes of each of `ids`, which must be in the vocabulary."""
        return (self.ends[ids] - self.starts[ids]).astype(np.int64)

    def joined(self, ids: np.ndarray) -> bytes:
        """The bytes of `ids` in a row."""
        blob = self.blob
        bounds = zip(self.starts[ids].tolist(), self.ends[ids].tolist(), strict=True)
        return b"".join([blob[start:end] for start, end in bounds])


def parts(node: dict[str, Any] | None) -> Iterator[dict[str, Any]]:
    """The steps of a normalizer, pre-tokenizer or decoder, with sequences flattened."""
    if node is None:
        return
    if node["type"] != "Sequence":
        yield node
        return
    for key in ("normalizers", "pretokenizers", "decoders"):
        for child in node.get(key) or ():
            yield from parts(child)


def byte_alphabet() -> dict[str, int]:
    """GPT-2's letters: the character that stands for each byte value in byte-level pieces.

    Printable Latin-1 stands for itself; the other 68 values take U+0100 onwards in their order.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [value for value in range(256) if value not in set(printable)]
    alphabet = {chr(value): value for value in printable}
    alphabet.update((chr(0x100 + position), value) for position, value in enumerate(rest))
    return alphabet


_BYTE_OF = byte_alphabet()


def _byte_level_bytes(piece: str) -> bytes:
    try:
        return bytes([_BYTE_OF[character] for character in piece])
    except KeyError:  # not made of byte letters: `tokenizers` decodes such a piece as it stands
        return piece.encode()


def _sentencepiece_bytes(piece: str) -> bytes:
    if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
        try:
            return bytes([int(piece[3:5], 16)])
        except ValueError:
            pass
    return piece.replace(_SPACE_MARK, " ").encode()


def _strips_leading(steps: Iterator[dict[str, Any]]) -> bool:
    for step in steps:
        if step["type"] == "Strip" and step.get("start", 0) > 0:
            return True
        if step["type"] == "Metaspace" and step.get("prepend_scheme", "always") != "never":
            return True
    return False
