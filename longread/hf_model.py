"""A Hugging Face folder of a supported family as a SourceModel: config, safetensors, tokenizer."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from longread.convert import RowSource, SourceModel
from longread.errors import ModelError
from longread.model_config import FAMILIES, ModelConfig
from longread.rope import make_rope
from longread.tokenizer_files import END_TOKENS, first_line, write_folder_tokenizer

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_TOP_NAMES = {
    "model.embed_tokens.weight": "embed_tokens",
    "model.norm.weight": "norm",
    "lm_head.weight": "lm_head",
}
_LAYER_NAMES = {
    "input_layernorm": "input_norm",
    "post_attention_layernorm": "post_norm",
    "self_attn.q_proj": "q",
    "self_attn.k_proj": "k",
    "self_attn.v_proj": "v",
    "self_attn.o_proj": "o",
    "self_attn.q_norm": "q_norm",
    "self_attn.k_norm": "k_norm",
    "mlp.gate_proj": "gate",
    "mlp.up_proj": "up",
    "mlp.down_proj": "down",
}
_FLOATS = (torch.bfloat16, torch.float16, torch.float32)
_INDEX_FILE = "model.safetensors.index.json"
_SMALL_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "chat_template.json",
)


@dataclass(frozen=True)
class SafetensorsRows:
    """One tensor of an open safetensors file."""

    file: Any  # safetensors.safe_open, which has no type stubs
    name: str
    shape: tuple[int, ...]

    def read_rows(self, start: int, stop: int) -> Tensor:
        """Return rows (elements of a vector) in the file's dtype."""
        return self.file.get_slice(self.name)[start:stop]


def source_files(folder: Path) -> list[Path]:
    """Return the files of a folder that decide the converted model, sorted.

    Raises ModelError where the folder has no config.json or no safetensors weights.
    """
    if not (folder / "config.json").is_file():
        raise ModelError(
            f"{folder} has no config.json: give a Hugging Face model folder or a .gguf file"
        )
    small = [folder / name for name in _SMALL_FILES if (folder / name).is_file()]
    return sorted(small + _weight_files(folder))


def read_folder(folder: Path, name: str, stack: ExitStack) -> SourceModel:
    """Describe a folder; its files stay open until `stack` closes.

    Raises ModelError where the family or a feature is not supported.
    """
    fields = _read_json(folder / "config.json")
    _check_config(folder, fields)
    config = _load_config(folder)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    rope = make_rope(config, head_dim)
    tensors = _open_tensors(folder, stack)
    embedding = tensors.get("embed_tokens")
    if not isinstance(embedding, SafetensorsRows):
        raise ModelError(f"{folder} has no model.embed_tokens.weight: its weights are not complete")
    # fp16 becomes bf16, the precision longread computes in; fp32 is kept for exact runs.
    is_fp32 = embedding.read_rows(0, 1).dtype == torch.float32
    settings = _read_json(folder / "tokenizer_config.json", {})
    generation = _read_json(folder / "generation_config.json", {})
    source_config = ModelConfig(
        family=config.model_type,
        name=name,
        num_hidden_layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_attention_heads=config.num_attention_heads,
        num_key_value_heads=config.num_key_value_heads or config.num_attention_heads,
        head_dim=head_dim,
        vocab_size=embedding.shape[0],
        rms_norm_eps=config.rms_norm_eps,
        window=min([rope.window, *_attention_limits(config, fields)]),
        tie_word_embeddings=bool(config.tie_word_embeddings),
        qk_norm=config.model_type == "qwen3",
        rope_type=rope.rope_type,
        rope_parameters=rope.parameters,
        attention_scaling=rope.attention_scaling,
        eos_token_ids=_eos_token_ids(folder, config, generation),
        bos_token_id=config.bos_token_id,
        torch_dtype="float32" if is_fp32 else "bfloat16",
        identity="",  # its maker fills it in
    )
    return SourceModel(
        config=source_config,
        inv_freq=rope.inv_freq,
        tensors=tensors,
        chat_template=_chat_template(folder, settings),
        bos_token=_token_text(settings.get("bos_token")),
        eos_token=_token_text(settings.get("eos_token")),
        write_tokenizer=lambda directory: write_folder_tokenizer(folder, directory),
    )


def _check_config(folder: Path, fields: Mapping[str, Any]) -> None:
    family = fields.get("model_type")
    if family not in FAMILIES:
        raise ModelError(
            f"{folder} holds a model of the family {family!r}; the supported families are "
            f"{', '.join(FAMILIES)}"
        )
    if fields.get("quantization_config"):
        raise ModelError(
            f"{folder} holds quantised weights, which are read from GGUF files only; "
            "give the original model or a .gguf file"
        )
    if fields.get("mlp_bias"):
        raise ModelError(f"{folder}: models with mlp_bias are not supported")
    activation = fields.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise ModelError(f"{folder}: the activation {activation!r} is not supported, only silu is")


