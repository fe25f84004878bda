"""Grids of 4-bit files are found again from bf16 values; others are rounded to the nearest."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Quant
from longread_kernels import packed
from torch import Tensor

from longread.quantize import GROUP, eight_bit, four_bit, is_four_bit

BF16_ERROR = 0.0017  # relative RMS of rounding to bf16


def random_file_values(quant: Quant, num_rows: int = 64, num_columns: int = 512) -> Tensor:
    """What gguf's own dequantiser makes of random blocks of a format, fp32."""
    rng = np.random.default_rng(1)
    if quant in (Quant.Q4_K, Quant.Q6_K):  # gguf has no quantiser for these
        blocks = num_rows * num_columns // 256
        size = {Quant.Q4_K: 144, Quant.Q6_K: 210}[quant]
        raw = rng.integers(0, 256, (blocks, size), np.uint8)
        scale = np.full((blocks, 1), 1e-3, np.float16).view(np.uint8)
        if quant == Quant.Q4_K:
            least = rng.uniform(0.001, 0.008, (blocks, 1)).astype(np.float16).view(np.uint8)
            raw[:, :2], raw[:, 2:4] = scale, least
        else:
            raw[:, -2:] = scale
    else:
        values = rng.standard_normal((num_rows, num_columns), dtype=np.float32)
        raw = gguf.quants.quantize(values, quant)
    values = gguf.quants.dequantize(raw, quant)
    return torch.from_numpy(values.reshape(num_rows, num_columns).copy())


def relative_rms(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected).norm() / expected.double().norm())


@pytest.mark.parametrize("quant", [Quant.Q4_0, Quant.Q4_1, Quant.Q4_K])
def test_values_of_a_4_bit_file_are_kept(quant: Quant) -> None:
    values = random_file_values(quant)
    found = four_bit(values.to(torch.bfloat16))
    assert found.on_grid.float().mean() > 0.999
    assert is_four_bit(values.to(torch.bfloat16))
    assert relative_rms(found.values(), values) < 2 * BF16_ERROR
    # What is read of its own values again is the same.
    again = four_bit(found.values().to(torch.bfloat16))
    assert relative_rms(again.values(), found.values()) < 2 * BF16_ERROR


@pytest.mark.parametrize("quant", [Quant.Q5_0, Quant.Q5_1, Quant.Q8_0, Quant.Q6_K])
def test_more_bits_are_no_grid_of_4(quant: Quant) -> None:
    values = random_file_values(quant).to(torch.bfloat16)
    assert not is_four_bit(values)
    codes, scale = eight_bit(values)
    assert relative_rms(codes * scale[:, None].float(), values) < 0.01


def test_some_rows_of_more_bits_make_a_matrix_one_of_more_bits() -> None:
    few, more = random_file_values(Quant.Q4_K), random_file_values(Quant.Q6_K)
    fused = torch.cat((few, few, few, few, few, few, more)).to(torch.bfloat16)
    assert is_four_bit(fused[:-64])
    assert not is_four_bit(fused)


def test_random_values_are_rounded_to_the_nearest() -> None:
    torch.manual_seed(0)
    values = torch.randn(48, 96).to(torch.bfloat16)
    found = four_bit(values, find_grid=False)
    assert not found.on_grid.any() and not is_four_bit(values)
    assert found.codes.max() == 15 and found.codes.min() == 0
    groups = values.float().view(48, 3, GROUP)
    step = (groups.amax(2) - groups.amin(2)) / 15
    error = (found.values() - values).view(48, 3, GROUP).abs()
    assert (error < 0.75 * step[..., None]).all()


def test_groups_of_few_values_are_kept() -> None:
    values = torch.zeros(16, 96)
    values[1] = -3.0
    values[2, ::2] = 0.5
    values[3, :5], values[3, 5:9] = 1.0, -0.25
    values[4, 40] = 7.0
    found = four_bit(values)
    assert found.on_grid.all()
    torch.testing.assert_close(found.values(), values, rtol=0, atol=7 * 2**-9)
    assert torch.equal(found.values()[:2], values[:2])


def test_eight_bits_are_the_nearest() -> None:
    torch.manual_seed(0)
    values = torch.randn(10, 50).to(torch.bfloat16)
    values[3] = 0
    codes, scale = eight_bit(values)
    assert codes.abs().max() == 127
    error = (codes.float() * scale.float()[:, None] - values.float()).abs()
    # The row's largest value may lie a little past the last code, by the scale's rounding.
    assert (error <= (0.5 + 127 * 2**-8) * scale.float()[:, None]).all()
    assert (error.mean(dim=1) <= 0.3 * scale.float()).all()


@pytest.mark.skipif(packed.kernels_missing() is not None, reason="no packed kernels here")
@pytest.mark.parametrize("num_tokens", [1, 3, 4, 17, 65])
@pytest.mark.parametrize(("rows", "columns"), [(16, 32), (80, 96), (400, 64), (192, 576)])
def test_products_are_those_of_the_values(num_tokens: int, rows: int, columns: int) -> None:
    torch.manual_seed(0)
    values = torch.randn(rows, columns).to(torch.bfloat16)
    x = torch.randn(num_tokens, columns).to(torch.bfloat16)
    four = four_bit(values)
    assert packed.fits_int4(rows, columns)
    scale_zero = torch.stack((four.scale, four.zero), dim=2).transpose(0, 1).contiguous()
    found = packed.int4_linear(x, packed.pack_int4(four.codes), scale_zero)
    assert relative_rms(found, x.double() @ four.values().double().T) < 0.003
    codes, scale = eight_bit(values)
    found = packed.int8_linear(x, codes, scale)
    exact = x.double() @ (codes.double() * scale.double()[:, None]).T
    assert relative_rms(found, exact) < 0.003


@pytest.mark.skipif(packed.kernels_missing() is not None, reason="no packed kernels here")
def test_slabs_are_packed_as_the_whole() -> None:
    codes = torch.randint(0, 16, (5 * packed.SLAB_ROWS + 16, 96), dtype=torch.uint8)
    slabs = [packed.pack_int4(slab) for slab in codes.split(packed.SLAB_ROWS)]
    assert torch.equal(torch.cat(slabs), packed.pack_int4(codes))


def test_other_shapes_are_refused() -> None:
    assert not packed.fits_int4(24, 32)
    assert not packed.fits_int4(32, 48) and not packed.fits_int8(48)
    with pytest.raises(AssertionError, match="not for packed"):
        packed.int8_linear(torch.ones(2, 48).bfloat16(), torch.ones(16, 48, dtype=torch.int8), None)
