"""The key index: what a query is scored against in place of the keys themselves.

`exact` reads the cached keys. `int8` and `fp8` keep for each row its projection to `index_dim`
dimensions. The basis is, for each layer and KV head, the best approximation of rank `index_dim` to
q . k under the document's own statistics: with A = E[q q^T]^(1/2), B = Cov[k]^(1/2) and
U S V^T = svd(A B), queries are projected by U^T A^-1 and keys by U^T A, which minimises
E[(q . k - q' . k')^2] over all pairs of projections of that rank (Eckart-Young).
"""

from __future__ import annotations

import torch
from longread_kernels import dispatch as ops
from torch import Tensor

from longread.cache import KVCache, quantize_rows
from longread.config import INDEX_NAMES
from longread.errors import UsageError

_FP8 = torch.float8_e4m3fn
_MAX_STATISTIC_ROWS = 16384


class KeyIndex:
    """Scores queries against every cached row of a layer; follows the cache as rows are added."""

    def __init__(self, cache: KVCache, kind: str, index_dim: int) -> None:
        """Build the index of all rows that `cache` holds.

        index_dim: 1 to D, or 0 for D / 4. Raises UsageError for another kind or size.
        """
        head_dim = cache.k.shape[-1]
        if kind not in INDEX_NAMES:
            raise UsageError(f"index must be one of {', '.join(INDEX_NAMES)}, not {kind!r}")
        if not 0 <= index_dim <= head_dim:
            raise UsageError(f"index-dim must be 0 to {head_dim} for this model, not {index_dim}")
        self.kind = kind
        self._cache = cache
        self._softmax_scale = head_dim**-0.5
        if kind == "exact":
            return
        self._dim = index_dim or max(head_dim // 4, 1)
        layers, heads = cache.k.shape[:2]
        row_dtype = torch.int8 if kind == "int8" else _FP8
        self._rows = cache.k.new_empty((layers, heads, cache.capacity, self._dim), dtype=row_dtype)
        self._scale = self._rows.new_empty((layers, heads, cache.capacity), dtype=torch.float32)
        name = f"index-{kind}-{self._dim}"
        stored = cache.by_products.read_extra(name) if cache.by_products is not None else None
        if stored is None:
            stored = self._build()
            if cache.by_products is not None:
                cache.by_products.write_extra(name, stored)
        device = cache.k.device
        self._k_mean = stored["k_mean"].to(device)  # [L, H_kv, D]
        self._k_basis = stored["k_basis"].to(device)  # [L, H_kv, D, d]
        self._q_basis = stored["q_basis"].to(device)  # [L, H_kv, D, d]
        self._rows[:, :, : cache.length] = stored["rows"].to(device)
        self._scale[:, :, : cache.length] = stored["scale"].to(device)

    def append(self, layer_idx: int, start: int, end: int) -> None:
        """Project the cached keys of rows [start, end) of one layer."""
        if self.kind == "exact":
            return
        if end > self._rows.shape[2]:
            self._grow()
        k = self._cache.k[layer_idx, :, start:end]
        codes, scale = self._encode(k, self._k_mean[layer_idx], self._k_basis[layer_idx])
        self._rows[layer_idx, :, start:end] = codes
        self._scale[layer_idx, :, start:end] = scale

    def scores(self, layer_idx: int, q: Tensor, num_rows: int) -> Tensor:
        """Approximate attention logits of one token. q: [H_q, D]; returns [H_kv, G, S] fp32."""
        num_kv_heads, head_dim = self._cache.k.shape[1], self._cache.k.shape[3]
        grouped = q.reshape(num_kv_heads, -1, head_dim) * self._softmax_scale
        if self.kind == "exact":
            return ops.score(grouped, self._cache.k[layer_idx, :, :num_rows], None)
        grouped = grouped.float()
        offset = torch.matmul(grouped, self._k_mean[layer_idx][..., None])  # [H_kv, G, 1]
        projected = torch.matmul(grouped, self._q_basis[layer_idx])
        rows = self._rows[layer_idx, :, :num_rows]
        return ops.score(projected, rows, self._scale[layer_idx, :, :num_rows]) + offset

    def _build(self) -> dict[str, Tensor]:
        layers = []
        for layer_idx in range(self._cache.num_layers):
            k = self._cache.k[layer_idx, :, : self._cache.length]
            k_mean, k_basis, q_basis = self._basis(k, self._cache.q_moment[layer_idx])
            rows, scale = self._encode(k, k_mean, k_basis)
            layers.append((k_mean, k_basis, q_basis, rows, scale))
        names = ("k_mean", "k_basis", "q_basis", "rows", "scale")
        return dict(zip(names, map(torch.stack, zip(*layers, strict=True)), strict=True))

    def _encode(self, k: Tensor, k_mean: Tensor, k_basis: Tensor) -> tuple[Tensor, Tensor]:
        """k: [H_kv, T, D]; returns codes [H_kv, T, d] and one scale a row [H_kv, T]."""
        projected = torch.matmul(k.float() - k_mean[:, None], k_basis)
        if self.kind == "int8":
            return quantize_rows(projected)
        scale = projected.abs().amax(dim=-1).clamp(min=1e-12) / torch.finfo(_FP8).max
        return (projected / scale[..., None]).to(_FP8), scale

    def _basis(self, k: Tensor, q_moment: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """k: [H_kv, S, D], q_moment: [H_kv, D, D]; returns the mean key and both projections."""
        stride = max(1, -(-k.shape[1] // _MAX_STATISTIC_ROWS))
        sampled = k[:, ::stride].float()
        mean = sampled.mean(dim=1)
        sampled = sampled - mean[:, None]
        k_root, _ = _square_roots(torch.matmul(sampled.transpose(1, 2), sampled))
        q_root, q_inverse_root = _square_roots(q_moment)
        u = torch.linalg.svd(torch.matmul(q_root, k_root)).U[..., : self._dim]  # [H_kv, D, d]
        return mean, torch.matmul(q_root, u), torch.matmul(q_inverse_root, u)

    def _grow(self) -> None:
        layers, heads, old_capacity, dim = self._rows.shape
        rows = self._rows.new_empty((layers, heads, self._cache.capacity, dim))
        scale = self._scale.new_empty((layers, heads, self._cache.capacity))
        rows[:, :, :old_capacity] = self._rows
        scale[:, :, :old_capacity] = self._scale
        self._rows, self._scale = rows, scale


def _square_roots(moment: Tensor) -> tuple[Tensor, Tensor]:
    """Symmetric square root and inverse square root of second moments [H, D, D].

    The scale of a moment cancels in the product of the two projections. Directions with under
    1e-6 of the largest eigenvalue are lifted to that floor, so that few tokens suffice.
    """
    values, vectors = torch.linalg.eigh(moment)
    largest = values[..., -1:].clamp(min=1e-12)
    values = torch.maximum(values, largest * 1e-6)
    root = vectors * values.sqrt()[..., None, :]
    inverse_root = vectors * values.rsqrt()[..., None, :]
    transposed = vectors.transpose(-1, -2)
    return torch.matmul(root, transposed), torch.matmul(inverse_root, transposed)
