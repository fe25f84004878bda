"""RoPE's inverse frequencies, made at conversion by transformers' own initialisers, and anew for a
window that YaRN stretches (arXiv 2309.00071).

Owns the choice of the initialiser and the window that goes with it. The rotation itself is the
kernels' business.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from longread.errors import ModelError, UsageError
from longread.model_config import ModelConfig

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PretrainedConfig

_MAX_HEAD_DIM = 1024  # no model has more; a damaged file may say anything
ROPE_TYPES = ("default", "linear", "dynamic", "yarn", "llama3")


@dataclass(frozen=True)
class Rope:
    """inv_freq: [D/2] fp32; attention_scaling multiplies cos and sin; window in tokens."""

    rope_type: str
    parameters: dict[str, Any]
    inv_freq: Tensor
    attention_scaling: float
    window: int


def require_supported(rope_type: str) -> None:
    """Raise ModelError for a RoPE type that longread does not know."""
    if rope_type not in ROPE_TYPES:
        raise ModelError(
            f"RoPE scaling {rope_type!r} is not supported; the supported ones are "
            f"{', '.join(ROPE_TYPES)}"
        )


def make_rope(config: PretrainedConfig, head_dim: int, freq_factors: Tensor | None = None) -> Rope:
    """Return the RoPE of a transformers config.

    `freq_factors` ([D/2]) are a GGUF's own divisors of the frequencies: Llama 3's scaling, written
    out. Raises ModelError for a RoPE type that is not in ROPE_TYPES or rotates part of a head.
    """
    import torch
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    if head_dim < 2 or head_dim % 2 or head_dim > _MAX_HEAD_DIM:
        raise ModelError(f"a head size of {head_dim} is not supported")
    parameters = dict(config.rope_parameters)
    rope_type = str(parameters.get("rope_type", "default"))
    require_supported(rope_type)
    if float(parameters.get("partial_rotary_factor") or 1.0) != 1.0:
        raise ModelError("models that rotate only part of each head are not supported")
    window = int(config.max_position_embeddings)
    if window < 1:
        raise ModelError(f"a window of {window} tokens is not supported")
    config.head_dim = head_dim  # some configs leave it out, and the initialisers read it
    if rope_type == "default":
        exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
        inv_freq, attention_scaling = 1.0 / parameters["rope_theta"] ** exponents, 1.0
    else:
        inv_freq, attention_scaling = ROPE_INIT_FUNCTIONS[rope_type](config, torch.device("cpu"))
    if rope_type == "yarn":
        # Many configs add YaRN without raising max_position_embeddings, as their READMEs tell.
        stretched = parameters["original_max_position_embeddings"] * parameters["factor"]
        window = max(window, int(stretched))
    if freq_factors is not None:
        rope_type = "llama3"
        inv_freq = inv_freq / freq_factors
        parameters["freq_factors"] = freq_factors.tolist()
    parameters["rope_type"] = rope_type
    return Rope(
        rope_type, parameters, inv_freq.float().contiguous(), float(attention_scaling), window
    )


def yarn_factor(config: ModelConfig, num_tokens: int) -> int:
    """The power of two by which a model's window must grow to hold `num_tokens`, at least 1.

    Raises UsageError where it must and the model's RoPE has a scaling that YaRN cannot replace.
    """
    factor = 1
    while factor * config.window < num_tokens:
        factor *= 2
    if factor > 1 and config.rope_type not in ("default", "yarn"):
        raise UsageError(
            f"--context yarn cannot stretch {config.name}: its RoPE has the scaling "
            f"{config.rope_type!r} already; let it be read by selection (--context select)"
        )
    return factor


def stretched(config: ModelConfig, factor: int) -> tuple[ModelConfig, Tensor]:
    """The config of a model whose window YaRN makes `factor` times longer, and its inv_freq [D/2].

    A model with YaRN of its own gets more of it; the trained window stays what it was.
    """
    from transformers import AutoConfig

    parameters = dict(config.rope_parameters)
    window = config.window * factor
    original = parameters.get("original_max_position_embeddings", config.window)
    parameters |= {
        "rope_type": "yarn",
        "factor": window / original,
        "original_max_position_embeddings": original,
    }
    hf_config = AutoConfig.for_model(
        config.family,
        hidden_size=config.hidden_size,
        num_attention_heads=config.num_attention_heads,
        head_dim=config.head_dim,
        max_position_embeddings=config.window,
        rope_parameters=parameters,
    )
    rope = make_rope(hf_config, config.head_dim)
    changed = dataclasses.replace(
        config,
        window=window,
        rope_type=rope.rope_type,
        rope_parameters=rope.parameters,
        attention_scaling=rope.attention_scaling,
    )
    return changed, rope.inv_freq
