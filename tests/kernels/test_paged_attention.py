"""Attention over blocks against dense attention, and the bits of a row in any company."""

from functools import partial
from typing import Any

import pytest
import torch
from paged_batch import MIXED, Batch

from localllm_kernels.attention.kv_cache import KVCache
from localllm_kernels.attention.paged_attention import in_parts_of_heads, paged_attention_reference


def dense_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, window: int | None
) -> torch.Tensor:
    """One request, in float64: query [queries, heads, dim] are the last of the keys' positions."""
    query, key, value = query.double(), key.double(), value.double()
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scores = torch.einsum("qhd,khd->hqk", query, key) * scale
    positions = torch.arange(key.shape[0] - query.shape[0], key.shape[0]).unsqueeze(1)
    keys = torch.arange(key.shape[0]).unsqueeze(0)
    hidden = keys > positions
    if window is not None:
        hidden |= keys <= positions - window
    weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, value)


@pytest.mark.parametrize("window", [None, 1, 20, 128, 1000])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (6, 2), (5, 1)])
def test_a_ragged_batch_equals_dense_attention(
    heads: int, kv_heads: int, window: int | None
) -> None:
    batch = Batch(MIXED, heads, kv_heads)
    out = batch.attend(window)
    starts = batch.cu_seqlens_q.tolist()
    for i in range(len(MIXED)):
        query = batch.query[starts[i] : starts[i + 1]]
        expected = dense_attention(query, batch.keys[i], batch.values[i], 0.3, window)
        # Float32 sums of up to 300 terms of size one.
        torch.testing.assert_close(
            out[starts[i] : starts[i + 1]].double(), expected, atol=2e-5, rtol=1e-5
        )


@pytest.mark.parametrize("window", [None, 40])
def test_a_request_has_the_same_bits_alone_and_in_a_batch(window: int | None) -> None:
    batch = Batch(MIXED, 6, 2)
    together = batch.attend(window)
    starts = batch.cu_seqlens_q.tolist()
    for i in range(len(MIXED)):
        alone = batch.attend_part(slice(i, i + 1), window)
        assert torch.equal(alone, together[starts[i] : starts[i + 1]])


@pytest.mark.parametrize("kv_dtype", [torch.float32, torch.int8, torch.float8_e4m3fn])
def test_values_that_are_the_first_numbers_of_keys(kv_dtype: torch.dtype) -> None:
    batch = Batch(MIXED, 5, 1, 40, kv_dtype, value_dim=24)
    together = batch.attend(None)
    expected = batch.expected(0.3, None)
    torch.testing.assert_close(together.double(), expected, atol=2e-5, rtol=1e-5)
    starts = batch.cu_seqlens_q.tolist()
    for i in range(len(MIXED)):
        alone = batch.attend_part(slice(i, i + 1), None)
        assert torch.equal(alone, together[starts[i] : starts[i + 1]])


@pytest.mark.parametrize("kv_heads", [1, 2])
def test_parts_of_heads_give_what_all_heads_give(kv_heads: int) -> None:
    batch = Batch(MIXED, 10, kv_heads)
    sinks, parts = torch.randn(10), []

    def attend(query: torch.Tensor, cache: KVCache, **arguments: Any) -> torch.Tensor:
        parts.append(query.shape[1])
        return paged_attention_reference(query, cache, **arguments)

    expected = batch.attend(None, partial(paged_attention_reference, sinks=sinks))
    found = batch.attend(None, partial(in_parts_of_heads, attend, 4, sinks=sinks))
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-6)
    assert parts == ([4, 4, 2] if kv_heads == 1 else [8, 2])


@pytest.mark.parametrize("window", [None, 40])
def test_a_query_has_the_same_bits_in_any_chunk(window: int | None) -> None:
    length = 300
    whole = Batch([(length, length)], 6, 2)
    expected = whole.attend(window)
    for start, end in [(0, 1), (0, 7), (7, 100), (100, 101), (128, 256), (250, 300), (299, 300)]:
        part = whole.attend_chunk(start, end, window)
        assert torch.equal(part, expected[start:end])


def test_bfloat16_caches_are_attended_to_in_float32() -> None:
    batch = Batch([(200, 3)], 4, 2)
    batch.kv_dtype = torch.bfloat16
    batch.query = batch.query.bfloat16()
    out = batch.attend(None)
    keys, values = batch.keys[0].bfloat16(), batch.values[0].bfloat16()
    expected = dense_attention(batch.query, keys, values, 0.3, None)
    assert out.dtype == torch.bfloat16
    # Half a unit in the last of bfloat16's eight bits.
    torch.testing.assert_close(out.double(), expected, atol=4e-3, rtol=4e-3)


@pytest.mark.parametrize("kv_dtype", [torch.float32, torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize("window", [None, 40])
def test_the_reference_is_that_of_wider_numbers(window: int | None, kv_dtype: torch.dtype) -> None:
    batch = Batch([(70, 70), (65, 1), (300, 3), (20, 0)], 6, 2, 24, kv_dtype)
    expected = batch.expected(0.3, window)
    torch.testing.assert_close(batch.attend(window).double(), expected, atol=1e-5, rtol=1e-5)
