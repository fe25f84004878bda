"""A GGUF file of a supported family as a SourceModel: metadata to config, names, q/k row order."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from longread.convert import RowSource, SourceModel
from longread.errors import ModelError
from longread.gguf_reader import GGUFFile, GGUFTensor, dequantize
from longread.model_config import ModelConfig
from longread.rope import Rope, make_rope, require_supported
from longread.tokenizer_files import END_TOKENS, write_gguf_tokenizer

_ARCHITECTURES = ("llama", "qwen2", "qwen3")  # Mistral's GGUFs are "llama", and they compute alike
_TOP_NAMES = {
    "token_embd.weight": "embed_tokens",
    "output_norm.weight": "norm",
    "output.weight": "lm_head",
}
_LAYER_NAMES = {
    "attn_norm": "input_norm",
    "attn_q": "q",
    "attn_k": "k",
    "attn_v": "v",
    "attn_output": "o",
    "attn_q_norm": "q_norm",
    "attn_k_norm": "k_norm",
    "ffn_norm": "post_norm",
    "ffn_gate": "gate",
    "ffn_up": "up",
    "ffn_down": "down",
}
_CONTROL_TOKEN = 3
_DEFAULT_THETA = 10000.0


@dataclass(frozen=True)
class GGUFRows:
    """A GGUF tensor as fp32 rows; `order[i]` is the stored row that row i has."""

    file: GGUFFile
    tensor: GGUFTensor
    order: np.ndarray | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """As torch has it."""
        return self.tensor.shape

    def read_rows(self, start: int, stop: int) -> Tensor:
        """Return rows (elements of a vector) as fp32."""
        if len(self.shape) == 1:
            values = dequantize(self.file.raw_rows(self.tensor, 0, 1), self.tensor)[0]
            return torch.from_numpy(values if self.order is None else values[self.order])[
                start:stop
            ]
        if self.order is None:
            raw = self.file.raw_rows(self.tensor, start, stop)
        else:
            wanted = self.order[start:stop]
            first = int(wanted.min())
            raw = self.file.raw_rows(self.tensor, first, int(wanted.max()) + 1)[wanted - first]
        return torch.from_numpy(dequantize(raw, self.tensor))


def read_gguf(file: GGUFFile, name: str) -> SourceModel:
    """Describe an open GGUF file, which must stay open while the result is read.

    Raises ModelError where the architecture or a feature is not supported.
    """
    metadata = file.metadata
    architecture = str(metadata.get("general.architecture"))
    if architecture not in _ARCHITECTURES:
        raise ModelError(
            f"{file.path} holds a model of the family {architecture!r}; supported GGUF families "
            f"are {', '.join(_ARCHITECTURES)} (Mistral's files are llama)"
        )
    keys = _Keys(metadata, architecture, file.path)
    num_heads = keys.integer("attention.head_count")
    num_kv_heads = keys.integer("attention.head_count_kv", num_heads)
    hidden_size = keys.integer("embedding_length")
    head_dim = keys.integer("attention.key_length", hidden_size // num_heads)
    if keys.integer("attention.value_length", head_dim) != head_dim:
        raise ModelError(f"{file.path}: keys and values of different size are not supported")
    rope = _rope(file, keys, head_dim)
    tensors = _tensors(file, architecture, num_heads, num_kv_heads)
    if "embed_tokens" not in tensors:
        raise ModelError(f"{file.path} has no token_embd.weight: the file is not complete")
    tokens = metadata.get("tokenizer.ggml.tokens") or []
    bos_token_id = metadata.get("tokenizer.ggml.bos_token_id")
    eos_token_id = metadata.get("tokenizer.ggml.eos_token_id")
    config = ModelConfig(
        family=architecture,
        name=name,
        num_hidden_layers=keys.integer("block_count"),
        hidden_size=hidden_size,
        intermediate_size=keys.integer("feed_forward_length"),
        num_attention_heads=num_heads,
        num_key_value_heads=num_kv_heads,
        head_dim=head_dim,
        vocab_size=tensors["embed_tokens"].shape[0],
        rms_norm_eps=keys.number("attention.layer_norm_rms_epsilon"),
        window=min(rope.window, keys.integer("attention.sliding_window", 0) or rope.window),
        tie_word_embeddings="lm_head" not in tensors,
        qk_norm=architecture == "qwen3",
        rope_type=rope.rope_type,
        rope_parameters=rope.parameters,
        attention_scaling=rope.attention_scaling,
        eos_token_ids=_eos_token_ids(metadata, tokens),
        bos_token_id=bos_token_id,
        torch_dtype="bfloat16",
        identity="",  # its maker fills it in
    )
    return SourceModel(
        config=config,
        inv_freq=rope.inv_freq,
        tensors=tensors,
        chat_template=metadata.get("tokenizer.chat_template"),
        bos_token=_token(tokens, bos_token_id),
        eos_token=_token(tokens, eos_token_id),
        write_tokenizer=lambda directory: write_gguf_tokenizer(file.path, metadata, directory),
    )


@dataclass(frozen=True)
class _Keys:
    """The metadata under the architecture's prefix, as numbers."""

    metadata: Mapping[str, Any]
    architecture: str
    path: Path

    def get(self, key: str) -> Any:
        return self.metadata.get(f"{self.architecture}.{key}")

    def number(self, key: str, default: float | None = None) -> float:
        value = self.get(key)
        if isinstance(value, list) and value and len(set(value)) == 1:
            value = value[0]  # one number a layer, all the same
        if value is None:
            value = default
        if not isinstance(value, (int, float)):
            raise ModelError(
                f"{self.path}: {self.architecture}.{key} is "
                + ("missing" if value is None else "not one number for all layers")
            )
        return value

    def integer(self, key: str, default: int | None = None) -> int:
        return int(self.number(key, default))


