"""KV slabs: writing, growing, truncating, and their form in the store."""

from __future__ import annotations

import pytest
import torch

from longread.cache import KVCache, dequantize_rows, quantize_rows


def _cache(capacity: int = 8, dtype: torch.dtype = torch.float32) -> KVCache:
    return KVCache(2, 3, 4, capacity, device=torch.device("cpu"), dtype=dtype)


def _filled(num_rows: int, dtype: torch.dtype = torch.float32) -> KVCache:
    cache = _cache(num_rows, dtype)
    for layer_idx in range(2):
        cache.k[layer_idx] = torch.randn(3, num_rows, 4).to(dtype)
        cache.v[layer_idx] = torch.randn(3, num_rows, 4).to(dtype)
        cache.add_moment(layer_idx, torch.full((3, 4, 4), 1.0 + layer_idx))
    cache.length = num_rows
    return cache


def test_reserve_keeps_the_rows_that_count() -> None:
    cache = _filled(5)
    before = cache.k.clone(), cache.v.clone()
    cache.reserve(50)
    capacity = cache.capacity
    assert capacity >= 50 and cache.length == 5
    cache.reserve(capacity + 1)
    assert cache.capacity > capacity + 500  # one token more must not copy the slabs each time
    assert torch.equal(cache.k[:, :, :5], before[0]) and torch.equal(cache.v[:, :, :5], before[1])


def test_blocks_restore_the_rows_exactly_in_bf16() -> None:
    source = _filled(10, torch.bfloat16)
    first = source.export_block(0, 6, "bf16")
    second = source.export_block(6, 10, "bf16")
    restored = _cache(10, torch.bfloat16)
    restored.load_block(0, 6, first)
    restored.load_block(6, 10, second)
    assert restored.length == 10
    assert torch.equal(restored.k, source.k) and torch.equal(restored.v, source.v)


def test_int8_blocks_restore_exactly_what_the_first_run_goes_on_with() -> None:
    source = _filled(10, torch.bfloat16)
    before = source.k.clone()
    block = source.export_block(0, 10, "int8")
    assert block["k"].dtype == torch.int8
    restored = _cache(10, torch.bfloat16)
    restored.load_block(0, 10, block)
    assert torch.equal(restored.k, source.k) and torch.equal(restored.v, source.v)
    error = (source.k.float() - before.float()).abs().amax(dim=-1)
    assert (error <= before.float().abs().amax(dim=-1) / 127).all()


def test_quantised_rows_are_within_half_a_step() -> None:
    rows = torch.randn(7, 16)
    codes, scale = quantize_rows(rows)
    assert (
        (dequantize_rows(codes, scale, torch.float32) - rows).abs() <= scale[:, None] * 0.501
    ).all()
    assert torch.equal(quantize_rows(torch.zeros(1, 4))[0], torch.zeros(1, 4, dtype=torch.int8))


def test_moments_of_blocks_add_up() -> None:
    source = _filled(4)
    block = source.export_block(0, 4, "bf16")
    restored = _cache(8)
    restored.load_block(0, 4, block)
    restored.load_block(4, 8, block)
    assert torch.equal(restored.q_moment, 2 * source.q_moment)
    assert torch.equal(restored.block_moment, source.q_moment)


def test_a_block_out_of_order_is_refused() -> None:
    block = _filled(4).export_block(0, 4, "bf16")
    with pytest.raises(AssertionError, match="block starts at 4"):
        _cache(8).load_block(4, 8, block)
