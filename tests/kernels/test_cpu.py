"""The C library against the torch references, and the bits of a row in any company."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from blocks import random_blocks, random_e4m3
from c_products import linears_with
from paged_batch import MIXED, Batch
from torch import Tensor

from localllm.model.packed.int4 import Int4Weight
from localllm.model.packed.int8 import Int8Weight
from localllm.model.packed.mxfp4 import Mxfp4Weight
from localllm.model.packed.nvfp4 import Nvfp4Weight
from localllm.model.packed.table import PACKED_TYPES
from localllm.model.packed.trellis import TrellisWeight
from localllm.model.packed.trellis_schemes import Trellis
from localllm.model.packed.weight import PackedWeight
from localllm.model.paged_kv_cache import empty_cache
from localllm.quantize.rounding import round_fp8
from localllm.user.places import cache_folder
from localllm_kernels import cpu_ops
from localllm_kernels.attention.kv_cache import CODE_LIMITS, is_turnable
from localllm_kernels.attention.paged_attention import paged_attention_reference
from localllm_kernels.attention.rotate_and_store import rotate_and_store_reference
from localllm_kernels.cpu import build
from localllm_kernels.cpu.build import BuildError, load_library
from localllm_kernels.cpu.linear import CpuLinears, num_lanes
from localllm_kernels.cpu.ops import CpuOps
from localllm_kernels.cpu.product import CProduct
from localllm_kernels.cpu.team import Team
from localllm_kernels.cpu.traits import C_BLOCKS
from localllm_kernels.linears import CodedWeight
from localllm_kernels.pointwise.gate import GATE_KINDS, gate_reference
from localllm_kernels.pointwise.rms_norm import add_rms_norm_reference, rms_norm_reference
from localllm_kernels.sampling.gumbel_argmax import gumbel_argmax_reference, gumbel_noise
from localllm_kernels.sampling.row_maxima import row_maxima_reference
from localllm_kernels.trellis import rotated, signs

CPU = torch.device("cpu")
KV_DTYPES = [torch.float32, torch.bfloat16, torch.int8, torch.float8_e4m3fn]
# Kinds of caches: their type, and whether they are turned.
CACHES = [(dtype, is_turned) for dtype in KV_DTYPES for is_turned in (False, True)]

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler")


@pytest.fixture
def ops() -> CpuOps:
    return CpuOps(load_library(cache_folder("kernels")), Team())


@pytest.fixture
def linears() -> CpuLinears:
    return CpuLinears(load_library(cache_folder("kernels")), Team())


def assert_rows_alone(product: Callable[[Tensor], Tensor], x: Tensor) -> None:
    together = product(x)
    for row in range(0, len(x), 5):
        assert torch.equal(product(x[row : row + 1])[0], together[row])


@pytest.mark.parametrize("width", [17, 48, 80, 1000])
def test_norms(ops: CpuOps, width: int) -> None:
    x, residual, weight = torch.randn(7, width), torch.randn(7, width), torch.randn(width)
    expected = rms_norm_reference(x, weight, 1e-6)
    torch.testing.assert_close(ops.rms_norm(x, weight, 1e-6), expected, atol=1e-5, rtol=1e-5)
    found, total = ops.add_rms_norm(x, residual, weight, 1e-6)
    expected, expected_total = add_rms_norm_reference(x, residual, weight, 1e-6)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    assert torch.equal(total, expected_total)
    assert_rows_alone(lambda rows: ops.rms_norm(rows, weight, 1e-6), x)


@pytest.mark.parametrize("count", [1, 15, 700, 40_000])
@pytest.mark.parametrize("has_ids", [True, False])
def test_the_noise_of_a_draw(ops: CpuOps, count: int, has_ids: bool) -> None:
    ids = torch.randperm(150_000)[:count] if has_ids else None
    for key in (0, 0x0123456789ABCDEF, 0xFFFFFFFFFFFFFFFF):
        # Values that the noise makes all equal, but for one that is a little ahead: any error
        # above that in any token's noise shows.
        values = -gumbel_noise(key, torch.arange(count) if ids is None else ids)
        ahead = int(torch.randint(count, ()))
        values[ahead] += 2e-5
        assert ops.gumbel_argmax(values, 1.0, ids, key) == ahead
        values *= 0.7
        assert ops.gumbel_argmax(values, 0.7, ids, key) == ahead


@pytest.mark.parametrize(("rows", "width"), [(1, 5), (3, 1000), (1, 70_001), (17, 40_000)])
def test_the_maxima_of_rows(ops: CpuOps, rows: int, width: int) -> None:
    values = torch.randint(-1000, 1000, (rows, width)).float()  # with many equal ones
    maxima, indices = ops.row_maxima(values)
    expected, _ = row_maxima_reference(values)
    assert torch.equal(maxima, expected)
    first = [(row == most).nonzero()[0].item() for row, most in zip(values, maxima, strict=True)]
    assert indices.tolist() == first
    values[-1, width // 2] = torch.nan
    assert ops.row_maxima(values)[0].isnan().tolist() == [False] * (rows - 1) + [True]
    values[-1, width // 2] = torch.inf
    assert ops.row_maxima(values)[0][-1] == torch.inf
    values[-1] = -torch.inf
    assert ops.row_maxima(values)[0][-1] == -torch.inf


def test_a_draw_falls_on_the_same_token_on_any_number_of_threads(ops: CpuOps) -> None:
    values = 3 * torch.randn(100_003)
    expected = [gumbel_argmax_reference(values, 0.9, None, key) for key in range(20)]
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            assert [ops.gumbel_argmax(values, 0.9, None, key) for key in range(20)] == expected
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("width", [5, 48, 100])
def test_the_gate(ops: CpuOps, width: int) -> None:
    gate_up = torch.cat((torch.linspace(-100, 100, 3 * width), torch.randn(3 * width)))
    gate_up = torch.cat(gate_up.view(2, 3, width).unbind(), dim=1)
    gelu = torch.nn.functional.gelu(gate_up[:, :width], approximate="tanh") * gate_up[:, width:]
    torch.testing.assert_close(gate_reference(gate_up, "gelu"), gelu, atol=1e-5, rtol=1e-5)
    for kind in GATE_KINDS:
        gate = partial(ops.gate, kind=kind)
        found = gate(gate_up)
        torch.testing.assert_close(found, gate_reference(gate_up, kind), atol=1e-6, rtol=1e-6)
        assert_rows_alone(gate, gate_up)
        broken = gate_up.clone()
        broken[1, 0] = torch.nan
        assert gate(broken).isnan().nonzero().tolist() == [[1, 0]]


@pytest.mark.parametrize(("dtype", "is_turned"), CACHES)
@pytest.mark.parametrize("has_norms", [True, False])
@pytest.mark.parametrize("head_dim", [16, 24, 64, 640])
def test_rotary_and_the_kv_write(
    ops: CpuOps, dtype: torch.dtype, is_turned: bool, has_norms: bool, head_dim: int
) -> None:
    qkv = torch.randn(5, 6 + 2 * 2, head_dim)
    qkv[1, -1] = 0  # a value without a scale
    angles = torch.rand(5, head_dim // 2) * 7
    norms = torch.randn(2, head_dim).unbind() if has_norms else (None, None)
    slots = torch.tensor([17, 43, -1, 30])  # the third row and the fifth are padding
    shape = (1, 3, 2, 16, head_dim)
    means = 3 * torch.randn(1, 2, head_dim) if dtype in CODE_LIMITS and not has_norms else None
    found, expected = [], []
    for run, results in ((ops.rotate_and_store, found), (rotate_and_store_reference, expected)):
        is_own = run == ops.rotate_and_store
        turns = is_turned and is_own
        cache = empty_cache(shape, dtype, CPU, turns_keys=turns, key_means=means).layer(0)
        query = run(
            qkv,
            angles.cos(),
            angles.sin(),
            cache,
            slots,
            query_norm=norms[0],
            key_norm=norms[1],
            eps=1e-6,
        )
        results += [query, cache.rows.key.float(), cache.rows.value.float()]
        if cache.key_scales is not None and cache.value_scales is not None:
            results += [cache.key_scales, cache.value_scales]
    torch.testing.assert_close(found[0], expected[0], atol=1e-5, rtol=1e-5)
    # A key that was rounded the other way is one unit of its type off; values are not computed.
    step = {torch.float32: 1e-5, torch.bfloat16: 2**-7, torch.int8: 1, torch.float8_e4m3fn: 2**-3}
    absolute = step[dtype] if dtype != torch.float8_e4m3fn else 2**-9
    relative = 0.0 if dtype == torch.int8 else step[dtype]
    torch.testing.assert_close(found[1], expected[1], atol=absolute, rtol=relative)
    assert torch.equal(found[2], expected[2])
    if len(found) == 5:
        torch.testing.assert_close(found[3], expected[3], atol=0, rtol=1e-5)
        torch.testing.assert_close(found[4], expected[4], atol=0, rtol=1e-6)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_what_is_not_finite_stays_so_in_8_bits(ops: CpuOps, dtype: torch.dtype) -> None:
    for bad in (torch.nan, torch.inf, -torch.inf):
        qkv = torch.ones(1, 3, 16)
        qkv[0, 2, 5] = bad
        angle = torch.zeros(1, 8)
        shape = (1, 2, 1, 4, 16)
        for run in (ops.rotate_and_store, rotate_and_store_reference):
            cache = empty_cache(shape, dtype, torch.device("cpu")).layer(0)
            run(
                qkv,
                angle.cos(),
                angle.sin(),
                cache,
                torch.tensor([4]),
                query_norm=None,
                key_norm=None,
                eps=0.0,
            )
            assert cache.key_scales is not None
            assert cache.value_scales is not None
            assert cache.key_scales[1, 0, 0] == 1 / CODE_LIMITS[dtype]
            assert not cache.value_scales[1, 0, 0].isfinite()


@pytest.mark.parametrize("window", [None, 1, 20, 128, 1000])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (6, 2), (5, 1)])
@pytest.mark.parametrize("head_dim", [24, 64])
def test_attention(
    ops: CpuOps, heads: int, kv_heads: int, head_dim: int, window: int | None
) -> None:
    batch = Batch(MIXED, heads, kv_heads, head_dim)
    expected = batch.expected(batch.scale, window).float()
    found = batch.attend(window, ops.paged_attention)
    torch.testing.assert_close(found, expected, atol=2e-6, rtol=1e-5)
    starts = batch.cu_seqlens_q.tolist()
    for i in range(len(MIXED)):
        alone = batch.attend_part(slice(i, i + 1), window, ops.paged_attention)
        assert torch.equal(alone, found[starts[i] : starts[i + 1]])


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
@pytest.mark.parametrize(
    ("heads", "head_dim", "value_dim"),
    [(5, 40, 24), (20, 576, 512), (140, 40, 32), (3, 600, 512)],
    ids=["small", "GLM-4.7 Flash", "more heads than a task has rows", "wider than the library's"],
)
def test_values_that_are_the_first_numbers_of_keys(
    heads: int, head_dim: int, value_dim: int, kv_dtype: torch.dtype
) -> None:
    attend = cpu_ops(cache_folder("kernels")).paged_attention
    lengths = [(1, 1), (70, 40), (130, 1)]
    # As models scale them: scores of wide heads would otherwise be so large that a float32 sum in
    # any order is off by more than the tolerance.
    scale = head_dim**-0.5
    batch = Batch(lengths, heads, 1, head_dim, kv_dtype, value_dim, scale)
    found = batch.attend(None, attend)
    starts = batch.cu_seqlens_q.tolist()
    for i in range(len(lengths)):
        alone = batch.attend_part(slice(i, i + 1), None, attend)
        assert torch.equal(alone, found[starts[i] : starts[i + 1]])
    if head_dim > 576:  # torch's reference, which rounds nothing
        expected, off = batch.expected(scale, None).float(), 4e-6
    else:
        expected, off = expected_of(batch, scale)
    torch.testing.assert_close(found, expected, atol=off, rtol=1e-5)


@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("head_dim", [24, 64])
@pytest.mark.parametrize(("cap", "has_sinks"), [(1.5, False), (None, True), (1.5, True)])
def test_capped_scores_and_sinks(
    ops: CpuOps, cap: float | None, has_sinks: bool, head_dim: int, window: int | None
) -> None:
    batch = Batch(MIXED, 6, 2, head_dim)
    sinks = torch.linspace(-2, 3, 6) if has_sinks else None
    reference = partial(paged_attention_reference, cap=cap, sinks=sinks)
    own = partial(ops.paged_attention, cap=cap, sinks=sinks)
    expected = batch.expected(0.3, window, cap, sinks).float()
    plain = batch.expected(0.3, window).float()
    assert (expected - plain).abs().max() > 0.05
    starts = batch.cu_seqlens_q.tolist()
    for attention in (reference, own):
        found = batch.attend(window, attention)
        torch.testing.assert_close(found, expected, atol=5e-6, rtol=1e-5)
        for i in range(len(MIXED)):
            alone = batch.attend_part(slice(i, i + 1), window, attention)
            assert torch.equal(alone, found[starts[i] : starts[i + 1]])


@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("num_hidden", [1, 70])
@pytest.mark.parametrize("head_dim", [24, 64])
def test_hidden_keys(ops: CpuOps, head_dim: int, num_hidden: int, window: int | None) -> None:
    """Some requests of the batch have no other keys."""
    batch = Batch(MIXED, 6, 2, head_dim)
    expected = batch.expected(0.3, window, num_hidden=num_hidden).float()
    assert not expected[0].any()
    assert (expected - batch.expected(0.3, window).float()).abs().max() > 0.05
    starts = batch.cu_seqlens_q.tolist()
    for attention in (paged_attention_reference, ops.paged_attention):
        hiding = partial(attention, num_hidden=num_hidden)
        found = batch.attend(window, hiding)
        torch.testing.assert_close(found, expected, atol=5e-6, rtol=1e-5)
        for i in range(len(MIXED)):
            alone = batch.attend_part(slice(i, i + 1), window, hiding)
            assert torch.equal(alone, found[starts[i] : starts[i + 1]])


def expected_of(batch: Batch, scale: float) -> tuple[Tensor, float]:
    """The right result, and how far off the library's may be.

    Except over float32 it rounds queries and weights to bfloat16. The queries are rounded here too,
    before the right result is found.
    """
    if batch.kv_dtype == torch.float32:
        return batch.expected(scale, None).float(), 4e-6
    batch.query = (batch.query * torch.tensor(scale)).bfloat16().double() / scale
    # Each weight is off by at most half a unit of eight bits, and values are up to five.
    return batch.expected(scale, None).float(), 5 * 2**-9


@pytest.mark.parametrize(("kv_dtype", "is_turned"), CACHES)
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256, 512])
def test_attention_over_all_kinds_of_caches(
    ops: CpuOps, head_dim: int, kv_dtype: torch.dtype, is_turned: bool
) -> None:
    scale = head_dim**-0.5
    batch = Batch([(70, 70), (65, 1), (7, 3)], 6, 2, head_dim, kv_dtype, scale=scale)
    batch.is_turned = is_turned
    found = batch.attend(None, ops.paged_attention)
    expected, off = expected_of(batch, scale)
    torch.testing.assert_close(found, expected, atol=off, rtol=1e-5)


@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize(("kv_dtype", "is_turned"), CACHES)
@pytest.mark.parametrize("head_dim", [24, 64, 128, 256, 512])
@pytest.mark.parametrize("heads", [2, 6, 14])
def test_a_query_has_the_same_bits_in_any_chunk(
    ops: CpuOps,
    heads: int,
    head_dim: int,
    kv_dtype: torch.dtype,
    is_turned: bool,
    window: int | None,
) -> None:
    """One, two and seven heads share a key/value head; a turned cache gives the same bits."""
    length = 300
    whole = Batch([(length, length)], heads, 2, head_dim, kv_dtype)
    expected = whole.attend(window, ops.paged_attention)
    whole.is_turned = is_turned and is_turnable(16, head_dim, kv_dtype)
    for start, end in [(0, 1), (0, 7), (7, 100), (100, 101), (128, 256), (298, 300), (299, 300)]:
        part = whole.attend_chunk(start, end, window, ops.paged_attention)
        assert torch.equal(part, expected[start:end])


@pytest.mark.parametrize("window", [None, 100, 1500])
@pytest.mark.parametrize(("kv_dtype", "is_turned"), CACHES)
@pytest.mark.parametrize("has_sinks", [False, True])
def test_threads_that_share_the_keys_of_a_few_rows_give_the_same_bits(
    ops: CpuOps, has_sinks: bool, kv_dtype: torch.dtype, is_turned: bool, window: int | None
) -> None:
    """Stretches of 1,024 keys, one after another in a long chunk, by themselves in a short one."""
    length = 2200
    whole = Batch([(length, length)], 6, 2, 32, kv_dtype)
    whole.is_turned = is_turned
    attention = partial(ops.paged_attention, sinks=torch.linspace(-2, 3, 6) if has_sinks else None)
    expected = whole.attend(window, attention)
    for start, end in [(1022, 1025), (1024, 1025), (2046, 2050), (2100, 2104), (2199, 2200)]:
        part = whole.attend_chunk(start, end, window, attention)
        assert torch.equal(part, expected[start:end])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("width_out", "width_in"), [(1, 16), (7, 50), (64, 128), (33, 200), (5, 3000)]
)
def test_plain_products(
    linears: CpuLinears, dtype: torch.dtype, width_out: int, width_in: int
) -> None:
    weight, bias = torch.randn(width_out, width_in).to(dtype), torch.randn(width_out)
    product = linears.plain(weight, bias)
    for num_rows in (1, 2, 3, 4, 31):
        x = torch.randn(num_rows, width_in)
        # Inputs are rounded to the weight's type.
        expected = F.linear(x.to(dtype).double(), weight.double(), bias.double()).float()
        torch.testing.assert_close(product(x), expected, atol=1e-4, rtol=1e-5)
    assert_rows_alone(product, x)


@pytest.mark.parametrize(("width_out", "width_in"), [(1, 16), (7, 50), (33, 203)])
def test_a_weight_that_bfloat16_holds_is_kept_in_it_and_its_products_are_the_same(
    linears: CpuLinears, width_out: int, width_in: int
) -> None:
    weight, bias = torch.randn(width_out + 1, width_in).bfloat16().float(), torch.randn(width_out)
    x = torch.randn(6, width_in)
    short = linears.plain(weight[:-1], bias)
    weight[-1, 0] = 1 + 2**-20  # which bfloat16 does not hold
    whole = linears.plain(weight, torch.cat((bias, bias[:1])))
    assert short.kept[0].dtype == torch.bfloat16
    assert whole.kept[0].dtype == torch.float32
    assert torch.equal(short(x), whole(x)[:, :-1])


def rounded_rows(x: Tensor, group_size: int) -> Tensor:
    """What the integer products make of their inputs."""
    groups = x.view(len(x), -1, group_size)
    scales = groups.abs().amax(-1, keepdim=True) / 127
    return (torch.round(groups * (1 / scales)) * scales).view_as(x)


@pytest.mark.parametrize("scales_dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["symmetric", "asymmetric", "permuted"])
@pytest.mark.parametrize("group_size", [32, 64, 128, 256])
@pytest.mark.parametrize("width_out", [16, 44, 200])
def test_int4(
    linears: CpuLinears, width_out: int, group_size: int, kind: str, scales_dtype: torch.dtype
) -> None:
    width_in = 256
    codes = torch.randint(16, (width_out, width_in), dtype=torch.uint8)
    scales = (torch.rand(width_out, width_in // group_size) + 0.1).to(scales_dtype)
    zeros = None
    if kind != "symmetric":
        zeros = torch.randint(16, scales.shape, dtype=torch.uint8)
    permutation = torch.randperm(width_in) if kind == "permuted" else None
    bias = torch.randn(width_out)
    product = linears.packed(
        CodedWeight("int4", codes, scales, zeros, permutation), bias, torch.bfloat16
    )
    centred = codes.view(*scales.shape, -1) - (8.0 if zeros is None else zeros[..., None].float())
    weight = (centred * scales.float()[..., None]).flatten(1)
    for num_rows in (1, 2, 3, 4, 5, 6, 7, 8, 30):
        x = torch.randn(num_rows, width_in)
        inputs = x if permutation is None else x[:, permutation]
        expected = F.linear(rounded_rows(inputs, group_size), weight, bias)
        # An input in the middle between two codes may have gone the other way.
        assert (product(x) - expected).norm() / expected.norm() < 1e-3
    assert_rows_alone(product, x)


@pytest.mark.parametrize(("width_out", "width_in"), [(3, 64), (40, 256), (65, 192), (20, 80)])
def test_int8(linears: CpuLinears, width_out: int, width_in: int) -> None:
    codes = torch.randint(-128, 128, (width_out, width_in), dtype=torch.int8)
    scales, bias = torch.rand(width_out), torch.randn(width_out)
    weight = CodedWeight("int8", codes, scales[:, None])
    product = linears.packed(weight, bias, torch.bfloat16)
    x = torch.randn(11, width_in)
    rounded = rounded_rows(x, next(size for size in (128, 64, 16) if width_in % size == 0))
    expected = F.linear(rounded, codes.float() * scales[:, None], bias)
    assert (product(x) - expected).norm() / expected.norm() < 1e-3
    assert_rows_alone(product, x)
    in_place = linears.packed(replace(weight, is_in_place=True), bias, torch.bfloat16)
    for rows in (x, x[:1], x[:8]):
        assert torch.equal(in_place(rows), product(rows))
    lie_there = in_place.kept[0].data_ptr() == codes.data_ptr()
    assert lie_there == (width_in % (4 * num_lanes(linears.library)) == 0)


@pytest.mark.parametrize(("width_out", "width_in"), [(3, 64), (40, 256), (65, 176)])
def test_nvfp4(linears: CpuLinears, width_out: int, width_in: int) -> None:
    codes = torch.randint(256, (width_out, width_in // 2), dtype=torch.uint8)
    scales, divisors = random_e4m3(width_out, width_in // 16), 100 + 900 * torch.rand(width_out)
    weight, bias = Nvfp4Weight(codes, scales, divisors), torch.randn(width_out)
    product = linears.packed(weight.coded(), bias, torch.bfloat16)
    x = torch.randn(11, width_in)
    expected = F.linear(rounded_rows(x, 16), weight.dequantize(torch.float32), bias)
    assert (product(x) - expected).norm() / expected.norm() < 1e-3
    assert_rows_alone(product, x)


@pytest.mark.parametrize(("width_out", "width_in"), [(3, 64), (40, 256), (65, 176), (20, 5120)])
def test_trellis3(linears: CpuLinears, width_out: int, width_in: int) -> None:
    weight = PACKED_TYPES["trellis3"].draw((width_out, width_in), torch.Generator())
    assert isinstance(weight, TrellisWeight)
    bias, by, x = torch.randn(width_out), signs(width_in), torch.randn(21, width_in)
    product = linears.packed(weight.coded(), bias, torch.bfloat16)
    group = next(size for size in (128, 64, 32, 16) if width_in % size == 0)
    values = weight.steps() * weight.scales[:, None]
    expected = F.linear(rounded_rows(rotated(x, by), group), values, bias)
    assert (product(x) - expected).norm() / expected.norm() < 1e-3
    whole = F.linear(x, weight.dequantize(torch.float32), bias)
    assert (product(x) - whole).norm() / whole.norm() < 0.01
    assert_rows_alone(product, x)


def test_trellis3_takes_hardly_more_memory_than_its_file(linears: CpuLinears) -> None:
    weight = PACKED_TYPES["trellis3"].draw((1024, 896), torch.Generator())
    product = linears.packed(weight.coded(), None, torch.bfloat16)
    assert isinstance(product, CProduct)
    held = sum(each.nbytes for each in product.kept if each is not None)
    assert held < Trellis().resident_share * sum(
        each.nbytes for each in Trellis().write(weight).values()
    )


@pytest.mark.parametrize(
    ("width_out", "width_in", "block"),
    [
        *((45, 384, (1, 384)), (7, 40, (1, 40)), (130, 391, (1, 391))),
        *((150, 512, (128, 128)), (33, 96, (32, 32)), (260, 300, (128, 128))),
    ],
)
def test_fp8(linears: CpuLinears, width_out: int, width_in: int, block: tuple[int, int]) -> None:
    weight = round_fp8(torch.randn(width_out, width_in), block)
    weight.codes.view(torch.uint8)[0, :15] = torch.arange(15)  # those below the normal numbers
    bias, x = torch.randn(width_out), torch.randn(30, width_in)
    product = linears.packed(weight.coded(), bias, torch.bfloat16)
    exact = x.bfloat16().double() @ weight.dequantize(torch.float64).T + bias
    torch.testing.assert_close(product(x), exact.float(), atol=1e-4, rtol=1e-5)
    assert_rows_alone(product, x)
    for rows in (1, 3, 4, 5, 9):
        assert torch.equal(product(x[:rows]), product(x)[:rows])


def drawn_weight(kind: str, width_out: int, width_in: int) -> PackedWeight:
    codes = torch.randint(256, (width_out, width_in // 2), dtype=torch.uint8)
    scales = (torch.rand(width_out, width_in // 64) + 0.1).bfloat16()
    if kind == "int8":
        return Int8Weight.rounded(torch.randn(width_out, width_in))
    if kind == "mxfp4":
        powers = torch.randint(120, 130, (width_out, width_in // 32), dtype=torch.uint8)
        return Mxfp4Weight(codes, powers)
    if kind == "nvfp4":
        return Nvfp4Weight(codes, random_e4m3(width_out, width_in // 16), torch.ones(width_out))
    zeros = torch.randint(16, scales.shape, dtype=torch.uint8) if "zeros" in kind else None
    return Int4Weight(codes, scales, zeros)


@pytest.mark.parametrize("kind", ["int4", "int4 with zeros", "int8", "mxfp4", "nvfp4"])
def test_inputs_far_above_the_others_of_their_group_cost_these_nothing(
    linears: CpuLinears, kind: str
) -> None:
    weight = drawn_weight(kind, 40, 256)
    product = linears.packed(weight.coded(), None, torch.bfloat16)
    values, x = weight.dequantize(torch.float32).double(), torch.randn(20, 256)
    rest = x.clone()
    rest[:, 3] = 0.0
    rest[2:5, [130, 200]] = 0.0
    x[:, 3] = 100 + 100 * torch.rand(20)
    x[2:5, [130, 200]] = torch.tensor([-500.0, 900.0])
    away = product(x) - x.double() @ values.T
    assert away.norm() < 0.015 * (rest.double() @ values.T).norm()
    # More than are kept apart.
    x[7, 64:72] = 300.0
    assert_rows_alone(product, x)


def test_what_is_not_finite_stays_so(linears: CpuLinears) -> None:
    codes = torch.randint(16, (16, 64), dtype=torch.uint8)
    weights = (
        CodedWeight("int4", codes, torch.ones(16, 2)),
        CodedWeight("int8", codes.to(torch.int8), torch.ones(16, 1)),
    )
    int4, int8 = (linears.packed(each, None, torch.bfloat16) for each in weights)
    plain = linears.plain(torch.randn(16, 64), None)
    bfloat16 = linears.plain(torch.randn(16, 64).bfloat16(), None)
    fp8 = linears.packed(round_fp8(torch.randn(16, 64), (1, 64)).coded(), None, torch.bfloat16)
    for product in (int4, int8, plain, bfloat16, fp8):
        for bad in (torch.nan, torch.inf, -torch.inf):
            x = torch.randn(3, 64)
            x[1, 40] = bad
            finite = product(x).isfinite().all(1)
            assert finite.tolist() == [True, False, True]


# The instruction of AVX-VNNI, for processors that lack it.
PRODUCTS_IN_WORDS = """
#include <immintrin.h>
static inline __m256i in_words(__m256i sums, __m256i bytes, __m256i values) {
  int acc[8];
  unsigned char u[32];
  signed char s[32];
  _mm256_storeu_si256((void *)acc, sums);
  _mm256_storeu_si256((void *)u, bytes);
  _mm256_storeu_si256((void *)s, values);
  for (int i = 0; i < 32; i++) acc[i / 4] += u[i] * s[i];
  return _mm256_loadu_si256((void *)acc);
}
#undef __AVXVNNI__
#define __AVXVNNI__ 1
#define _mm256_dpbusd_avx_epi32 in_words
"""


@pytest.mark.slow
def test_all_instruction_sets_give_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    codes = torch.randint(16, (48, 256), dtype=torch.uint8)
    scales, zeros = torch.rand(48, 4).bfloat16(), torch.randint(16, (48, 4), dtype=torch.uint8)
    int8_codes = torch.randint(-128, 128, (48, 256), dtype=torch.int8)
    nvfp4 = CodedWeight("nvfp4", codes, random_e4m3(48, 16), factors=torch.rand(48))
    trellis3 = CodedWeight("trellis3", codes[:, :96] * 17, torch.rand(48, 1))
    in_blocks = [random_blocks(name, 48, 256) for name in sorted(C_BLOCKS)]
    x = torch.randn(9, 256)
    found = []
    words = tmp_path / "words.h"
    words.write_text(PRODUCTS_IN_WORDS)
    with_words = ("-mno-avx512f", "-include", str(words))
    for i, lacking in enumerate(
        ((), ("-mno-avx512vbmi",), ("-mno-avx512f",), with_words, ("-mno-avx2",))
    ):
        linears = CpuLinears(load_library(cache_folder("kernels")), Team())
        if lacking:
            folder = tmp_path / str(i)
            folder.mkdir()
            try:
                with monkeypatch.context() as changed:
                    linears = linears_with(lacking, folder, changed)
            except BuildError:
                pytest.skip("the compiler has no such option on this processor")
        weights = (
            CodedWeight("int4", codes, scales, zeros),
            CodedWeight("int8", int8_codes, scales[:, :1]),
            CodedWeight("int8", int8_codes, scales[:, :1], is_in_place=True),
            nvfp4,
            trellis3,
        )
        blocks = [each.coded() for each in in_blocks]
        products = [linears.packed(each, None, torch.bfloat16) for each in (*weights, *blocks)]
        found.append(torch.cat([product(rows) for product in products for rows in (x, x[:1])]))
    # With fused products or without; the integers are the same.
    for each in found[1:]:
        torch.testing.assert_close(each, found[0], atol=0, rtol=1e-5)


def test_without_a_compiler_it_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    with pytest.raises(BuildError, match="no C compiler"):
        load_library(tmp_path)


def test_what_does_not_compile_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(build, "_FLAGS", (*build._FLAGS, "-not-an-option"))
    with pytest.raises(BuildError, match="failed"):
        load_library(tmp_path)
    assert not list(tmp_path.rglob("*.so"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8])
@pytest.mark.parametrize("has_values", [True, False])
def test_values_that_are_normed_and_those_that_are_keys(
    ops: CpuOps, has_values: bool, dtype: torch.dtype
) -> None:
    qkv, angles = torch.randn(5, 6 + (4 if has_values else 2), 24), torch.rand(5, 12) * 7
    slots, weights = torch.tensor([5, 11, -1, 7]), torch.rand(2, 24)
    kept, queries = [], []
    for run in (ops.rotate_and_store, rotate_and_store_reference):
        cache = empty_cache((1, 3, 2, 4, 24), dtype, torch.device("cpu")).layer(0)
        queries.append(
            run(
                qkv,
                angles.cos(),
                angles.sin(),
                cache,
                slots,
                query_norm=weights[0],
                key_norm=weights[1],
                eps=1e-6,
                has_values=has_values,
                norms_values=True,
            )
        )
        scales = (cache.key_scales, cache.value_scales)
        codes = zip((cache.key.float(), cache.value.float()), scales, strict=True)
        kept.append([c if s is None else c * s[..., None] for c, s in codes])
    torch.testing.assert_close(queries[0], queries[1], atol=1e-5, rtol=1e-5)
    for found, expected in zip(*kept, strict=True):
        atol = 1e-5 if dtype == torch.float32 else float(expected.abs().max()) / 127
        torch.testing.assert_close(found, expected, atol=atol, rtol=1e-5)
    plain = qkv[0, 8 if has_values else 6]
    normed = plain * (plain.square().mean() + 1e-6).rsqrt()
    torch.testing.assert_close(kept[0][1][1, 0, 1], normed, atol=0.02, rtol=1e-5)


def test_queries_without_a_cache(ops: CpuOps) -> None:
    qkv, angles, norm = torch.randn(5, 6, 24), torch.rand(5, 12) * 7, torch.rand(24)
    found, expected = (
        run(
            qkv,
            angles.cos(),
            angles.sin(),
            None,
            torch.tensor([5, 11, -1, 7]),
            query_norm=norm,
            key_norm=None,
            eps=1e-6,
        )
        for run in (ops.rotate_and_store, rotate_and_store_reference)
    )
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
