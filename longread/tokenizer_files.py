"""tokenizer.json of a converted model: built from a GGUF's vocabulary, or taken from a folder.

Owns the pre-tokenizers that GGUF files name. Encoding text is tokenizer.py's business.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from longread.errors import ModelError

# A chat's answer ends at whichever of these the model has.
END_TOKENS = (
    "<|im_end|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|end_of_text|>",
    "<|endoftext|>",
)
_CONTROL = 3
_USER_DEFINED = 4
_UNUSED = 5

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_TAIL = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_QWEN2 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}" + _TAIL
_LLAMA3 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}" + _TAIL
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SPLITS = {"qwen2": _QWEN2, "llama3": _LLAMA3, "tekken": _TEKKEN}
# tokenizer.ggml.pre -> one of _SPLITS, or "gpt2" (byte-level's own pattern), or "digits" (the same
# after each digit was cut off)
_PRE_TOKENIZERS = {
    "qwen2": "qwen2",
    "deepseek-r1-qwen": "qwen2",
    "megrez": "qwen2",
    "llama3": "llama3",
    "llama-v3": "llama3",
    "llama-bpe": "llama3",
    "smaug-bpe": "llama3",
    "falcon3": "llama3",
    "pixtral": "llama3",
    "tekken": "tekken",
    "smollm": "digits",
    "gpt2": "gpt2",
    "gpt-2": "gpt2",
}


def write_gguf_tokenizer(path: Path, metadata: Mapping[str, Any], directory: Path) -> None:
    """Write the tokenizer.json of a GGUF file into `directory`.

    Byte-level BPE is built from the metadata; SentencePiece goes through transformers' conversion.
    Raises ModelError for any other kind, or one that does not load.
    """
    kind = metadata.get("tokenizer.ggml.model")
    if kind == "gpt2":
        text = json.dumps(byte_level_tokenizer(metadata), ensure_ascii=False)
        (directory / "tokenizer.json").write_text(text, encoding="utf-8")
    elif kind == "llama":
        _save_with_transformers(path.parent, directory, gguf_file=path.name)
    else:
        raise ModelError(
            f"{path} has a tokenizer of the kind {kind!r}; byte-level BPE (gpt2) and SentencePiece "
            "(llama) are supported"
        )
    _check(directory, path)


def write_folder_tokenizer(folder: Path, directory: Path) -> None:
    """Write the tokenizer.json of a Hugging Face folder into `directory`. Raises ModelError."""
    if (folder / "tokenizer.json").is_file():
        shutil.copyfile(folder / "tokenizer.json", directory / "tokenizer.json")
    else:
        _save_with_transformers(folder, directory, gguf_file=None)
    _check(directory, folder)


def byte_level_tokenizer(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return tokenizer.json's content for a GGUF with byte-level BPE. Raises ModelError."""
    tokens = metadata.get("tokenizer.ggml.tokens")
    merges = metadata.get("tokenizer.ggml.merges")
    if not tokens or merges is None:
        raise ModelError("the GGUF file has no vocabulary; get a file with its tokenizer inside")
    types = metadata.get("tokenizer.ggml.token_type") or [1] * len(tokens)
    if len(types) != len(tokens):
        raise ModelError("the GGUF file's vocabulary and its token types differ in length")
    style = _style(metadata, tokens)
    # Unused entries only pad the embedding to a round size: they are no text.
    vocab = {
        token: token_id
        for token_id, (token, kind) in enumerate(zip(tokens, types, strict=True))
        if kind != _UNUSED
    }
    added = [
        {
            "id": token_id,
            "content": token,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": kind == _CONTROL,
        }
        for token_id, (token, kind) in enumerate(zip(tokens, types, strict=True))
        if kind in (_CONTROL, _USER_DEFINED)
    ]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": {"type": "NFC"} if style == "qwen2" else None,
        "pre_tokenizer": _pre_tokenizer(style, byte_level),
        "post_processor": {**byte_level, "use_regex": False},
        "decoder": {**byte_level, "use_regex": False},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": style in ("llama3", "tekken"),
            "vocab": vocab,
            "merges": [merge.split(" ", 1) for merge in merges],
        },
    }


def _style(metadata: Mapping[str, Any], tokens: list[str]) -> str:
    name = metadata.get("tokenizer.ggml.pre") or "default"
    if name == "default":
        # Files made before llama.cpp named the pre-tokenizer: the vocabulary tells the family.
        if str(metadata.get("general.architecture")).startswith("qwen"):
            return "qwen2"
        return "llama3" if "<|begin_of_text|>" in tokens else "gpt2"
    if name not in _PRE_TOKENIZERS:
        raise ModelError(
            f"the GGUF file's pre-tokenizer {name!r} is not supported; the supported ones are "
            f"{', '.join(sorted(_PRE_TOKENIZERS))}. The same model as a Hugging Face folder, with "
            "its tokenizer.json, may work"
        )
    return _PRE_TOKENIZERS[name]


def _pre_tokenizer(style: str, byte_level: Mapping[str, Any]) -> dict[str, Any]:
    if style == "gpt2":
        return {**byte_level, "use_regex": True}
    if style == "digits":
        first: dict[str, Any] = {"type": "Digits", "individual_digits": True}
        return {"type": "Sequence", "pretokenizers": [first, {**byte_level, "use_regex": True}]}
    first = {
        "type": "Split",
        "pattern": {"Regex": _SPLITS[style]},
        "behavior": "Isolated",
        "invert": False,
    }
    return {"type": "Sequence", "pretokenizers": [first, {**byte_level, "use_regex": False}]}


def _save_with_transformers(folder: Path, directory: Path, gguf_file: str | None) -> None:
    from transformers import AutoTokenizer

    try:
        if gguf_file is None:
            tokenizer = AutoTokenizer.from_pretrained(str(folder))
        else:
            tokenizer = AutoTokenizer.from_pretrained(str(folder), gguf_file=gguf_file)
        tokenizer.backend_tokenizer.save(str(directory / "tokenizer.json"))
    except Exception as error:  # transformers raises whatever the file's contents run into
        raise ModelError(
            f"the tokenizer in {folder} cannot be converted ({first_line(error)}); "
            "a folder with a tokenizer.json is needed"
        ) from error


def _check(directory: Path, origin: Path) -> None:
    from tokenizers import Tokenizer

    try:
        Tokenizer.from_file(str(directory / "tokenizer.json"))
    except Exception as error:  # tokenizers raises bare Exception
        raise ModelError(f"the tokenizer of {origin} does not load: {first_line(error)}") from error


def first_line(error: Exception) -> str:
    """Return the beginning of another library's message, for one line of ours."""
    return re.split(r"[\r\n]", str(error).strip() or type(error).__name__, maxsplit=1)[0][:200]
