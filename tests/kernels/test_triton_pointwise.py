"""Norms, gate, rotation and the KV write under Triton's interpreter against their references."""

from collections import defaultdict
from dataclasses import replace
from typing import Any

import pytest
import torch
from guards import GuardedMemory, needs_interpreter
from in_turns import in_turns
from paged_batch import drawn_coding

from localllm.model.paged_kv_cache import empty_cache
from localllm_kernels.attention.four_bits import FOUR_BITS
from localllm_kernels.attention.kv_cache import KVCache
from localllm_kernels.attention.rotate_and_store import rotate_and_store_reference
from localllm_kernels.attention.rotate_and_store_launch import rotate_and_store
from localllm_kernels.pointwise.gate import GATE_KINDS, GateKind, gate_reference
from localllm_kernels.pointwise.gate_launch import gate
from localllm_kernels.pointwise.rms_norm import add_rms_norm_reference, rms_norm_reference
from localllm_kernels.pointwise.rms_norm_launch import add_rms_norm, rms_norm
from localllm_kernels.primitives.e4m3 import from_e4m3, to_e4m3

pytestmark = needs_interpreter

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
# Sums are in another order; and the interpreter cuts a float32 down to bfloat16 where it should
# round, once for each value that is handed on.
CLOSE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 4e-2}
# What is handed on at once: a unit in the last place in bfloat16, else nothing.
CUT = defaultdict(float, {torch.bfloat16: 2.0**-7})


def assert_close(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert found.dtype == expected.dtype
    tolerance = CLOSE[found.dtype]
    torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1), (3, 17), (2, 4, 80), (5, 1024)])
def test_rms_norm(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x, weight = 3 * torch.randn(shape).to(dtype), torch.randn(shape[-1]).to(dtype)
    with GuardedMemory() as memory:
        found = rms_norm(memory.guarded(x), memory.guarded(weight), 1e-5)
    memory.check()
    assert_close(found, rms_norm_reference(x, weight, 1e-5))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 8), (3, 17), (5, 1000)])
def test_add_rms_norm(shape: tuple[int, int], dtype: torch.dtype) -> None:
    x, residual = torch.randn(2, *shape).to(dtype)
    weight = torch.randn(shape[-1]).to(dtype)
    before = residual.clone()
    with GuardedMemory() as memory:
        given = [memory.guarded(each) for each in (x, residual, weight)]
        found, total = add_rms_norm(*given, 1e-5)
    memory.check()
    expected, expected_total = add_rms_norm_reference(x, residual, weight, 1e-5)
    assert torch.equal(given[1], before)
    assert_close(found, expected)
    torch.testing.assert_close(total, expected_total, atol=0, rtol=CUT[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 2), (7, 2 * 33), (2, 2 * 1500)])
@pytest.mark.parametrize("kind", GATE_KINDS)
def test_gates(shape: tuple[int, int], dtype: torch.dtype, kind: GateKind) -> None:
    gate_up = (4 * torch.randn(shape)).to(dtype)
    with GuardedMemory() as memory:
        found = gate(memory.guarded(gate_up), kind)
    memory.check()
    assert_close(found, gate_reference(gate_up, kind))


