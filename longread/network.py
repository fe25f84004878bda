"""A decoder's weights on a device, and a layer's arithmetic on both sides of attention."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

import torch
import torch.nn.functional as F
from longread_kernels import dispatch as ops
from torch import Tensor

from longread.cache import KVCache
from longread.matrix import Matrix
from longread.weights import ModelConfig


@dataclass(frozen=True)
class Layer:
    """One layer's tensors; their shapes stand in weights.py. packed: its matrices in fewer bits."""

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
    packed: Mapping[str, Matrix]

    def times(self, name: str, x: Tensor, most_rows: int | None = None) -> Tensor:
        """x [T, K] by the matrix `name`, with its bias where it has one: [T, N].

        The packed matrix is taken for up to `most_rows` tokens, or as many as it is faster for.
        """
        bias = getattr(self, f"{name}_bias", None)
        product = _product(x, getattr(self, name), bias, self.packed.get(name), most_rows)
        return product.to(x.dtype)

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
        packed: Mapping[str, Matrix] | None = None,
    ) -> None:
        """packed: matrices in fewer bits, named as their tensors are, and lm_head."""
        packed = packed or {}
        self.config = config
        self.device = device
        self.dtype = dtype
        self.tensors = weights
        self.embed = weights["embed_tokens"]
        self.norm = weights["norm"]
        self.lm_head = weights.get("lm_head", self.embed)
        self.packed_head = packed.get("lm_head")
        self.layers = [
            _layer(f"layers.{i}.", weights, packed) for i in range(config.num_hidden_layers)
        ]
        self._inv_freq = weights["inv_freq"].to(device=device, dtype=torch.float32)
        self._cos = self._sin = self._inv_freq.new_empty((0, config.head_dim // 2))

    def embedded(self, token_ids: Tensor) -> tuple[Tensor, Tensor]:
        """The tokens' embeddings and their norm for the first layer, [T, C] both."""
        hidden = F.embedding(token_ids.to(self.device), self.embed)
        return hidden, ops.rms_norm(hidden, self.layers[0].input_norm, self.config.rms_norm_eps)

    def queries(
        self,
        layer_idx: int,
        normed: Tensor,
        cos: Tensor,
        sin: Tensor,
        cache: KVCache,
        most_rows: int | None = None,
    ) -> Tensor:
        """Write the tokens' keys and values to the cache; returns the queries [T, H_q, D]."""
        layer = self.layers[layer_idx]
        heads = layer.times("qkv", normed, most_rows)
        heads = heads.view(normed.shape[0], -1, self.config.head_dim)  # [T, H_q + 2 H_kv, D]
        k, v = cache.k[layer_idx], cache.v[layer_idx]
        eps = self.config.rms_norm_eps
        return ops.rope_append(heads, cos, sin, layer.head_norms, eps, k, v, cache.length)

    def finish(
        self, layer_idx: int, hidden: Tensor, attended: Tensor, most_rows: int | None = None
    ) -> tuple[Tensor, Tensor]:
        """The layer's output and its norm for what comes next, [T, C] both."""
        layer, eps = self.layers[layer_idx], self.config.rms_norm_eps
        projected = layer.times("o", attended, most_rows)
        hidden, normed = ops.add_rms_norm(hidden, projected, layer.post_norm, eps)
        gated = ops.swiglu(layer.times("gate_up", normed, most_rows))
        projected = layer.times("down", gated, most_rows)
        last = layer_idx == len(self.layers) - 1
        next_norm = self.norm if last else self.layers[layer_idx + 1].input_norm
        return ops.add_rms_norm(hidden, projected, next_norm, eps)

    def logits(self, normed: Tensor, most_rows: int | None = None) -> Tensor:
        """normed [T, C] by the head: [T, V] fp32; most_rows as in Layer.times."""
        return _product(normed, self.lm_head, None, self.packed_head, most_rows).float()

    def rope_rows(self, start: int, end: int) -> tuple[Tensor, Tensor]:
        """cos and sin of positions [start, end), [T, D/2] fp32 each."""
        if end > self._cos.shape[0]:
            num_rows = min(self.config.window, max(end, 2 * self._cos.shape[0], 4096))
            positions = torch.arange(num_rows, device=self.device, dtype=torch.float32)
            angles = torch.outer(positions, self._inv_freq)
            scaling = self.config.attention_scaling
            self._cos, self._sin = angles.cos() * scaling, angles.sin() * scaling
        return self._cos[start:end], self._sin[start:end]


def _layer(prefix: str, weights: Mapping[str, Tensor], packed: Mapping[str, Matrix]) -> Layer:
    names = [field.name for field in fields(Layer) if field.name != "packed"]
    tensors = {name: weights.get(prefix + name) for name in names}
    mine = {name: packed[prefix + name] for name in names if prefix + name in packed}
    return Layer(**tensors, packed=mine)  # type: ignore[arg-type]


def _product(
    x: Tensor, matrix: Tensor, bias: Tensor | None, packed: Matrix | None, most_rows: int | None
) -> Tensor:
    if packed is None or x.shape[0] > (packed.most_rows if most_rows is None else most_rows):
        return F.linear(x, matrix, bias)
    product = packed.apply(x)
    return product if bias is None else product.float() + bias
