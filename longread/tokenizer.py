"""Text to token ids with exact character offsets, and ids back to text as they stream.

Owns which engine reads a text: tiktoken where it was found equal to the model's own tokenizer and
can take the text, `tokenizers` otherwise. Templates are prompt.py's business.
"""

from __future__ import annotations

import codecs
import unicodedata
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from longread.normal_form import nfc_with_spans, without_surrogates
from longread.tiktoken_bpe import TiktokenBpe
from longread.tokenizer_tables import Tables, load_reference, load_tables
from longread.vocabulary import Vocabulary

if TYPE_CHECKING:
    import tokenizers


class Tokenizer:
    """One model's tokenizer. Special tokens in text are plain text, except in templates."""

    def __init__(self, path: Path, tables: Tables) -> None:
        self._path = path
        self._vocabulary = tables.vocabulary
        self._fast = TiktokenBpe(tables.vocabulary, tables.ranks) if tables.ranks else None
        self.identity = tables.identity  # SHA-256 of tokenizer.json, hex
        self.fallback_reason = tables.reason  # why tiktoken is not used; empty where it is

    @classmethod
    def load(cls, model_dir: Path) -> Tokenizer:
        """Read `model_dir`/tokenizer.json; the first time takes seconds, for the check.

        Raises ModelError for a missing, damaged or unsupported file.
        """
        return cls(model_dir / "tokenizer.json", load_tables(model_dir))

    @property
    def is_fast(self) -> bool:
        """Whether tiktoken encodes."""
        return self._fast is not None

    def encode(self, text: str) -> list[int]:
        """Ids of `text`; nothing is added, and no special token comes out."""
        return self._ids(self._clean(text), specials=False).tolist()

    def encode_template(self, text: str) -> list[int]:
        """Ids of a template's own text, with special tokens recognised; nothing is added."""
        return self._ids(self._clean(text), specials=True).tolist()

    def encode_with_offsets(self, text: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Ids of `text` and the characters of it that each one touches: int32 ids, starts, ends.

        All are [N]; starts and ends are monotone, and tokens that share a character (the bytes of
        one) have overlapping spans. A character between two spans has no token in the vocabulary.
        """
        clean = without_surrogates(text)
        origin = None
        if self._vocabulary.nfc and not unicodedata.is_normalized("NFC", clean):
            clean, *origin = nfc_with_spans(clean)
        ids = self._ids(clean, specials=False)
        if len(ids) == 0:
            return ids, np.zeros(0, np.int32), np.zeros(0, np.int32)
        spans = self._spans_from_bytes(ids, clean.encode())
        starts, ends = spans if spans is not None else self._spans_from_reference(clean)
        if origin is not None:
            starts = origin[0][np.minimum(starts, len(origin[0]) - 1)]
            ends = origin[1][np.maximum(ends, 1) - 1]
        return ids, starts, ends

    def decode(self, ids: Iterable[int], *, specials: bool = False) -> str:
        """The text of `ids`; special tokens are left out unless `specials`."""
        decoder = self.stream_decoder(specials=specials)
        return "".join([decoder.push(token_id) for token_id in ids]) + decoder.flush()

    def stream_decoder(self, *, specials: bool = False) -> StreamDecoder:
        """A decoder for ids that come one at a time."""
        return StreamDecoder(self._vocabulary, specials=specials)

    def _clean(self, text: str) -> str:
        clean = without_surrogates(text)
        return unicodedata.normalize("NFC", clean) if self._vocabulary.nfc else clean

    def _ids(self, clean: str, *, specials: bool) -> np.ndarray:
        ids = self._fast.encode(clean, specials=specials) if self._fast else None
        if ids is None:
            ids = np.array(self._reference_encoding(clean, specials=specials).ids, np.int32)
        return ids

    def _reference_encoding(self, clean: str, *, specials: bool) -> tokenizers.Encoding:
        self._reference.encode_special_tokens = not specials
        return self._reference.encode(clean, add_special_tokens=False)

    @cached_property
    def _reference(self) -> tokenizers.Tokenizer:
        return load_reference(self._path)

    def _spans_from_bytes(
        self, ids: np.ndarray, data: bytes
    ) -> tuple[np.ndarray, np.ndarray] | None:
        """Spans by counting the tokens' bytes along the text's UTF-8; None where they differ.

        `tokenizers` has offsets too, but they slip in a word with a byte that has no token.
        """
        if not self._vocabulary.byte_level:
            return None
        values = np.frombuffer(data, np.uint8)
        missing = self._vocabulary.missing_bytes
        kept = data.translate(None, missing) if missing else data
        if self._vocabulary.joined(ids) != kept:
            return None
        byte_ends = np.cumsum(self._vocabulary.byte_lens(ids))
        firsts = np.concatenate((np.zeros(1, np.int64), byte_ends[:-1]))
        lasts = byte_ends - 1
        if len(kept) != len(data):
            places = np.flatnonzero(~np.isin(values, np.frombuffer(missing, np.uint8)))
            firsts, lasts = places[firsts], places[lasts]
        char_of_byte = np.cumsum((values & 0xC0) != 0x80, dtype=np.int32) - 1
        return char_of_byte[firsts], char_of_byte[lasts] + 1

    def _spans_from_reference(self, clean: str) -> tuple[np.ndarray, np.ndarray]:
        offsets = self._reference_encoding(clean, specials=False).offsets
        spans = np.array(offsets, np.int32).reshape(-1, 2)
        return np.maximum.accumulate(spans[:, 0]), np.maximum.accumulate(spans[:, 1])


class StreamDecoder:
    """Ids to text one at a time: what is returned never ends inside a character."""

    def __init__(self, vocabulary: Vocabulary, *, specials: bool = False) -> None:
        self._vocabulary = vocabulary
        self._hidden = frozenset() if specials else vocabulary.special_ids
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._at_start = vocabulary.strip_leading

    def push(self, token_id: int) -> str:
        """The characters that `token_id` completes; bytes of an unfinished one are held back."""
        if token_id in self._hidden:
            return ""
        return self._trim(self._utf8.decode(self._vocabulary.token_bytes(token_id)))

    def flush(self) -> str:
        """What was held back, as replacement characters; the decoder is as new afterwards."""
        text = self._trim(self._utf8.decode(b"", final=True))
        self._utf8.reset()
        self._at_start = self._vocabulary.strip_leading
        return text

    def _trim(self, text: str) -> str:
        if not self._at_start or not text:
            return text
        self._at_start = False
        return text.removeprefix(" ")