def run_rotation(
    operator: Any, qkv: torch.Tensor, kv_dtype: torch.dtype, has_norms: bool, memory: GuardedMemory
) -> tuple[torch.Tensor, KVCache]:
    """Five tokens, the third and the last of them padding, into slots of three blocks."""
    generator = torch.Generator().manual_seed(1)
    head_dim, dtype = qkv.shape[2], qkv.dtype
    angles = 7 * torch.rand(5, head_dim // 2, generator=generator)
    norms = [memory.guarded(torch.randn(head_dim, generator=generator).to(dtype)) for _ in range(2)]
    shape = (1, 3, 2, 4, head_dim)
    empty = empty_cache(shape, kv_dtype, torch.device("cpu")).layer(0)
    parts = (empty.key, empty.value, empty.key_scales, empty.value_scales)
    cache = KVCache(*(None if part is None else memory.guarded(part) for part in parts))
    if kv_dtype == torch.int8:
        means = 3 * torch.randn(2, head_dim, generator=generator)
        cache = replace(cache, key_means=memory.guarded(means))
    query = operator(
        memory.guarded(qkv),
        memory.guarded(angles.cos()),
        memory.guarded(angles.sin()),
        cache,
        memory.guarded(torch.tensor([5, 11, -1, 7])),
        query_norm=norms[0] if has_norms else None,
        key_norm=norms[1] if has_norms else None,
        eps=1e-6,
    )
    return query, cache


@pytest.mark.parametrize(
    ("kv_dtype", "dtype", "head_dim", "has_norms"),
    in_turns(
        [None, torch.int8, torch.bfloat16, torch.float8_e4m3fn], DTYPES, [2, 24, 64], [True, False]
    ),
)
def test_rotation_and_the_kv_write(
    head_dim: int, has_norms: bool, dtype: torch.dtype, kv_dtype: torch.dtype | None
) -> None:
    qkv = torch.randn(5, 6 + 2 * 2, head_dim).to(dtype)
    qkv[1, -1] = 0  # a value without a scale
    kv_dtype = kv_dtype or dtype
    with GuardedMemory() as memory:
        found, cache = run_rotation(rotate_and_store, qkv, kv_dtype, has_norms, memory)
    memory.check()
    expected, expected_cache = run_rotation(
        rotate_and_store_reference, qkv, kv_dtype, has_norms, GuardedMemory()
    )
    assert_close(found, expected)
    values, expected_values = cache.value.float(), expected_cache.value.float()
    torch.testing.assert_close(values, expected_values, atol=0, rtol=CUT[kv_dtype])
    if cache.value_scales is None or expected_cache.key_scales is None:
        keys, expected_keys = cache.key.float(), expected_cache.key.float()
        tolerance = max(CLOSE[dtype], CLOSE[kv_dtype])
    else:
        assert cache.key_scales is not None
        scales = expected_cache.key_scales
        torch.testing.assert_close(
            cache.value_scales, expected_cache.value_scales, rtol=1e-6, atol=0
        )
        torch.testing.assert_close(cache.key_scales, scales, rtol=2 * CLOSE[dtype], atol=0)
        keys = cache.key.float() * cache.key_scales.unsqueeze(-1)
        expected_keys = expected_cache.key.float() * scales.unsqueeze(-1)
        # One code may be rounded the other way: a step of the row in int8, an eighth in fp8.
        step = 1 / 127 if kv_dtype == torch.int8 else 0.0
        tolerance = 0.13 if kv_dtype == torch.float8_e4m3fn else 4 * CLOSE[dtype]
        slack = step * float(expected_keys.abs().max()) + CLOSE[dtype]
        assert ((keys - expected_keys).abs() <= slack + tolerance * expected_keys.abs()).all()
        return
    torch.testing.assert_close(keys, expected_keys, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("kv_dtype", [torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_what_is_not_finite_has_no_scale(kv_dtype: torch.dtype, bad: float) -> None:
    qkv = torch.ones(5, 10, 16)
    qkv[0, 9, 3] = bad
    _, cache = run_rotation(rotate_and_store, qkv, kv_dtype, False, GuardedMemory())
    assert cache.value_scales is not None
    assert not cache.value_scales[1, 1, 1].isfinite()
    assert cache.value_scales[1, 0].isfinite().all()


@pytest.mark.parametrize("head_dim", [2, 24, 64, 96])
@pytest.mark.parametrize("has_own_values", [True, False])
def test_keys_and_values_in_4_bits(head_dim: int, has_own_values: bool) -> None:
    """Two numbers that are almost half way between codes may be rounded otherwise."""
    heads, kv_heads, rows = 3, 2, 40
    coding = drawn_coding(kv_heads, head_dim, values_are_keys=not has_own_values)
    stored = kv_heads * (2 if has_own_values else 1)
    qkv = 2 * torch.randn(rows, heads + stored, head_dim)
    # Near each of the means, and what is not finite.
    qkv[:, heads : heads + kv_heads] += coding.means[:, torch.arange(rows) % 4].transpose(0, 1)
    qkv[7, -1, 1], qkv[8, heads, 0] = torch.inf, torch.nan
    angles = torch.zeros(rows, head_dim // 2)
    slots = torch.randperm(64)[:rows] + 16
    uncoded_slots = torch.randperm(64)[:rows] + 16
    slots[3] = uncoded_slots[3] = -1

    def run(operator: Any, memory: GuardedMemory) -> KVCache:
        shape = 5, kv_heads, 16, head_dim
        cache = empty_cache(
            shape,
            FOUR_BITS,
            torch.device("cpu"),
            values_are_keys=not has_own_values,
            coding=replace(coding, feedback=memory.guarded(coding.feedback)),
        )
        key, value = memory.guarded(cache.key), memory.guarded(cache.value)
        plain = empty_cache(
            shape, torch.float32, torch.device("cpu"), values_are_keys=not has_own_values
        )
        uncoded_key, uncoded_value = memory.guarded(plain.key), memory.guarded(plain.value)
        uncoded = KVCache(uncoded_key, uncoded_value if has_own_values else uncoded_key)
        cache = replace(cache, key=key, value=value if has_own_values else key, uncoded=uncoded)
        arguments = angles.cos(), angles.sin(), cache, slots
        how = {"has_values": has_own_values, "uncoded_slots": uncoded_slots}
        operator(memory.guarded(qkv), *arguments, **how)
        return cache

    with GuardedMemory() as memory:
        found = run(rotate_and_store, memory)
    memory.check()
    expected = run(rotate_and_store_reference, GuardedMemory())
    assert found.uncoded is not None
    assert expected.uncoded is not None
    for part in ("key", "value"):
        rows, right = (getattr(each, part) for each in (found.uncoded, expected.uncoded))
        is_finite = right.isfinite().all(-1)
        torch.testing.assert_close(rows[is_finite], right[is_finite])
        assert not rows[~is_finite].isfinite().all(-1).any()
    parts = ["key"] + ["value"] * has_own_values
    for part in parts:
        scales, right = (getattr(each, f"{part}_scales") for each in (found, expected))
        assert torch.equal(scales.isfinite(), right.isfinite())
        assert (~right.isfinite()).sum() > 0
        is_same = scales.view(torch.int16) == right.view(torch.int16)
        assert is_same[right.isfinite()].float().mean() > 0.97
        codes = getattr(found, part) == getattr(expected, part)
        assert codes[is_same & right.isfinite()].float().mean() > 0.97
    if has_own_values:
        places = found.key_scales.view(torch.int16) % 4  # type: ignore[union-attr]
        assert len(places.unique()) == 4


def test_e4m3_codes_are_those_of_torch() -> None:
    """Every code, and numbers between and beside them; see the kernels that call these."""
    import triton
    import triton.language as tl

    @triton.jit
    def convert(values_ptr, codes_ptr, back_ptr, count, BLOCK: tl.constexpr):  # noqa: N803
        at = tl.arange(0, BLOCK)
        codes = to_e4m3(tl.load(values_ptr + at, mask=at < count, other=0.0))
        tl.store(codes_ptr + at, codes, mask=at < count)
        tl.store(back_ptr + at, from_e4m3(codes), mask=at < count)

    every = torch.arange(256, dtype=torch.int16).to(torch.uint8).view(torch.float8_e4m3fn).float()
    every = every[every.isfinite()]
    between = (every[:, None] + torch.tensor([0.0, 1e-3, -1e-3, 0.03]) * every[:, None]).flatten()
    halves = (every.sort().values[1:] + every.sort().values[:-1]) / 2
    values = torch.cat((between.clamp(-448, 448), halves, torch.tensor([1e-9, -3e-4, 0.0])))
    codes = torch.empty(len(values), dtype=torch.uint8)
    back = torch.empty_like(values)
    convert[(1,)](values, codes, back, len(values), BLOCK=2048)
    expected = values.to(torch.float8_e4m3fn)
    assert torch.equal(back, expected.float())
    assert torch.equal(codes, expected.view(torch.uint8))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kv_dtype", [None, torch.int8])
@pytest.mark.parametrize("has_values", [True, False])
def test_values_that_are_normed_and_those_that_are_keys(
    has_values: bool, kv_dtype: torch.dtype | None, dtype: torch.dtype
) -> None:
    qkv = torch.randn(5, 6 + (4 if has_values else 2), 24).to(dtype)
    weights = torch.rand(2, 24) + 0.5  # in float32, as Gemma's

    def run(operator: Any, memory: GuardedMemory) -> tuple[torch.Tensor, torch.Tensor]:
        cache = empty_cache((1, 3, 2, 4, 24), kv_dtype or dtype, torch.device("cpu")).layer(0)
        angles = torch.linspace(0, 7, 60).view(5, 12)
        query = operator(
            memory.guarded(qkv),
            angles.cos(),
            angles.sin(),
            cache,
            torch.tensor([5, 11, -1, 7]),
            query_norm=memory.guarded(weights[0]),
            key_norm=memory.guarded(weights[1]),
            eps=1e-6,
            has_values=has_values,
            norms_values=True,
        )
        scales = 1 if cache.value_scales is None else cache.value_scales.unsqueeze(-1)
        return query, cache.value.float() * scales

    with GuardedMemory() as memory:
        found, values = run(rotate_and_store, memory)
    memory.check()
    expected, expected_values = run(rotate_and_store_reference, GuardedMemory())
    assert_close(found, expected)
    torch.testing.assert_close(
        values, expected_values, atol=0.03 if kv_dtype else CLOSE[dtype], rtol=CLOSE[dtype]
    )
    # Token 0 is in slot 5, its first value head behind six queries and, where there are any, keys.
    plain = qkv[0, 8 if has_values else 6].float()
    normed = plain * (plain.square().mean() + 1e-6).rsqrt()
    torch.testing.assert_close(values[1, 0, 1], normed, atol=0.03, rtol=0.02)


def test_queries_without_a_cache() -> None:
    qkv, angles = torch.randn(5, 6, 24), torch.linspace(0, 7, 60).view(5, 12)
    arguments = (qkv, angles.cos(), angles.sin(), None, torch.tensor([5, 11, -1, 7]))
    norms: dict[str, Any] = {"query_norm": torch.rand(24), "key_norm": None, "eps": 1e-6}
    found = rotate_and_store(*arguments, **norms)
    assert_close(found, rotate_and_store_reference(*arguments, **norms))
