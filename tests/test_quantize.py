"""Grids of 4-bit files are found again from bf16 values; others are rounded to the nearest."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Quant
from longread_kernels import packed
from torch import Tensor

from longread.matrix import Int4Matrix, Int8Matrix
from longread.quantize import GROUP, EightBit, FourBit, eight_bit, four_bit, is_four_bit

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
    exact = quant in (Quant.Q5_0, Quant.Q8_0)  # whose grids are tried
    assert relative_rms(values_of(eight_bit(values)), values) < (0.003 if exact else 0.006)


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


def values_of(eight: EightBit) -> Tensor:
    return sum(half.values() for half in eight.halves())  # type: ignore[return-value]


def test_eight_bits_are_the_nearest() -> None:
    torch.manual_seed(0)
    values = torch.randn(10, 96).to(torch.bfloat16)
    values[3], values[4], values[5, 1:] = 0, 2.5, 0
    eight = eight_bit(values)
    groups = values.float().view(10, 3, GROUP)
    step = (groups.amax(2) - groups.amin(2)) / 255
    error = (values_of(eight) - values).view(10, 3, GROUP).abs()
    # Half a step, and what rounding scale and zero to bf16 makes of the farthest value.
    slack = groups.abs().amax(2) * 2**-8
    assert (error <= (0.51 * step + slack)[..., None]).all()
    assert torch.equal(values_of(eight)[3], values[3].float())


def test_halves_are_the_whole() -> None:
    torch.manual_seed(0)
    eight = eight_bit(torch.randn(16, 64))
    codes = eight.codes.view(16, 2, GROUP).double() - 128
    whole = codes * eight.scale.double()[..., None] + eight.zero.double()[..., None]
    torch.testing.assert_close(values_of(eight).double(), whole.view(16, 64), rtol=0, atol=1e-6)


@pytest.mark.skipif(packed.kernels_missing() is not None, reason="no packed kernels here")
@pytest.mark.parametrize("num_tokens", [1, 3, 4, 17, 65])
@pytest.mark.parametrize(("rows", "columns"), [(16, 32), (80, 96), (400, 64), (192, 576)])
def test_products_are_those_of_the_values(num_tokens: int, rows: int, columns: int) -> None:
    torch.manual_seed(0)
    values = torch.randn(rows, columns).to(torch.bfloat16)
    x = torch.randn(num_tokens, columns).to(torch.bfloat16)
    four = four_bit(values)
    assert packed.fits_int4(rows, columns)
    assert relative_rms(matrix_of(four).apply(x), x.double() @ four.values().double().T) < 0.003
    eight = eight_bit(values)
    found = Int8Matrix(*map(matrix_of, eight.halves())).apply(x)
    assert relative_rms(found, x.double() @ values_of(eight).double().T) < 0.004


def matrix_of(four: FourBit) -> Int4Matrix:
    scale_zero = torch.stack((four.scale, four.zero), dim=2).transpose(0, 1).contiguous()
    return Int4Matrix(packed.pack_int4(four.codes), scale_zero)


@pytest.mark.skipif(packed.kernels_missing() is not None, reason="no packed kernels here")
def test_slabs_are_packed_as_the_whole() -> None:
    codes = torch.randint(0, 16, (5 * packed.SLAB_ROWS + 16, 96), dtype=torch.uint8)
    slabs = [packed.pack_int4(slab) for slab in codes.split(packed.SLAB_ROWS)]
    assert torch.equal(torch.cat(slabs), packed.pack_int4(codes))


def test_other_shapes_are_refused() -> None:
    assert not packed.fits_int4(24, 32)
    assert not packed.fits_int4(32, 48)
    matrix = matrix_of(four_bit(torch.randn(16, 64)))
    with pytest.raises(AssertionError, match="does not fit"):
        matrix.apply(torch.ones(2, 32, dtype=torch.bfloat16))
    with pytest.raises(AssertionError, match="must be bfloat16"):
        matrix.apply(torch.ones(2, 64))
