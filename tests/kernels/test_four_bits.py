"""Keys and values in 4 bits: the rotation, codes, and what feedback saves."""

import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from localllm.model.paged_kv_cache import empty_cache
from localllm.user.places import cache_folder
from localllm_kernels.attention.four_bits import (
    FOUR_BITS,
    NUM_MEANS,
    OWN_KEYS,
    KeyCoding,
    dequantize_keys,
    dequantize_values,
    nearest_means,
    quantize_keys,
    quantize_values,
    rotated,
)
from localllm_kernels.attention.kv_cache import KVCache, row_bytes
from localllm_kernels.attention.paged_attention import paged_attention_reference
from localllm_kernels.attention.rotate_and_store import rotate_and_store_reference
from localllm_kernels.attention.store_kv import store_kv_reference
from localllm_kernels.cpu.build import load_library
from localllm_kernels.cpu.ops import CpuOps
from localllm_kernels.cpu.team import Team

CPU = torch.device("cpu")
HEADS, DIM = 2, 64


def drawn_coding(queries: Tensor | None = None) -> KeyCoding:
    """Means and factors; feedback for `queries`, [heads, rows, dim], if there are any."""
    coding = KeyCoding(
        3 * torch.randn(HEADS, NUM_MEANS, DIM),
        0.5 + torch.rand(HEADS, DIM),
        torch.zeros(HEADS, DIM, DIM),
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
    nearest = coding.means[torch.arange(HEADS), nearest_means(rows, coding.means, coding.factors)]
    centred = (rows - nearest) * coding.factors
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
        coding = replace(coding, means=torch.zeros(HEADS, NUM_MEANS, DIM))
        codes, scales = (each.transpose(0, 1) for each in quantize_keys(keys, coding))
        away = dequantize_keys(codes, scales, coding) - keys.transpose(0, 1)
        errors.append(float((queries @ away.transpose(1, 2)).norm()))
    assert errors[1] < 0.5 * errors[0]


def test_queries_that_are_fewer_than_their_numbers_can_be_fitted() -> None:
    coding = drawn_coding(torch.randn(HEADS, 1, DIM))
    keys = torch.randn(200, HEADS, DIM)
    codes, scales = (each.transpose(0, 1) for each in quantize_keys(keys, coding))
    away = (dequantize_keys(codes, scales, coding).transpose(0, 1) - keys).norm()
    assert away < 0.5 * keys.norm()


def test_keys_that_are_few_and_far_away_have_a_mean_of_their_own() -> None:
    coding = drawn_coding()
    places = torch.arange(40) % NUM_MEANS
    rows = 100 * coding.means[:, places].transpose(0, 1) + torch.randn(40, HEADS, DIM)
    coding = replace(coding, means=100 * coding.means)
    codes, scales = (each.transpose(0, 1) for each in quantize_keys(rows, coding))
    assert torch.equal(scales.view(torch.int16) % NUM_MEANS, places.expand(HEADS, -1).short())
    away = dequantize_keys(codes, scales, coding).transpose(0, 1) - rows
    # As near as if all keys were about 0, where one mean would leave a hundred times as much.
    assert away.abs().mean() < 0.15


def test_a_rows_scale_is_the_best_of_several() -> None:
    rows = torch.randn(500, DIM)
    turned = rotated(rows)
    step = turned.abs().amax(-1, keepdim=True) / 7.5
    plain = rotated((turned / step).round().clamp(-8, 7) * step)
    away = dequantize_values(*quantize_values(rows)) - rows
    assert away.square().mean() < 0.9 * (plain - rows).square().mean()


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
    cache = empty_cache(shape, FOUR_BITS, CPU, coding=coding)
    plain = empty_cache(shape, torch.float32, CPU)
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


@pytest.fixture
def ops() -> CpuOps:
    if shutil.which("cc") is None:
        pytest.skip("there is no C compiler")
    return CpuOps(load_library(cache_folder("kernels")), Team())


@dataclass(frozen=True)
class Context:
    """A request of `length` tokens with its keys and values stored, and its rotated queries."""

    cache: KVCache
    query: Tensor
    tables: Tensor
    uncoded_tables: Tensor | None

    @classmethod
    def drawn(
        cls,
        ops: CpuOps,
        head_dim: int,
        block_size: int = 16,
        *,
        turns: bool,
        latent: bool = False,
        uncoded: torch.dtype | None = None,
        length: int = 150,
    ) -> "Context":
        heads = 1 if latent else HEADS
        directions = torch.randn(heads, head_dim, head_dim)
        moments = directions @ directions.transpose(1, 2)
        coding = KeyCoding.fitted(
            # Where keys are values, all means are alike.
            2 * torch.randn(heads, 1 if latent else NUM_MEANS, head_dim).expand(-1, NUM_MEANS, -1),
            0.2 + torch.rand(heads, head_dim),
            moments,
        )
        shape = (-(-length // block_size) + 2, heads, block_size, head_dim)
        cache = empty_cache(
            shape, FOUR_BITS, CPU, coding=coding, turns_keys=turns, values_are_keys=latent
        )
        # What is not written holds anything, scales no numbers.
        for codes in (cache.key, cache.value):
            codes.random_(256)
        for scales in (cache.key_scales, cache.value_scales):
            assert scales is not None
            scales[1:] = torch.nan
        at = torch.arange(length)

        def places() -> tuple[Tensor, Tensor]:
            tables = torch.randperm(shape[0] - 1)[None].int() + 1
            return tables, tables[0, at // block_size].long() * block_size + at % block_size

        (tables, slots), (uncoded_tables, uncoded_slots) = places(), places()
        own = empty_cache(shape, FOUR_BITS, CPU, coding=coding, values_are_keys=latent)
        how: dict[str, Any] = {"has_values": not latent}
        if uncoded is not None:
            more: dict[str, Any] = {"values_are_keys": latent}
            kept = empty_cache(shape, uncoded, CPU, turns_keys=turns, **more)
            for part in (kept.key, kept.value):
                part[1:] = torch.nan
            cache = replace(cache, uncoded=kept)
            own = replace(own, uncoded=empty_cache(shape, uncoded, CPU, **more))
            how["uncoded_slots"] = uncoded_slots
        rows = heads if latent else 2 * heads
        qkv = torch.randn(length, 3 * heads + rows, head_dim)
        angles = torch.outer(at.float(), 10.0 ** -torch.linspace(0, 3, head_dim // 2))
        angles *= 0.0 if latent else 1.0  # such rows are rotated before
        rotation = qkv, angles.cos(), angles.sin(), cache, slots
        query = ops.rotate_and_store(*rotation, **how)
        expected = rotate_and_store_reference(*rotation[:3], own, slots, **how)
        torch.testing.assert_close(query, expected)
        assert cache.is_turned == turns
        for found, exact in ((cache.rows.key, own.key), (cache.rows.value, own.value)):
            stored = [each.transpose(1, 2).flatten(0, 1)[slots] for each in (found, exact)]
            assert (stored[0] != stored[1]).float().mean() < 1e-3
        return cls(cache, query, tables, None if uncoded is None else uncoded_tables)

    def attend(self, attention: Callable[..., Tensor], first: int, last: int, **how: Any) -> Tensor:
        """The outputs of queries `first` to `last`."""
        if self.uncoded_tables is not None:
            # Blocks that no query reads are not the request's any more.
            how["uncoded_tables"] = self.uncoded_tables.clone()
            gone = first // OWN_KEYS * OWN_KEYS // self.cache.key.shape[2]
            how["uncoded_tables"][:, :gone] = 0
        return attention(
            self.query[first:last].contiguous(),
            self.cache,
            block_tables=self.tables,
            cu_seqlens_q=torch.tensor([0, last - first], dtype=torch.int32),
            seq_lens=torch.tensor([last]),
            max_query_len=last - first,
            scale=self.query.shape[-1] ** -0.5,
            window=how.pop("window", None),
            **how,
        )


SHAPES: list[dict[str, Any]] = [
    {"head_dim": 64, "turns": True},
    {"head_dim": 128, "block_size": 32, "turns": True},
    {"head_dim": 256, "turns": True},
    {"head_dim": 96, "turns": False},
    {"head_dim": 24, "turns": False},
    {"head_dim": 576, "turns": False, "latent": True},
]
WAYS: list[dict[str, Any]] = [
    {},
    {"window": 40},
    {"window": 5},
    {"cap": 5.0, "sinks": torch.linspace(-1, 1, 3 * HEADS)},
    {"num_hidden": 20},
]


def test_c_joins_stretches_and_the_uncoded_keys_alike(ops: CpuOps) -> None:
    """Threads share the stretches of few queries, of which one alone takes all for many."""
    torch.manual_seed(0)
    context = Context.drawn(ops, 64, turns=True, uncoded=torch.bfloat16, length=2300)
    sinks = torch.linspace(-1, 1, 3 * HEADS)
    whole = context.attend(ops.paged_attention, 0, 2300, sinks=sinks)
    rows = replace(context, cache=context.cache.rows)
    exact = rows.attend(paged_attention_reference, 2200, 2300, sinks=sinks)
    assert (whole[2200:] - exact).norm() < 0.02 * exact.norm()
    for first, last in ((1020, 1045), (1023, 1024), (1024, 1025), (1100, 1101), (2298, 2300)):
        found = context.attend(ops.paged_attention, first, last, sinks=sinks)
        assert torch.equal(found, whole[first:last])


@pytest.mark.parametrize("uncoded", [None, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "how", WAYS, ids=["all", "window", "short window", "cap and sinks", "hidden"]
)
@pytest.mark.parametrize("shape", SHAPES, ids=lambda each: str(each["head_dim"]))
def test_c_attends_over_4_bits_alike_in_any_chunk(
    ops: CpuOps, shape: dict[str, Any], how: dict[str, Any], uncoded: torch.dtype | None
) -> None:
    if shape.get("latent") and "sinks" in how:
        pytest.skip("no family has latent rows and sinks")
    torch.manual_seed(shape["head_dim"])
    context = Context.drawn(ops, uncoded=uncoded, **shape)
    whole = context.attend(ops.paged_attention, 0, 150, **how)
    rows = replace(context, cache=context.cache.rows)
    exact = rows.attend(paged_attention_reference, 0, 150, **how)
    # Queries and weights are rounded to int8, or to bfloat16.
    assert (whole - exact).norm() < (0.02 if shape["turns"] else 0.005) * exact.norm()
    for first, last in ((0, 1), (0, 7), (7, 100), (100, 101), (128, 150), (149, 150)):
        assert torch.equal(
            context.attend(ops.paged_attention, first, last, **how), whole[first:last]
        )
