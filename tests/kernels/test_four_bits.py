"""Keys and values in 4 bits: the rotation, codes, and what feedback saves."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from localllm.model.paged_kv_cache import empty_cache
from localllm_kernels.attention.four_bits import (
    FOUR_BITS,
    KeyCoding,
    dequantize_keys,
    dequantize_values,
    quantize_keys,
    quantize_values,
    rotated,
)
from localllm_kernels.attention.kv_cache import row_bytes
from localllm_kernels.attention.paged_attention import paged_attention_reference
from localllm_kernels.attention.store_kv import store_kv_reference

HEADS, DIM = 2, 64


def drawn_coding(queries: Tensor | None = None) -> KeyCoding:
    """Means and factors; feedback for `queries`, [heads, rows, dim], if there are any."""
    coding = KeyCoding(
        3 * torch.randn(HEADS, DIM), 0.5 + torch.rand(HEADS, DIM), torch.zeros(HEADS, DIM, DIM)
    )
    if queries is None:
        return coding
    moments = queries.transpose(1, 2) @ queries / queries.shape[1]
    return KeyCoding.fitted(coding.means, torch.ones(HEADS, DIM), moments)


@pytest.mark.parametrize("width", [16, 64, 96, 576])
def test_the_rotation_is_its_own_inverse_and_spreads(width: int) -> None:
    rows = torch.randn(5, 3, width)
    torch.testing.assert_close(rotated(rotated(rows)), rows)
    torch.testing.assert_close(rotated(rows).norm(dim=-1), rows.norm(dim=-1))
    single = rotated(torch.eye(width))[0]
    assert single.abs().max() == single[0] == (width & -width) ** -0.5


def test_codes_are_near_and_take_a_quarter_of_the_bytes() -> None:
    rows, coding = torch.randn(50, HEADS, DIM), drawn_coding()
    rows *= torch.logspace(-3, 3, 50)[:, None, None]
    keys = dequantize_keys(*(each.transpose(0, 1) for each in quantize_keys(rows, coding)), coding)
    centred = (rows - coding.means) * coding.factors
    away = (keys.transpose(0, 1) - rows) * coding.factors
    assert (away.norm(dim=-1) <= 0.2 * centred.norm(dim=-1)).all()
    codes, scales = quantize_values(rows)
    away = dequantize_values(codes, scales) - rows
    assert (away.norm(dim=-1) <= 0.2 * rows.norm(dim=-1)).all()
    assert (codes.dtype, scales.dtype) == (FOUR_BITS, torch.bfloat16)
    stored = codes[0, 0].nbytes + scales[0, 0].nbytes
    assert stored == row_bytes(DIM, FOUR_BITS)
    assert row_bytes(DIM, torch.bfloat16) / stored >= 3.6


def test_feedback_hides_errors_from_queries() -> None:
    # As of a model: queries differ much more in some directions than in others.
    queries = torch.randn(HEADS, 500, DIM) @ torch.randn(HEADS, DIM, 8) @ torch.randn(HEADS, 8, DIM)
    keys = torch.randn(200, HEADS, DIM)
    errors = []
    for coding in (drawn_coding(), drawn_coding(queries)):
        coding = replace(coding, means=torch.zeros(HEADS, DIM))
        codes, scales = (each.transpose(0, 1) for each in quantize_keys(keys, coding))
        away = dequantize_keys(codes, scales, coding) - keys.transpose(0, 1)
        errors.append(float((queries @ away.transpose(1, 2)).norm()))
    assert errors[1] < 0.5 * errors[0]


def test_what_is_not_finite_stays_so() -> None:
    rows = torch.randn(3, HEADS, DIM)
    rows[1, 0, 5] = torch.inf
    for codes, scales in (quantize_values(rows), quantize_keys(rows, drawn_coding())):
        is_finite = dequantize_values(codes, scales).isfinite().all(-1)
        assert is_finite.tolist() == [[True, True], [False, True], [True, True]]


def test_attention_over_a_cache_is_that_over_its_values() -> None:
    coding, num_tokens = drawn_coding(), 40
    keys, values = torch.randn(2, num_tokens, HEADS, DIM)
    shape = (4, HEADS, 16, DIM)
    cache = empty_cache(shape, FOUR_BITS, torch.device("cpu"), coding=coding)
    plain = empty_cache(shape, torch.float32, torch.device("cpu"))
    slots = torch.arange(16, 16 + num_tokens)
    store_kv_reference(keys, values, cache, slots)
    stored = [each.transpose(0, 1) for each in quantize_keys(keys, coding)]
    exact = dequantize_keys(stored[0], stored[1], coding).transpose(0, 1)
    store_kv_reference(exact, dequantize_values(*quantize_values(values)), plain, slots)
    how = {
        "block_tables": torch.tensor([[1, 2, 3]], dtype=torch.int32),
        "cu_seqlens_q": torch.tensor([0, num_tokens], dtype=torch.int32),
        "seq_lens": torch.tensor([num_tokens]),
        "max_query_len": num_tokens,
        "scale": DIM**-0.5,
        "window": None,
    }
    query = torch.randn(num_tokens, 2 * HEADS, DIM)
    found, expected = (
        paged_attention_reference(query, each, **how)  # type: ignore[arg-type]
        for each in (cache, plain)
    )
    torch.testing.assert_close(found, expected)
