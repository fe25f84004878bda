"""A model's own byte-level BPE as a tiktoken Encoding, several times faster than `tokenizers`.

Owns the translation of tokenizer.json to merge ranks and a split pattern. tiktoken knows no ids,
only ranks: a permutation leads from rank to id, since ids need not be in merge order. Whether the
result equals the original is tokenizer_tables.py's business.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from longread.vocabulary import Unsupported, Vocabulary, byte_alphabet, parts

if TYPE_CHECKING:
    import tiktoken

_GPT2 = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
# Digits are cut off one by one before GPT-2's pattern sees the pieces between them, so white space
# before a digit is white space at the end of a piece.
_GPT2_AFTER_DIGITS = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+(?![^\s\p{N}])|\s+"
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_LETTERS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
# What `tokenizers` (Oniguruma) and tiktoken (fancy-regex) are known to read alike; a pattern that
# is not here is left to `tokenizers`, because a fuzz corpus cannot stand for an unknown syntax.
_KNOWN_SPLITS = {
    pattern: pattern
    for pattern in (
        rf"{_CONTRACTIONS}|{_LETTERS}|\p{{N}}|{_REST}",  # Qwen2, Qwen3
        rf"{_CONTRACTIONS}|{_LETTERS}|\p{{N}}{{1,3}}|{_REST}",  # Llama 3, SmolLM3
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
        r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",  # Mistral's Tekken
    )
}
_KNOWN_SPLITS[r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"] = _GPT2

# Rust's white space, which is Python's without the four information separators
_BLANKS = (
    "\t\n\x0b\x0c\r \x85\xa0\u1680\u2028\u2029\u202f\u205f\u3000"
    "\u2000\u2001\u2002\u2003\u2004\u2005\u2006\u2007\u2008\u2009\u200a"
)
# tiktoken's regex engine overflows its stack, and panics, somewhere under a million characters of
# white space. The lookbehind keeps the search linear inside a run.
_LONG_RUN = re.compile(r"(?<!\s)\s{100000}")


@dataclass(frozen=True)
class Ranks:
    """What tiktoken needs: the split pattern, and the id of each rank (-1: a byte has no token).

    Ranks 0 to 255 are the single bytes, the others the merges in order of priority.
    """

    pattern: str
    ids: np.ndarray  # int32 [R]


def read_ranks(spec: dict[str, Any], vocabulary: Vocabulary) -> Ranks:
    """Translate a parsed tokenizer.json. Raises Unsupported with the reason where it cannot be."""
    if not vocabulary.byte_level:
        raise Unsupported("not a byte-level BPE")
    model = spec["model"]
    for key in ("dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix"):
        if model.get(key):
            raise Unsupported(f"its BPE has a {key}")
    if spec.get("normalizer") and not vocabulary.nfc:
        raise Unsupported("its normalizer is not NFC")
    if any(token.get("single_word") for token in spec.get("added_tokens") or ()):
        raise Unsupported("an added token must be a word of its own")
    pattern = _pattern(list(parts(spec.get("pre_tokenizer"))))
    vocab = model["vocab"]
    ids = [-1] * 256
    for letter, value in byte_alphabet().items():
        ids[value] = vocab.get(letter, -1)
    for merge in model["merges"]:
        left, right = merge.split(" ") if isinstance(merge, str) else merge
        token_id = vocab.get(left + right)
        if token_id is None:
            raise Unsupported("a merge makes no token")
        # Some files list every way to make a token, in a row: one priority.
        if token_id != ids[-1]:
            ids.append(token_id)
    known = set(ids)
    if len(known - {-1}) != len(ids) - ids.count(-1):
        raise Unsupported("a token has merges of different priorities")
    if model.get("ignore_merges"):
        # Whole pieces are looked up first: tokens that no merge makes would be found that way.
        plain = known | {token.id for token in vocabulary.added}
        if any(token_id not in plain for token_id in vocab.values()):
            raise Unsupported("it has tokens outside its merges")
    return Ranks(pattern, np.array(ids, np.int32))


def _pattern(steps: list[dict[str, Any]]) -> str:
    kinds = [step["type"] for step in steps]
    if not kinds or kinds[-1] != "ByteLevel" or steps[-1].get("add_prefix_space", True):
        raise Unsupported(f"its pre-tokenizer ({', '.join(kinds)}) is not known")
    own_regex = steps[-1].get("use_regex", True)
    if kinds == ["ByteLevel"] and own_regex:
        return _GPT2
    if kinds == ["Digits", "ByteLevel"] and own_regex and steps[0].get("individual_digits"):
        return _GPT2_AFTER_DIGITS
    if kinds == ["Split", "ByteLevel"] and not own_regex:
        # Matches kept apart, or (the older way to say it) everything but the matches removed.
        how = (steps[0].get("behavior"), steps[0].get("invert", False))
        regex = steps[0]["pattern"].get("Regex")
        if how in (("Isolated", False), ("Removed", True)) and regex in _KNOWN_SPLITS:
            return _KNOWN_SPLITS[regex]
    raise Unsupported(f"its pre-tokenizer ({', '.join(kinds)}) splits in a way that is not known")


class TiktokenBpe:
    """Text to ids by tiktoken; None where the text must go to `tokenizers` instead."""

    def __init__(self, vocabulary: Vocabulary, ranks: Ranks) -> None:
        self._vocabulary = vocabulary
        self._ranks = ranks
        self._added_of = {token.content: token for token in vocabulary.added}

    def encode(self, text: str, *, specials: bool = False) -> np.ndarray | None:
        """int32 [N] ids of normalised `text` without lone surrogates, or None.

        Special tokens in `text` are plain characters unless `specials`.
        """
        if _LONG_RUN.search(text):
            return None
        missing = self._vocabulary.missing_bytes
        # `tokenizers` joins the neighbours of a byte without a token, tiktoken does not.
        if missing and len(data := text.encode()) != len(data.translate(None, missing)):
            return None
        chunks: list[np.ndarray] = []
        try:
            for part in self._parts(text, specials):
                if isinstance(part, int):
                    chunks.append(np.array([part], np.int32))
                else:
                    found = self._encoding.encode_ordinary(part)
                    chunks.append(self._ranks.ids[np.array(found, np.int64)])
        except BaseException as error:
            # Rust's panic is no Exception and its class cannot be imported.
            if type(error).__name__ != "PanicException":
                raise
            return None
        return np.concatenate(chunks) if chunks else np.zeros(0, np.int32)

    def _parts(self, text: str, specials: bool) -> Iterator[str | int]:
        wanted = [token for token in self._vocabulary.added if specials or not token.special]
        if not any(token.content in text for token in wanted):  # much faster than the pattern
            yield text
            return
        done = 0
        for match in self._added.finditer(text):
            token = self._added_of[match[0]]
            start, end = match.span()
            if token.special and not specials:
                continue
            if token.lstrip:
                start = done + len(text[done:start].rstrip(_BLANKS))
            if token.rstrip:
                end = len(text) - len(text[end:].lstrip(_BLANKS))
            if start > done:
                yield text[done:start]
            yield token.id
            done = end
        if done < len(text):
            yield text[done:]

    @cached_property
    def _added(self) -> re.Pattern[str]:
        # The longest first: at one place the longest token wins, as in `tokenizers`.
        contents = sorted(self._added_of, key=len, reverse=True)
        return re.compile("|".join(re.escape(content) for content in contents))

    @cached_property
    def _encoding(self) -> tiktoken.Encoding:
        import tiktoken

        table = {bytes([value]): value for value in range(256)}
        for rank, token_id in enumerate(self._ranks.ids[256:].tolist(), 256):
            table[self._vocabulary.token_bytes(token_id)] = rank
        return tiktoken.Encoding(
            "longread", pat_str=self._ranks.pattern, mergeable_ranks=table, special_tokens={}
        )
