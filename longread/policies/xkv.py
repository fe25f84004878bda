"""xKV (arXiv 2503.18893): every row is read, rebuilt from a low-rank form that layers share.

For each group of adjacent layers the keys before RoPE of all its layers and heads stand side by
side as one matrix [S, F], F = group_size * H_kv * D, and so do the values. Each matrix is cut to
its best approximation of rank r, which takes r * (S + F) numbers: a basis of tokens that the group
shares, and what each layer rebuilds its rows with. What is stored is what `budget` of the S rows
would be, K and V together:

    (rank_k + rank_v) * (S + F) = 2 * budget * F,  rank_v = value_ratio * rank_k

A matrix whose r * (S + F) comes to S * F or more stays exact, and the other one has the rest.

Differences from the paper: questions stay exact, where the paper cuts the whole prompt. As there,
the documents and the first question are read densely and answers stay exact. After the first
question the originals are not read again. The factors are multiplied out once into a second slab,
so no memory is saved: the cache exists twice. They come from the eigenvectors of the matrix's
F x F Gram matrix, which is summed over chunks of rows; the fp32 copy of a matrix never exists.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import torch
from longread_kernels import dispatch as ops
from torch import Tensor

from longread.cache import KVCache
from longread.policies.base import KernelPlan, Policy, Rereader, Turn

_CHUNK_ROWS = 2048


@dataclass
class XKV(Policy):
    """budget (None: all): rows of the documents whose numbers are stored; group_size: layers.

    value_ratio: rank of the values over rank of the keys; 576 over 384 in the paper.
    """

    rebuilds: ClassVar[bool] = True
    budget: int | None
    group_size: int = 4
    value_ratio: float = 1.5
    _cache: KVCache | None = field(default=None, init=False, repr=False)
    _rereader: Rereader | None = field(default=None, init=False, repr=False)
    # Its slabs stay from document to document, so that captured steps go on reading them.
    _rebuilt: KVCache | None = field(default=None, init=False, repr=False)
    _is_cut: bool = field(default=False, init=False, repr=False)
    _was_asked: bool = field(default=False, init=False, repr=False)

    def prepare(self, cache: KVCache, rereader: Rereader | None = None) -> None:
        self._cache, self._rereader = cache, rereader
        self._is_cut = self._was_asked = False

    def start_turn(self, turn: Turn) -> None:
        if self._cache is not None and self._was_asked:
            self._rebuild(self._cache.length)  # where the last turn's answer had no token
        super().start_turn(turn)

    def observe(self, layer_idx: int, q: Tensor, start: int) -> None:
        self._was_asked = True

    def appended(self, layer_idx: int, start: int, end: int) -> None:
        if self._cache is None or self._rebuilt is None or not self._is_cut:
            return
        self._rebuilt.length = start
        self._rebuilt.reserve(end)
        self._rebuilt.length = end
        self._rebuilt.k[layer_idx, :, start:end] = self._cache.k[layer_idx, :, start:end]
        self._rebuilt.v[layer_idx, :, start:end] = self._cache.v[layer_idx, :, start:end]

    def select(self, layer_idx: int, q: Tensor, num_rows: int) -> Tensor | None:
        self._rebuild(num_rows)
        return None

    def read_from(self, cache: KVCache) -> KVCache:
        return self._rebuilt if self._rebuilt is not None and self._is_cut else cache

    def kernel_plan(self) -> KernelPlan:
        return KernelPlan()

    def kernel_turn(self) -> Turn:
        """Cuts the documents, if nothing has yet. Answers are written to the rows that are read."""
        if self._cache is not None:
            self._rebuild(self._cache.length)
            self.read_from(self._cache).length = self._cache.length
        return self.turn

    def ranks(self, num_rows: int, num_features: int) -> tuple[int | None, int | None]:
        """Ranks of the keys and values of a group's matrices [num_rows, num_features].

        None: stays exact.
        """
        if self.budget is None or self.budget >= num_rows:
            return None, None
        most = num_rows * num_features / (num_rows + num_features)  # takes what the rows take
        total = 2 * self.budget / num_rows * most
        values = min(total * self.value_ratio / (1 + self.value_ratio), most)
        keys = min(total - values, most)
        values = min(total - keys, most)
        rank_k, rank_v = (None if r >= most else max(1, int(r + 1e-6)) for r in (keys, values))
        return rank_k, rank_v

    def _rebuild(self, num_rows: int) -> None:
        """Cut the documents, once. Rows [0, num_rows) are in the cache or about to be."""
        if self._is_cut or self.budget is None:
            return
        assert self._cache is not None and self._rereader is not None, "prepare() comes first"
        num_document = self._rereader.num_rows
        if self.budget >= num_document:
            return
        old = self._cache
        layers, heads, _, head_dim = old.k.shape
        new = self._slabs(old)
        new.length = num_rows
        rope = self._rereader.rope_rows(0, num_document)
        for first in range(0, layers, self.group_size):
            group = slice(first, min(first + self.group_size, layers))
            ranks = self.ranks(num_document, (group.stop - first) * heads * head_dim)
            _cut(old.k[group, :, :num_document], new.k[group, :, :num_document], ranks[0], rope)
            _cut(old.v[group, :, :num_document], new.v[group, :, :num_document], ranks[1], None)
        new.copy_rows(old, num_document, num_rows)
        self._rebuilt, self._is_cut = new, True

    def _slabs(self, like: KVCache) -> KVCache:
        """The slabs of the document before where there is room in them, or new ones."""
        own = self._rebuilt
        if own is not None and own.k[:, :, : like.capacity].shape == like.k.shape:
            return own
        layers, heads, capacity, head_dim = like.k.shape
        with torch.inference_mode(False):  # as the model's own: they are written to later
            return KVCache(
                layers, heads, head_dim, capacity, device=like.k.device, dtype=like.k.dtype
            )


def _cut(old: Tensor, new: Tensor, rank: int | None, rope: tuple[Tensor, Tensor] | None) -> None:
    """Write to `new` what rank `rank` (None: all) leaves of `old`; [g, H_kv, S, D] both.

    rope: cos and sin [S, D/2] fp32 by which the rows were turned, and are turned again after.
    """
    if rank is None:
        new.copy_(old)
        return
    num_features = old.shape[0] * old.shape[1] * old.shape[3]
    gram = torch.zeros((num_features, num_features), dtype=torch.float32, device=old.device)
    for start in range(0, old.shape[2], _CHUNK_ROWS):
        rows = _flat(old, start, rope)
        gram.addmm_(rows.T, rows)
    basis = torch.linalg.eigh(gram).eigenvectors[:, -rank:]  # [F, r], the largest come last
    for start in range(0, old.shape[2], _CHUNK_ROWS):
        rows = (_flat(old, start, rope) @ basis) @ basis.T
        heads = rows.view(rows.shape[0], -1, old.shape[3])
        if rope is not None:
            cos, sin = (table[start : start + _CHUNK_ROWS] for table in rope)
            heads = ops.rope(heads, cos, sin)
        heads = heads.unflatten(1, old.shape[:2]).permute(1, 2, 0, 3)
        new[:, :, start : start + _CHUNK_ROWS] = heads


def _flat(slab: Tensor, start: int, rope: tuple[Tensor, Tensor] | None) -> Tensor:
    """A chunk of rows as they were before RoPE, all heads side by side: [n, g * H_kv * D] fp32."""
    rows = slab[:, :, start : start + _CHUNK_ROWS].float()
    rows = rows.permute(2, 0, 1, 3).flatten(1, 2)  # [n, g * H_kv, D]
    if rope is not None:
        cos, sin = (table[start : start + _CHUNK_ROWS] for table in rope)
        squared = cos.square() + sin.square()  # YaRN also scales what it turns
        rows = ops.rope(rows, cos / squared, -sin / squared)
    return rows.flatten(1)
