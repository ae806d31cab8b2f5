"""The kernels as they are compiled, in half precision, against references in wider types."""

from typing import Any

import pytest
import torch
from guards import GuardedMemory
from int4_case import Case
from paged_batch import MIXED, Batch
from rounding import assert_near, fp8_case, sum_bound

from localllm_kernels import TORCH_OPS
from localllm_kernels.attention.decode import paged_attention_decode
from localllm_kernels.attention.four_bits import FOUR_BITS
from localllm_kernels.attention.kv_cache import KVCache
from localllm_kernels.attention.prefill import paged_attention_prefill
from localllm_kernels.compiling.launch import Workspace
from localllm_kernels.linears import CodedWeight
from localllm_kernels.pointwise.gate import GATE_KINDS
from localllm_kernels.products.fp8_matmul import fp8_matmul, quantize_inputs
from localllm_kernels.products.int4_matmul import int4_matmul
from localllm_kernels.products.int4_weight import NOTHING, Around, PackedInt4
from localllm_kernels.products.int8_matmul import int8_matmul, int8_matmul_reference
from localllm_kernels.products.nvfp4_matmul import nvfp4_matmul_reference, quantize_to_nvfp4
from localllm_kernels.sampling.sample import SamplingRows, sample_reference
from localllm_kernels.sampling.sample_launch import sample
from localllm_kernels.triton_ops import triton_ops

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no NVIDIA GPU here"),
]
DTYPES = [torch.bfloat16, torch.float16]
KV_DTYPES = [None, torch.int8, torch.float8_e4m3fn, FOUR_BITS]
CLOSE = {torch.bfloat16: 2e-2, torch.float16: 3e-3, torch.float32: 1e-5}
# Keys of requests, and how many of them are new; four times eight heads are the most rows that
# decode has in float32.
WINDOWS = [(1, 1), (130, 1), (300, 4), (16, 1), (257, 2), (64, 1), (3001, 3)]


def device() -> torch.device:
    return torch.device("cuda")