def _tensors(
    file: GGUFFile, architecture: str, num_heads: int, num_kv_heads: int
) -> dict[str, RowSource]:
    tensors: dict[str, RowSource] = {}
    for stored, tensor in file.tensors.items():
        if stored == "rope_freqs.weight":
            continue
        if stored in _TOP_NAMES:
            tensors[_TOP_NAMES[stored]] = GGUFRows(file, tensor)
            continue
        prefix, _, rest = stored.removeprefix("blk.").partition(".")
        kind, _, suffix = rest.rpartition(".")
        if kind not in _LAYER_NAMES or suffix not in ("weight", "bias"):
            raise ModelError(
                f"{file.path} holds the tensor {stored}, which longread's {architecture} family "
                "does not have (mixtures of experts and adapters are not supported)"
            )
        name = f"layers.{prefix}.{_LAYER_NAMES[kind]}" + ("_bias" if suffix == "bias" else "")
        order = None
        if architecture == "llama" and kind in ("attn_q", "attn_k"):
            order = _row_order(tensor.shape[0], num_heads if kind == "attn_q" else num_kv_heads)
        tensors[name] = GGUFRows(file, tensor, order)
    return tensors


def _row_order(num_rows: int, num_heads: int) -> np.ndarray:
    """Return, for each row in Hugging Face's order, the row of llama.cpp's file that has it.

    llama.cpp interleaves the two halves of each head of a llama model, because its RoPE turns
    neighbours where Hugging Face's turns a row with the one half a head further.
    """
    if num_rows % (2 * num_heads):
        raise ModelError(f"{num_rows} rows of q or k do not go into {num_heads} heads")
    stored = np.arange(num_rows).reshape(num_heads, -1, 2)
    return stored.swapaxes(1, 2).reshape(-1)


def _rope(file: GGUFFile, keys: _Keys, head_dim: int) -> Rope:
    from transformers import AutoConfig

    if keys.integer("rope.dimension_count", head_dim) != head_dim:
        raise ModelError(f"{file.path}: models that rotate part of each head are not supported")
    window = keys.integer("context_length")
    parameters: dict[str, Any] = {
        "rope_theta": float(keys.number("rope.freq_base", _DEFAULT_THETA)),
        "rope_type": "default",
    }
    kind = str(keys.get("rope.scaling.type") or ("linear" if keys.get("rope.scale_linear") else ""))
    if kind not in ("", "none"):
        require_supported(kind)
        factor = keys.number("rope.scaling.factor", keys.number("rope.scale_linear", 1.0))
        parameters |= {"rope_type": kind, "factor": float(factor)}
        if kind == "yarn":
            original = keys.integer("rope.scaling.original_context_length", window)
            parameters["original_max_position_embeddings"] = original
            for key, name in (("yarn_beta_fast", "beta_fast"), ("yarn_beta_slow", "beta_slow")):
                if keys.get(f"rope.scaling.{key}") is not None:
                    parameters[name] = float(keys.number(f"rope.scaling.{key}"))
    # The config class matters to RoPE only by its shape: any family with these fields would do.
    config = AutoConfig.for_model(
        "llama",
        hidden_size=keys.integer("embedding_length"),
        num_attention_heads=keys.integer("attention.head_count"),
        head_dim=head_dim,
        max_position_embeddings=window,
        rope_parameters=parameters,
    )
    factors = None
    if tensor := file.tensors.get("rope_freqs.weight"):
        factors = GGUFRows(file, tensor).read_rows(0, head_dim // 2)
        if tuple(factors.shape) != (head_dim // 2,):
            raise ModelError(f"{file.path}: rope_freqs.weight has shape {list(factors.shape)}")
    return make_rope(config, head_dim, factors)


def _eos_token_ids(metadata: Mapping[str, Any], tokens: list[str]) -> tuple[int, ...]:
    ids = {metadata.get(f"tokenizer.ggml.{key}_token_id") for key in ("eos", "eot", "eom")}
    types = metadata.get("tokenizer.ggml.token_type") or []
    for token_id, (token, kind) in enumerate(zip(tokens, types, strict=False)):
        if kind == _CONTROL_TOKEN and token in END_TOKENS:
            ids.add(token_id)
    return tuple(sorted(token_id for token_id in ids if isinstance(token_id, int)))


def _token(tokens: list[str], token_id: int | None) -> str | None:
    if token_id is None or not 0 <= token_id < len(tokens):
        return None
    return tokens[token_id]
