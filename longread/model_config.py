"""What the decoder must know of a converted model, and its config.json. No source formats."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from longread.errors import ModelError

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
FORMAT = "longread-weights"
FORMAT_VERSION = 1


@dataclass(frozen=True)
class ModelConfig:
    """A decoder's shape; Hugging Face's names. Lengths in tokens."""

    family: str
    name: str
    num_hidden_layers: int
    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int  # rows of the embedding, which may be more than the tokenizer's tokens
    rms_norm_eps: float
    window: int  # positions, capped where a sliding window would make attention inexact
    tie_word_embeddings: bool
    qk_norm: bool
    rope_type: str
    rope_parameters: Mapping[str, Any]
    attention_scaling: float  # factor on RoPE's cos and sin
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    torch_dtype: str  # of the stored matrices: bfloat16 or float32
    identity: str  # SHA-256 over the source files' hashes and the converter's version

    def to_json(self) -> str:
        """Return config.json's text."""
        fields = {"format": FORMAT, "format_version": FORMAT_VERSION, **dataclasses.asdict(self)}
        return json.dumps(fields, indent=2, default=dict) + "\n"


@contextmanager
def description_errors(path: Path) -> Iterator[None]:
    """Turn what the description of a foreign model runs into (wrong types, zeros) into ModelError.

    A file that a user names can say anything; checking each field would say it no better.
    """
    try:
        yield
    except (TypeError, ValueError, AttributeError, LookupError, ArithmeticError) as error:
        text = str(error).strip().splitlines()
        reason = text[0][:200] if text else type(error).__name__
        raise ModelError(f"the model's description in {path} is not valid ({reason})") from error


def load_config(path: Path) -> ModelConfig:
    """Read the config of a converted model's directory. Raises ModelError."""
    try:
        fields = json.loads((path / "config.json").read_bytes())
    except (OSError, ValueError) as error:
        raise ModelError(f"no readable config.json in {path}; {_remedy(path)}") from error
    if not _is_ours(fields):
        raise ModelError(
            f"{path} is not a model that this version of longread converted; {_remedy(path)}"
        )
    try:
        fields = {field.name: fields[field.name] for field in dataclasses.fields(ModelConfig)}
        return ModelConfig(**{**fields, "eos_token_ids": tuple(fields["eos_token_ids"])})
    except (KeyError, TypeError) as error:
        raise ModelError(f"{path / 'config.json'} is damaged; {_remedy(path)}") from error


def _remedy(path: Path) -> str:
    return f"run `longread models rm {path.name}` and try again"


def is_converted_folder(path: Path) -> bool:
    """Tell whether a directory holds a converted model in this version's format."""
    try:
        return _is_ours(json.loads((path / "config.json").read_bytes()))
    except (OSError, ValueError):
        return False


def _is_ours(fields: object) -> bool:
    return (
        isinstance(fields, dict)
        and fields.get("format") == FORMAT
        and fields.get("format_version") == FORMAT_VERSION
    )