@pytest.mark.parametrize("fragments", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_rows", [0, 1, 2, 8, 17, 64, 65, 300])
@pytest.mark.parametrize(
    ("width_in", "width_out", "group", "is_symmetric"),
    [(1024, 3072, 128, True), (4096, 520, 32, False), (160, 33, 16, False), (640, 130, 64, True)],
)
def test_int4(
    width_in: int,
    width_out: int,
    group: int,
    is_symmetric: bool,
    num_rows: int,
    dtype: torch.dtype,
    fragments: bool,
) -> None:
    case = Case(
        width_in,
        width_out,
        group,
        is_symmetric=is_symmetric,
        has_bias=True,
        dtype=dtype,
        device="cuda",
        fragments=fragments,
    )
    case.check(num_rows)


@pytest.mark.parametrize("fragments", [False, True])
@pytest.mark.parametrize("num_rows", [1, 8, 16, 64])
@pytest.mark.parametrize("is_permuted", [True, False])
def test_int4_with_what_is_around(is_permuted: bool, num_rows: int, fragments: bool) -> None:
    case = Case(
        2048,
        1536,
        128,
        is_symmetric=False,
        is_permuted=is_permuted,
        dtype=torch.bfloat16,
        device="cuda",
        fragments=fragments,
    )
    norm = (torch.rand(2048, device="cuda") + 0.5).bfloat16()
    residual = torch.randn(num_rows, 1536, device="cuda").bfloat16()
    case.check(num_rows, Around(norm=norm, eps=1e-5))
    case.check(num_rows, Around(norm=norm, eps=1e-5, is_gated=True))
    case.check(num_rows, Around(residual=residual))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_rows", [1, 33, 64, 700])
@pytest.mark.parametrize(("width_in", "width_out"), [(1024, 3072), (1040, 33), (4096, 512)])
def test_8_bits(width_in: int, width_out: int, num_rows: int, dtype: torch.dtype) -> None:
    x = torch.randn(num_rows, width_in, device="cuda").to(dtype)
    codes = torch.randint(-127, 128, (width_out, width_in), dtype=torch.int8, device="cuda")
    scales = (torch.rand(width_out, device="cuda") / 100 / width_in**0.5).to(dtype)
    workspace = Workspace(device())
    found = int8_matmul(x, codes, scales, None, workspace)
    expected = int8_matmul_reference(x, codes, scales, None)
    assert_near(found, expected, sum_bound(x.double(), scales.double()[:, None] * codes, 0.0))
    wide = torch.randn(width_out, width_in, device="cuda").to(torch.float8_e4m3fn)
    for block in ((1, width_in), (128, 128)):
        shape = (-(-width_out // block[0]), -(-width_in // block[1]))
        block_scales = torch.rand(shape, device="cuda") / width_in**0.5
        found = fp8_matmul(x, wide, block_scales, block, None, workspace)
        is_native = torch.cuda.get_device_capability() >= (8, 9)
        assert_near(found, *fp8_case(x, wide, block_scales, block, is_native=is_native))
    assert not workspace.counters(1).any()


@pytest.mark.parametrize("num_rows", [1, 33, 700])
def test_inputs_in_fewer_bits(num_rows: int) -> None:
    """Where a checkpoint wants them so, and the GPU multiplies such numbers."""
    capability = torch.cuda.get_device_capability()
    x = torch.randn(num_rows, 1024, device="cuda").bfloat16()
    if capability >= (8, 9):
        codes, scales = quantize_inputs(x, torch.tensor(0.01, device="cuda"))
        expected = (x.float() / 0.01).clamp(-448, 448).to(torch.float8_e4m3fn)
        assert ((codes.float() - expected.float()).abs() > 0).float().mean() < 0.001
        assert scales.tolist() == pytest.approx([0.01] * num_rows)
    if capability < (10, 0):
        pytest.skip("this GPU does not multiply NVFP4")
    codes = torch.randint(16, (512, 1024), dtype=torch.uint8, device="cuda")
    weight = CodedWeight(
        "nvfp4",
        codes,
        torch.rand(512, 64, device="cuda").to(torch.float8_e4m3fn),
        factors=torch.rand(512, device="cuda") / 100,
        input_scale=torch.tensor(0.002, device="cuda"),
    )
    product = triton_ops("cuda").linears
    assert product is not None
    found = product.packed(weight, None, torch.bfloat16)(x)  # type: ignore[misc]
    expected = nvfp4_matmul_reference(x, weight, None)
    assert (found - expected).norm() < 0.02 * expected.norm()
    x[0, 20] = torch.nan
    assert quantize_to_nvfp4(x, torch.ones(1, device="cuda"))[1][0, 1].float().isnan()


def attend(batch: Batch, operator: Any, window: int | None, *first: Any, **more: Any) -> Any:
    return operator(
        batch.query,
        batch.cache,
        *first,
        block_tables=batch.block_tables,
        cu_seqlens_q=batch.cu_seqlens_q,
        seq_lens=batch.seq_lens,
        max_query_len=int(batch.cu_seqlens_q.diff().max()),
        scale=batch.query.shape[2] ** -0.5,
        window=window,
        value_dim=batch.value_dim,
        uncoded_tables=batch.uncoded_tables,
        **more,
    )


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float32], ids=str)
@pytest.mark.parametrize("kv_dtype", KV_DTYPES, ids=str)
@pytest.mark.parametrize("window", [None, 1, 100])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim"), [(8, 2, 128), (5, 1, 64), (4, 4, 24), (16, 2, 256)]
)
def test_attention(
    heads: int,
    kv_heads: int,
    head_dim: int,
    window: int | None,
    kv_dtype: torch.dtype | None,
    dtype: torch.dtype,
) -> None:
    workspace = Workspace(device())
    close = {"atol": CLOSE[dtype], "rtol": CLOSE[dtype]}
    batch = Batch(WINDOWS, heads, kv_heads, head_dim, kv_dtype or dtype).to("cuda", dtype)
    expected = batch.expected(head_dim**-0.5, window)
    for used in (workspace, Workspace(device(), key_fragments=True)):
        for num_splits in (1, 3, None):
            found = attend(batch, paged_attention_decode, window, used, num_splits=num_splits)
            torch.testing.assert_close(found.double(), expected, **close)
            again = attend(batch, paged_attention_decode, window, used, num_splits=num_splits)
            assert torch.equal(found, again)
        assert not used.counters(1).any()
    for num_splits in (None, 3):
        found = attend(batch, paged_attention_prefill, window, workspace, num_splits=num_splits)
        torch.testing.assert_close(found.double(), expected, **close)
    batch = Batch(MIXED, heads, kv_heads, head_dim, kv_dtype or dtype).to("cuda", dtype)
    expected = batch.expected(head_dim**-0.5, window)
    found = attend(batch, paged_attention_prefill, window, workspace)
    torch.testing.assert_close(found.double(), expected, **close)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(8, 2, 128), (4, 1, 64), (16, 2, 256)])
def test_queries_meet_their_own_keys_as_they_are(
    heads: int, kv_heads: int, head_dim: int, window: int | None, dtype: torch.dtype
) -> None:
    close = {"atol": CLOSE[dtype], "rtol": CLOSE[dtype]}
    for lengths in (WINDOWS, MIXED):
        batch = Batch(lengths, heads, kv_heads, head_dim, FOUR_BITS)
        batch.has_own = True
        batch.to("cuda", dtype)
        expected = batch.expected(head_dim**-0.5, window)
        found = attend(batch, paged_attention_prefill, window, Workspace(device()))
        torch.testing.assert_close(found.double(), expected, **close)
        if lengths is MIXED:
            continue
        for fragments in (False, True):
            workspace = Workspace(device(), key_fragments=fragments)
            found = attend(batch, paged_attention_decode, window, workspace)
            torch.testing.assert_close(found.double(), expected, **close)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float32], ids=str)
