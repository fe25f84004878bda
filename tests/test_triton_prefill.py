"""The Triton kernels of prefill against their torch twins in float64."""

from __future__ import annotations

import pytest
import torch
from longread_kernels import append, linear, norm, prefill, reference
from triton_case import DEVICE, DTYPE, ON_GPU, assert_near, poison, random, wide

pytestmark = pytest.mark.usefixtures("poison")
__all__ = ["poison"]

LENGTHS = ((1, 0), (1, 64), (63, 0), (64, 65), (65, 1000)) + (((1000, 131073),) if ON_GPU else ())


@pytest.mark.parametrize("num_tokens, num_past", LENGTHS)
@pytest.mark.parametrize("group_size", (1, 3, 4, 7, 8))
def test_attend_causal(num_tokens: int, num_past: int, group_size: int) -> None:
    _check_attend_causal(num_tokens, num_past, group_size, 64)


@pytest.mark.parametrize("head_dim", (16, 64, 96, 128, 256))
def test_attend_causal_of_each_head_size(head_dim: int) -> None:
    _check_attend_causal(65, 70, 2, head_dim)


def _check_attend_causal(num_tokens: int, num_past: int, group_size: int, head_dim: int) -> None:
    num_rows, num_kv_heads = num_past + num_tokens, 2
    q = random(num_tokens, num_kv_heads * group_size, head_dim)
    slabs = random(2, num_kv_heads, num_rows + 9, head_dim, seed=1)
    slabs[:, :, num_rows:] = torch.nan  # rows that are not there yet
    k, v = slabs[0, :, :num_rows], slabs[1, :, :num_rows]
    found = prefill.attend_causal(q, k, v, head_dim**-0.5)
    expected = reference.attend_causal_ref(wide(q), wide(k), wide(v), head_dim**-0.5)
    assert_near(found, expected)


@pytest.mark.parametrize("num_tokens", (1, 63, 65))
@pytest.mark.parametrize("head_dim, normed", ((64, False), (96, True), (128, True), (256, False)))
def test_rope_append(num_tokens: int, head_dim: int, normed: bool) -> None:
    num_kv_heads, start = 2, 7
    heads = random(num_tokens, 3 * num_kv_heads + 2 * num_kv_heads, head_dim)
    norms = (random(head_dim, seed=5), random(head_dim, seed=6)) if normed else None
    angles = random(num_tokens, head_dim // 2, seed=2, dtype=torch.float32)
    cos, sin = angles.cos(), angles.sin()
    slab = torch.full(
        (num_kv_heads, start + num_tokens + 3, head_dim), torch.nan, dtype=DTYPE, device=DEVICE
    )
    k, v = slab.clone(), slab.clone()
    found = append.rope_append(heads, cos, sin, norms, 1e-6, k, v, start)
    wide_k, wide_v = wide(k).fill_(torch.nan), wide(v).fill_(torch.nan)
    wide_norms = (wide(norms[0]), wide(norms[1])) if norms is not None else None
    expected = reference.rope_append_ref(
        wide(heads), wide(cos), wide(sin), wide_norms, 1e-6, wide_k, wide_v, start
    )
    assert_near(found, expected)
    written = slice(start, start + num_tokens)
    assert_near(k[:, written], wide_k[:, written])
    assert torch.equal(wide(v[:, written]), wide_v[:, written])
    for ours, theirs in ((k, wide_k), (v, wide_v)):
        assert torch.equal(wide(ours).isnan(), theirs.isnan()), "rows of others were written"


@pytest.mark.parametrize("num_columns", (48, 576, 1536))
def test_add_rms_norm(num_columns: int) -> None:
    x, delta = random(65, num_columns), random(65, num_columns, seed=1)
    weight = random(num_columns, seed=2)
    total, normed = norm.add_rms_norm(x, delta, weight, 1e-6)
    expected = reference.add_rms_norm_ref(wide(x), wide(delta), wide(weight), 1e-6)
    assert torch.equal(total, x + delta)
    assert_near(normed, expected[1])


@pytest.mark.parametrize("num_columns", (33, 1000, 2500))
def test_swiglu(num_columns: int) -> None:
    gate_up = random(65, 2 * num_columns)
    assert_near(linear.swiglu(gate_up), reference.swiglu_ref(wide(gate_up)))