def _load_config(folder: Path) -> PretrainedConfig:
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(str(folder), trust_remote_code=False)
    except Exception as error:  # whatever a config's contents run into
        raise ModelError(f"{folder / 'config.json'} is not valid: {first_line(error)}") from error


def _attention_limits(config: PretrainedConfig, fields: Mapping[str, Any]) -> list[int]:
    """Return the lengths past which full attention is not what the model does."""
    limits = []
    # Up to a sliding window's width, windowed attention and full attention are the same.
    layer_types = getattr(config, "layer_types", None)
    slides = layer_types is None or "sliding_attention" in layer_types
    if slides and getattr(config, "sliding_window", None):
        limits.append(int(config.sliding_window))
    # Qwen2.5-1M runs plain attention to this length and needs its chunked kind past it.
    chunked = fields.get("dual_chunk_attention_config")
    if isinstance(chunked, Mapping) and chunked.get("original_max_position_embeddings"):
        limits.append(int(chunked["original_max_position_embeddings"]))
    return limits


def _weight_files(folder: Path) -> list[Path]:
    if (folder / _INDEX_FILE).is_file():
        names = set(_read_json(folder / _INDEX_FILE).get("weight_map", {}).values())
        files = [folder / str(name) for name in names]
        missing = sorted(path.name for path in files if not path.is_file())
        if missing:
            raise ModelError(f"{folder} lacks {missing[0]}, which its index names")
        return files
    files = [folder / "model.safetensors"]
    if not files[0].is_file():
        files = list(folder.glob("*.safetensors"))
    if len(files) != 1:
        raise ModelError(
            f"{folder} has no model.safetensors (weights in other formats are not read)"
        )
    return files


def _open_tensors(folder: Path, stack: ExitStack) -> dict[str, RowSource]:
    from safetensors import SafetensorError, safe_open

    tensors: dict[str, RowSource] = {}
    for path in sorted(_weight_files(folder)):
        try:
            file = stack.enter_context(safe_open(str(path), framework="pt"))
        except (SafetensorError, OSError) as error:
            raise ModelError(f"{path} is damaged ({error}); fetch it again") from error
        for stored in file.keys():
            if stored.endswith("rotary_emb.inv_freq"):
                continue
            part = file.get_slice(stored)
            shape = tuple(part.get_shape())
            rows = SafetensorsRows(file, stored, shape)
            if shape and 0 not in shape and rows.read_rows(0, 1).dtype not in _FLOATS:
                raise ModelError(f"{path}: tensor {stored} is not bf16, fp16 or fp32")
            tensors[_canonical_name(folder, stored)] = rows
    return tensors


def _canonical_name(folder: Path, stored: str) -> str:
    if stored in _TOP_NAMES:
        return _TOP_NAMES[stored]
    layer, _, rest = stored.removeprefix("model.layers.").partition(".")
    kind, _, suffix = rest.rpartition(".")
    if kind not in _LAYER_NAMES or suffix not in ("weight", "bias"):
        raise ModelError(f"{folder} holds the tensor {stored}, which no supported family has")
    return f"layers.{layer}.{_LAYER_NAMES[kind]}" + ("_bias" if suffix == "bias" else "")


def _eos_token_ids(
    folder: Path, config: PretrainedConfig, generation: Mapping[str, Any]
) -> tuple[int, ...]:
    ids: set[Any] = set()
    for value in (config.eos_token_id, generation.get("eos_token_id")):
        ids.update(value if isinstance(value, list) else [value])
    for token in _read_json(folder / "tokenizer.json", {}).get("added_tokens", ()):
        if token.get("content") in END_TOKENS:
            ids.add(token.get("id"))
    return tuple(sorted(token_id for token_id in ids if isinstance(token_id, int)))


def _chat_template(folder: Path, settings: Mapping[str, Any]) -> str | None:
    path = folder / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    template = settings.get("chat_template")
    if template is None:
        template = _read_json(folder / "chat_template.json", {}).get("chat_template")
    if isinstance(template, list):  # several by name
        by_name = {entry.get("name"): entry.get("template") for entry in template}
        template = by_name.get("default")
    return template if isinstance(template, str) else None


def _token_text(token: object) -> str | None:
    if isinstance(token, Mapping):
        token = token.get("content")
    return token if isinstance(token, str) else None


def _read_json(path: Path, default: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return a JSON object; `default` where the file is not there. Raises ModelError."""
    if default is not None and not path.is_file():
        return default
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise ModelError(f"{path} does not hold a JSON object")
    return content