@pytest.mark.parametrize("kv_dtype", KV_DTYPES, ids=str)
@pytest.mark.parametrize(
    ("heads", "head_dim", "value_dim"),
    [(16, 576, 512), (20, 576, 512), (70, 576, 512), (5, 40, 24)],
)
def test_values_that_are_the_first_numbers_of_keys(
    heads: int, head_dim: int, value_dim: int, kv_dtype: torch.dtype | None, dtype: torch.dtype
) -> None:
    """The rows of latent attention, with heads of which some, or not all, fit into one launch."""
    close, ops = {"atol": CLOSE[dtype], "rtol": CLOSE[dtype]}, triton_ops("cuda")
    for lengths in (WINDOWS, MIXED):
        batch = Batch(lengths, heads, 1, head_dim, kv_dtype or dtype, value_dim).to("cuda", dtype)
        found = attend(batch, ops.paged_attention, None)
        expected = batch.expected(head_dim**-0.5, None)
        torch.testing.assert_close(found.double(), expected, **close)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_is_between_the_products(dtype: torch.dtype) -> None:
    ops = triton_ops("cuda")
    x, residual = torch.randn(2, 33, 4096, device="cuda").to(dtype)
    weight = torch.randn(4096, device="cuda").to(dtype)
    close = {"atol": CLOSE[dtype], "rtol": CLOSE[dtype]}
    for name, arguments in (
        ("rms_norm", (x, weight, 1e-5)),
        ("add_rms_norm", (x, residual, weight, 1e-5)),
        *(("gate", (x, kind)) for kind in GATE_KINDS),
    ):
        with GuardedMemory() as memory:
            found = getattr(ops, name)(*arguments)
        memory.check()
        torch.testing.assert_close(found, getattr(TORCH_OPS, name)(*arguments), **close)


@pytest.mark.parametrize("kv_dtype", [torch.bfloat16, torch.int8, torch.float8_e4m3fn], ids=str)
def test_rotation_and_the_kv_write(kv_dtype: torch.dtype) -> None:
    qkv = torch.randn(7, 8 + 2 * 2, 128, device="cuda").bfloat16()
    angles = torch.rand(7, 64, device="cuda") * 7
    norm = torch.randn(128, device="cuda").bfloat16()
    results = []
    for ops in (triton_ops("cuda"), TORCH_OPS):
        key, value = torch.zeros(2, 3, 2, 16, 128, dtype=torch.uint8, device="cuda")
        if kv_dtype == torch.bfloat16:
            cache = KVCache(*torch.zeros(2, 3, 2, 16, 128, dtype=kv_dtype, device="cuda"))
        else:
            scales = torch.zeros(2, 3, 2, 16, device="cuda")
            cache = KVCache(key.view(kv_dtype), value.view(kv_dtype), *scales)
        query = ops.rotate_and_store(
            qkv,
            angles.cos(),
            angles.sin(),
            cache,
            torch.tensor([20, 33, 17, 47, 16, 40], device="cuda"),
            query_norm=norm,
            key_norm=norm,
            eps=1e-6,
        )
        results.append((query, cache.value.float(), cache.key.float()))
    close = {"atol": 2e-2, "rtol": 2e-2}
    torch.testing.assert_close(results[0][0], results[1][0], **close)
    assert (results[0][1] != results[1][1]).float().mean() < 0.01  # divisions are not exact
    scale = {torch.bfloat16: 2e-2, torch.int8: 1.0, torch.float8_e4m3fn: 32.0}[kv_dtype]
    torch.testing.assert_close(results[0][2], results[1][2], atol=scale, rtol=0.13)


def test_sampling_over_a_large_vocabulary() -> None:
    generator = torch.Generator("cuda").manual_seed(0)
    logits = 4 * torch.randn(64, 151_936, device="cuda", generator=generator)
    index = torch.arange(64, device="cuda")
    rows = SamplingRows(
        index.int(),
        index.clone(),
        torch.where(index % 7 == 0, 0.0, 0.3 + index % 5 / 4),
        torch.tensor([0, 1, 20, 1000], dtype=torch.int32, device="cuda")[index % 4],
        torch.tensor([1.0, 0.95, 0.5], device="cuda")[index % 3],
        torch.tensor([0.0, 0.05], device="cuda")[index % 2],
        index * 0x9E3779B97F4A7C1,
    )
    found, expected = sample(logits, rows), sample_reference(logits, rows)
    # Logarithms differ in the last place, which may turn a near tie.
    assert (found != expected).sum() <= 1


@pytest.mark.parametrize("fragments", [False, True])
@pytest.mark.parametrize("num_rows", [1, 8])
def test_split_sums_replayed_from_a_graph(num_rows: int, fragments: bool) -> None:
    case = Case(4096, 256, 128, dtype=torch.bfloat16, device="cuda", fragments=fragments)
    packed = PackedInt4.pack(CodedWeight("int4", case.codes, case.scales), None)
    x = case.rows(num_rows)
    expected = int4_matmul(x, packed, case.workspace, NOTHING)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = int4_matmul(x, packed, case.workspace, NOTHING)
    for _ in range(3):
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(found, expected)
