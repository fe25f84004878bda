"""The KV rows of the documents and the conversation on the device: static slabs with a length.

Owns loading, appending and truncating rows, and their form in the store's blocks; not the files
(store.py) and not the compressed index (index.py). Keys are stored after RoPE, or
before it where documents are read by selection (past_window.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor

_GROWTH_ROWS = 1024
BLOCK_ROW_DIMS = {"k": 2, "v": 2, "k_scale": 2, "v_scale": 2, "q_moment": None}


class ByProducts(Protocol):
    """Where a policy keeps what it computed from a document, beside the document's rows."""

    def read_extra(self, name: str) -> dict[str, Tensor] | None: ...

    def write_extra(self, name: str, tensors: dict[str, Tensor]) -> None: ...


class Remembered:
    """By-products in memory: what one policy made, the others need not make again."""

    def __init__(self) -> None:
        self._extras: dict[str, dict[str, Tensor]] = {}

    def read_extra(self, name: str) -> dict[str, Tensor] | None:
        return self._extras.get(name)

    def write_extra(self, name: str, tensors: dict[str, Tensor]) -> None:
        self._extras[name] = tensors


class KVCache:
    """Keys and values of all layers, [L, H_kv, capacity, D] each, of which `length` rows count.

    `q_moment` [L, H_kv, D, D] fp32 sums q q^T over the document's queries, a by-product of prefill
    from which index.py computes its basis. `block_moment` is the share of the block being filled.
    `by_products` is set while the rows are exactly those of a store entry.
    """

    def __init__(
        self,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        capacity: int,
        *,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        shape = (num_layers, num_kv_heads, capacity, head_dim)
        self.k = torch.empty(shape, device=device, dtype=dtype)
        self.v = torch.empty(shape, device=device, dtype=dtype)
        moment_shape = (num_layers, num_kv_heads, head_dim, head_dim)
        self.q_moment = torch.zeros(moment_shape, device=device, dtype=torch.float32)
        self.block_moment = torch.zeros_like(self.q_moment)
        self.by_products: ByProducts | None = None
        self.length = 0

    @property
    def capacity(self) -> int:
        return self.k.shape[2]

    @property
    def num_layers(self) -> int:
        return self.k.shape[0]

    @property
    def num_bytes(self) -> int:
        return 2 * self.k.numel() * self.k.element_size()

    def reserve(self, num_rows: int, spare: int = _GROWTH_ROWS) -> None:
        """Make room for `num_rows` rows in all, `spare` more than there was; those that count stay.

        Slabs that grow in a decode step are no inference tensors: others write to them later.
        """
        if num_rows <= self.capacity:
            return
        num_rows = max(num_rows, self.capacity + spare)  # not anew for every token
        layers, heads, _, head_dim = self.k.shape
        for name in ("k", "v"):  # one after the other, so that only one slab exists twice
            old = getattr(self, name)
            with torch.inference_mode(False):
                new = old.new_empty((layers, heads, num_rows, head_dim))
            new[:, :, : self.length] = old[:, :, : self.length]
            setattr(self, name, new)

    def truncate(self, length: int) -> None:
        """Forget every row from `length` on."""
        assert 0 <= length <= self.length, f"cannot truncate {self.length} rows to {length}"
        self.length = length

    def copy_rows(self, other: KVCache, start: int, end: int) -> None:
        """Write rows [start, end) of another cache over one's own; the length stays."""
        self.k[:, :, start:end] = other.k[:, :, start:end]
        self.v[:, :, start:end] = other.v[:, :, start:end]

    def clear(self) -> None:
        """Forget all rows and what was counted of them, so that other documents may come."""
        self.length = 0
        self.q_moment.zero_()
        self.block_moment.zero_()
        self.by_products = None

    def add_moment(self, layer_idx: int, moment: Tensor) -> None:
        """Count the queries of a chunk of the document. moment: [H_kv, D, D] fp32."""
        self.q_moment[layer_idx] += moment
        self.block_moment[layer_idx] += moment

    def export_block(self, start: int, end: int, kv_dtype: str) -> dict[str, Tensor]:
        """Rows [start, end) and the block moment as the tensors of a store block, on the CPU.

        kv_dtype `int8` quantises each row of each head with one scale and writes the rounded rows
        back to the slab, so that a first run attends to exactly what a later run will load.
        """
        block = {"q_moment": self.block_moment.cpu().clone()}
        for name, slab in (("k", self.k), ("v", self.v)):
            rows = slab[:, :, start:end]
            if kv_dtype == "int8":
                codes, scale = quantize_rows(rows)
                slab[:, :, start:end] = dequantize_rows(codes, scale, rows.dtype)
                block[name], block[f"{name}_scale"] = codes.cpu(), scale.cpu()
            else:
                block[name] = rows.contiguous().cpu()
        return block

    def load_block(self, start: int, end: int, block: Mapping[str, Tensor]) -> None:
        """Write a store block's rows [start, end) to the slabs and count them."""
        assert start == self.length, f"block starts at {start}, the cache ends at {self.length}"
        for name, slab in (("k", self.k), ("v", self.v)):
            rows = block[name].to(slab.device, non_blocking=True)
            if f"{name}_scale" in block:
                rows = dequantize_rows(rows, block[f"{name}_scale"].to(slab.device), slab.dtype)
            slab[:, :, start:end] = rows
        # A prefix may end inside a block; what follows then completes that block.
        moment = block["q_moment"].to(self.q_moment.device)
        self.q_moment += moment
        self.block_moment.copy_(moment)
        self.length = end


def quantize_rows(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Symmetric int8 codes [..., D] and one fp32 scale [...] for each row."""
    scale = rows.float().abs().amax(dim=-1).clamp(min=1e-12) / 127.0
    codes = torch.round(rows.float() / scale[..., None]).to(torch.int8)
    return codes, scale


def dequantize_rows(codes: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """The rows that `quantize_rows` rounded, in `dtype`."""
    return (codes.float() * scale[..., None]).to(dtype)
