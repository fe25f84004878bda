"""The models that a benchmark can name: shapes with random weights, or a converted directory."""

from __future__ import annotations

import math
from pathlib import Path

import torch
from torch import Tensor

from longread.convert import required_shapes
from longread.weights import ModelConfig, load_config, load_weights

_WINDOW = 1 << 21  # random weights have no window; this one only bounds the tables


def _shape(
    name: str,
    family: str,
    layers: int,
    hidden: int,
    intermediate: int,
    heads: int,
    kv_heads: int,
    vocab: int,
    rope_theta: float,
    tied: bool = False,
    head_dim: int = 128,
) -> ModelConfig:
    return ModelConfig(
        family=family,
        name=name,
        num_hidden_layers=layers,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        vocab_size=vocab,
        rms_norm_eps=1e-6,
        window=_WINDOW,
        tie_word_embeddings=tied,
        qk_norm=family == "qwen3",
        rope_type="default",
        rope_parameters={"rope_type": "default", "rope_theta": rope_theta},
        attention_scaling=1.0,
        eos_token_ids=(),
        bos_token_id=None,
        torch_dtype="bfloat16",
        identity=f"random weights of {name}",
    )


# From the models' config.json files on the Hugging Face hub: meta-llama/Meta-Llama-3-8B,
# Qwen/Qwen2.5-7B-Instruct, Qwen/Qwen3-4B, Qwen/Qwen2.5-Coder-1.5B-Instruct and -0.5B-Instruct.
SHAPES = {
    shape.name: shape
    for shape in (
        _shape("llama3-8b", "llama", 32, 4096, 14336, 32, 8, 128256, 5e5),
        _shape("qwen2.5-7b", "qwen2", 28, 3584, 18944, 28, 4, 152064, 1e6),
        _shape("qwen3-4b", "qwen3", 36, 2560, 9728, 32, 8, 151936, 1e6, tied=True),
        _shape("qwen2.5-1.5b", "qwen2", 28, 1536, 8960, 12, 2, 151936, 1e6, tied=True),
        _shape("qwen2.5-0.5b", "qwen2", 24, 896, 4864, 14, 2, 151936, 1e6, tied=True, head_dim=64),
    )
}


def load_model(
    model: str, device: torch.device, dtype: torch.dtype
) -> tuple[ModelConfig, dict[str, Tensor]]:
    """The config and the weights of a shape by name, or of a converted model's directory."""
    if model in SHAPES:
        return SHAPES[model], random_weights(SHAPES[model], device, dtype)
    path = Path(model)
    return load_config(path), load_weights(path, device=str(device), dtype=dtype)


def random_weights(
    config: ModelConfig, device: torch.device, dtype: torch.dtype
) -> dict[str, Tensor]:
    """Normal weights, the same for every call on one device.

    What is added to the residual is scaled down by the square root of twice the layers (GPT-2's
    rule): rounding then grows no faster than in trained models, and contenders can be compared.
    """
    generator = torch.Generator(device).manual_seed(0)
    weights = {}
    for name, shape in required_shapes(config).items():
        kind = name.rsplit(".", 1)[-1]
        if kind.endswith("norm"):
            weights[name] = torch.ones(shape, device=device, dtype=dtype)
        elif kind == "inv_freq":
            exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
            inv_freq = 1.0 / config.rope_parameters["rope_theta"] ** exponents
            weights[name] = inv_freq.to(device)
        else:
            std = 1.0 if kind == "embed_tokens" else shape[-1] ** -0.5
            if kind in ("o", "down"):
                std /= math.sqrt(2 * config.num_hidden_layers)
            tensor = torch.empty(shape, device=device, dtype=dtype)
            weights[name] = tensor.normal_(0.0, std, generator=generator)
    if config.family == "qwen2":
        width = (config.num_attention_heads + 2 * config.num_key_value_heads) * config.head_dim
        for i in range(config.num_hidden_layers):
            weights[f"layers.{i}.qkv_bias"] = torch.zeros(width, device=device, dtype=dtype)
    return weights
