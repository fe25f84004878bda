"""The key index: what a query is scored against in place of the keys themselves.

`exact` reads the cached keys. `int8` and `fp8` keep for each row its projection to `index_dim`
dimensions, in steps that are fixed for each layer, KV head and dimension. The basis is, for each
layer and KV head, the best approximation of rank `index_dim` to q . k under the document's own
statistics: with A = E[q q^T]^(1/2), B = Cov[k]^(1/2) and U S V^T = svd(A B), queries are projected
by U^T A^-1 and keys by U^T A, which minimises E[(q . k - q' . k')^2] over all pairs of projections
of that rank (Eckart-Young).
"""

from __future__ import annotations

import torch
from longread_kernels import dispatch as ops
from longread_kernels.tables import IndexLayer
from torch import Tensor

from longread.cache import KVCache
from longread.config import INDEX_NAMES
from longread.errors import UsageError

_FP8 = torch.float8_e4m3fn
_MAX_STATISTIC_ROWS = 16384
_NUM_SINKS = 4
_LEAST_DIM = 32  # what a tensor core's int8 tile takes; 16 of 64 lost answers (docs/quality.md)


class KeyIndex:
    """Scores queries against every cached row of a layer; follows the cache as rows are added."""

    def __init__(self, cache: KVCache, kind: str, index_dim: int) -> None:
        """Build the index of all rows that `cache` holds.

        index_dim: 1 to D, or 0 for a quarter of D, 32 at least. Raises UsageError for another kind
        or size.
        """
        head_dim = cache.k.shape[-1]
        if kind not in INDEX_NAMES:
            raise UsageError(f"index must be one of {', '.join(INDEX_NAMES)}, not {kind!r}")
        if not 0 <= index_dim <= head_dim:
            raise UsageError(f"index-dim must be 0 to {head_dim} for this model, not {index_dim}")
        self.kind = kind
        self.cache = cache
        self._softmax_scale = head_dim**-0.5
        if kind == "exact":
            return
        self._dim = index_dim or min(head_dim, max(head_dim // 4, _LEAST_DIM))
        self._largest_code = 127.0 if kind == "int8" else torch.finfo(_FP8).max
        layers, heads = cache.k.shape[:2]
        row_dtype = torch.int8 if kind == "int8" else _FP8
        self._rows = cache.k.new_empty((layers, heads, cache.capacity, self._dim), dtype=row_dtype)
        self._k_mean = torch.empty((layers, heads, head_dim), device=cache.k.device)
        self._q_offset = torch.empty_like(self._k_mean)
        self._k_basis = torch.empty((layers, heads, head_dim, self._dim), device=cache.k.device)
        self._q_basis = torch.empty_like(self._k_basis)
        self.rebuild()

    def rebuild(self) -> None:
        """Build it anew, in place, for the documents that the cache holds now."""
        if self.kind == "exact":
            return
        self.reserve()
        by_products = self.cache.by_products
        name = f"index-{self.kind}-{self._dim}-static"
        stored = by_products.read_extra(name) if by_products is not None else None
        if stored is None:
            stored = self._build()
            if by_products is not None:
                by_products.write_extra(name, stored)
        self._k_mean.copy_(stored["k_mean"])
        self._k_basis.copy_(stored["k_basis"])
        self._q_basis.copy_(stored["q_basis"]).mul_(self._softmax_scale)
        self._q_offset.copy_(self._k_mean).mul_(self._softmax_scale)
        self._rows[:, :, : self.cache.length] = stored["rows"].to(self._rows.device)

    def layer(self, layer_idx: int) -> IndexLayer:
        """One layer's index as the decode kernels take it; valid until the cache grows."""
        if self.kind == "exact":
            return IndexLayer(self.cache.k[layer_idx])
        self.reserve()
        return IndexLayer(
            self._rows[layer_idx],
            self._q_basis[layer_idx],
            self._q_offset[layer_idx],
            self._k_basis[layer_idx],
            self._k_mean[layer_idx],
        )

    def append(self, layer_idx: int, start: int, end: int) -> None:
        """Project the cached keys of rows [start, end) of one layer."""
        if self.kind == "exact":
            return
        self.reserve()
        k = self.cache.k[layer_idx, :, start:end]
        codes = self._encode(k, self._k_mean[layer_idx], self._k_basis[layer_idx])
        self._rows[layer_idx, :, start:end] = codes

    def scores(self, layer_idx: int, q: Tensor, num_rows: int) -> Tensor:
        """Approximate attention logits of one token. q: [H_q, D]; returns [H_kv, G, S] fp32."""
        num_kv_heads, head_dim = self.cache.k.shape[1], self.cache.k.shape[3]
        grouped = q.reshape(num_kv_heads, -1, head_dim)
        if self.kind == "exact":
            scaled = grouped * self._softmax_scale
            return ops.score(scaled, self.cache.k[layer_idx, :, :num_rows])
        grouped = grouped.float()
        offset = torch.matmul(grouped, self._q_offset[layer_idx][..., None])  # [H_kv, G, 1]
        projected = torch.matmul(grouped, self._q_basis[layer_idx])
        return ops.score(projected, self._rows[layer_idx, :, :num_rows]) + offset

    def reserve(self) -> None:
        """Make room for as many rows as the cache has."""
        layers, heads, old_capacity, dim = self._rows.shape
        if old_capacity >= self.cache.capacity:
            return
        with torch.inference_mode(False):  # as the cache's slabs: rebuild() writes to it later
            rows = self._rows.new_empty((layers, heads, self.cache.capacity, dim))
        rows[:, :, :old_capacity] = self._rows
        self._rows = rows

    def _build(self) -> dict[str, Tensor]:
        """k_mean [L, H_kv, D], k_basis and q_basis [L, H_kv, D, d], rows [L, H_kv, S, d]."""
        layers = [k[:, : self.cache.length] for k in self.cache.k]
        means, moments = zip(*map(_statistics, layers), strict=True)
        k_mean = torch.stack(means)
        k_basis, q_basis = _bases(torch.stack(moments), self.cache.q_moment, self._dim)
        rows = []
        for layer_idx, k in enumerate(layers):
            step = self._steps(k, k_mean[layer_idx], k_basis[layer_idx])[:, None]  # [H_kv, 1, d]
            k_basis[layer_idx] /= step
            q_basis[layer_idx] *= step
            rows.append(self._encode(k, k_mean[layer_idx], k_basis[layer_idx]))
        return {"k_mean": k_mean, "k_basis": k_basis, "q_basis": q_basis, "rows": torch.stack(rows)}

    def _encode(self, k: Tensor, k_mean: Tensor, k_basis: Tensor) -> Tensor:
        """k: [H_kv, T, D]; returns codes [H_kv, T, d]."""
        codes = torch.matmul(k.float() - k_mean[:, None], k_basis)
        codes = codes.clamp(-self._largest_code, self._largest_code)
        return codes.round().to(torch.int8) if self.kind == "int8" else codes.to(_FP8)

    def _steps(self, k: Tensor, k_mean: Tensor, k_basis: Tensor) -> Tensor:
        """What one code stands for, for each KV head and dimension [H_kv, d].

        The codes reach to the largest projection, or to six standard deviations where that is
        less; the sinks, which lie far out and are kept anyway, do not count.
        """
        sampled = k[:, :: _stride(k)].float()
        sampled = sampled[:, _NUM_SINKS:] if sampled.shape[1] > _NUM_SINKS else sampled
        projected = torch.matmul(sampled - k_mean[:, None], k_basis)
        spread = projected.pow(2).mean(dim=1).sqrt()
        reach = torch.minimum(projected.abs().amax(dim=1), 6 * spread)
        return reach.clamp(min=1e-12) / self._largest_code


def _statistics(k: Tensor) -> tuple[Tensor, Tensor]:
    """k: [H_kv, S, D]; returns the mean key [H_kv, D] and the second moments [H_kv, D, D] fp32."""
    sampled = k[:, :: _stride(k)].float()
    mean = sampled.mean(dim=1)
    sampled = sampled - mean[:, None]
    return mean, torch.matmul(sampled.transpose(1, 2), sampled)


def _bases(k_moment: Tensor, q_moment: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """Moments [L, H_kv, D, D] fp32; returns the projections of keys and of queries [L, H_kv, D, d].

    All layers in one batch and on the CPU: LAPACK takes a hundred matrices this small in a few
    hundredths of a second, and needs no launches.
    """
    k_root, _ = _square_roots(k_moment.cpu())
    q_root, q_inverse_root = _square_roots(q_moment.cpu())
    u = torch.linalg.svd(torch.matmul(q_root, k_root)).U[..., :dim]
    bases = torch.matmul(q_root, u), torch.matmul(q_inverse_root, u)
    return bases[0].to(k_moment.device), bases[1].to(k_moment.device)


def _stride(k: Tensor) -> int:
    """Every how many rows of k [H_kv, S, D] are enough for a statistic."""
    return max(1, -(-k.shape[1] // _MAX_STATISTIC_ROWS))


def _square_roots(moment: Tensor) -> tuple[Tensor, Tensor]:
    """Symmetric square root and inverse square root of second moments [L, H_kv, D, D].

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
