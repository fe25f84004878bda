"""A decoder's weights on a device, layer by layer, and RoPE's tables. Computes nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from longread.weights import ModelConfig


@dataclass(frozen=True)
class Layer:
    """One layer's tensors; their shapes stand in weights.py."""

    input_norm: Tensor
    qkv: Tensor
    qkv_bias: Tensor | None
    q_norm: Tensor | None
    k_norm: Tensor | None
    o: Tensor
    o_bias: Tensor | None
    post_norm: Tensor
    gate_up: Tensor
    down: Tensor

    @property
    def head_norms(self) -> tuple[Tensor, Tensor] | None:
        """The weights [D] of the query and key norms, where the model has them."""
        if self.q_norm is None or self.k_norm is None:
            return None
        return self.q_norm, self.k_norm


class Network:
    """The tensors that weights.py names, with the head tied to the embedding where it is absent."""

    def __init__(
        self,
        config: ModelConfig,
        weights: Mapping[str, Tensor],
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self.config = config
        self.device = device
        self.dtype = dtype
        self.tensors = weights
        self.embed = weights["embed_tokens"]
        self.norm = weights["norm"]
        self.lm_head = weights.get("lm_head", self.embed)
        self.layers = [
            Layer(
                **{name: weights.get(f"layers.{i}.{name}") for name in Layer.__dataclass_fields__}  # type: ignore[arg-type]
            )
            for i in range(config.num_hidden_layers)
        ]
        self._inv_freq = weights["inv_freq"].to(device=device, dtype=torch.float32)
        self._cos = self._sin = self._inv_freq.new_empty((0, config.head_dim // 2))

    def rope_rows(self, start: int, end: int) -> tuple[Tensor, Tensor]:
        """cos and sin of positions [start, end), [T, D/2] fp32 each."""
        if end > self._cos.shape[0]:
            num_rows = min(self.config.window, max(end, 2 * self._cos.shape[0], 4096))
            positions = torch.arange(num_rows, device=self.device, dtype=torch.float32)
            angles = torch.outer(positions, self._inv_freq)
            scaling = self.config.attention_scaling
            self._cos, self._sin = angles.cos() * scaling, angles.sin() * scaling
        return self._cos[start:end], self._sin[start:end]
