"""Keys and values in 8 bits: codes and scales by hand, sizes, and how far off they may be."""

import pytest
import torch

from localllm_kernels.attention.kv_cache import (
    CODE_LIMITS,
    dequantize_rows,
    quantize_rows,
    row_bytes,
)

# Half a step: of the whole row for int8, of the value itself for three bits of mantissa.
HALF_STEP = {torch.int8: 0.5 / 127, torch.float8_e4m3fn: 2.0**-4}


def test_int8_codes_by_hand() -> None:
    rows = torch.tensor([[1.0, -2.0, 0.25, 0.0], [0.0, 0.0, 0.0, 0.0]])
    codes, scales = quantize_rows(rows, torch.int8)
    assert codes.tolist() == [[64, -127, 16, 0], [0, 0, 0, 0]]  # 63.5 goes to the even 64
    assert scales.tolist() == [pytest.approx(2 / 127), 0.0]


def test_fp8_codes_by_hand() -> None:
    codes, scales = quantize_rows(torch.tensor([[448.0, -1.0, 17.0, 2.0**-9]]), torch.float8_e4m3fn)
    # 17 lies between 16 and 18, and goes to the even mantissa.
    assert codes.float().tolist() == [[448.0, -1.0, 16.0, 2.0**-9]]
    assert scales.tolist() == [1.0]


@pytest.mark.parametrize("dtype", list(CODE_LIMITS))
def test_no_value_is_off_by_more_than_half_a_step(dtype: torch.dtype) -> None:
    rows = torch.randn(50, 7, 96) * torch.logspace(-6, 6, 50)[:, None, None]
    codes, scales = quantize_rows(rows, dtype)
    largest = rows.abs().amax(-1, keepdim=True)
    span = largest if dtype == torch.int8 else rows.abs() + largest * 2**-15
    found = dequantize_rows(codes, scales)
    assert ((found - rows).abs() <= span * HALF_STEP[dtype] * (1 + 1e-5)).all()


def test_8_bits_hold_nearly_twice_the_tokens() -> None:
    for dtype in CODE_LIMITS:
        assert row_bytes(128, torch.bfloat16) / row_bytes(128, dtype) == pytest.approx(256 / 132)
    assert row_bytes(64, torch.float32) == 256


def test_the_factor_of_a_row_is_divided_once() -> None:
    """A value of half the greatest lies between two codes, and goes to the even one."""
    for largest in (3.015625, 2.296875, 3.15625, 2.546875):
        codes, _ = quantize_rows(torch.tensor([[largest, largest / 2]]), torch.int8)
        assert codes.tolist() == [[127, 64]]
