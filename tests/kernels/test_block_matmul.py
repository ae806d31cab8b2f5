"""Products with GGUF's blocks under Triton's interpreter, against their exact values."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from blocks import random_blocks
from guards import GuardedMemory, needs_interpreter
from in_turns import in_turns
from torch import Tensor

from localllm.model.packed.blocks import BlockWeight
from localllm.model.packed.gguf_blocks import BLOCKS, dequantize_blocks
from localllm_kernels.coded_blocks import BLOCK_SIZES, arranged
from localllm_kernels.compiling.launch import Workspace
from localllm_kernels.experts.gpu_experts import ExpertLinears, StackedProduct
from localllm_kernels.linears import BlockRows
from localllm_kernels.products.block_matmul import (
    block_matmul,
    block_matmul_reference,
    dequantize_rows,
)
from localllm_kernels.products.block_weight import PackedBlocks
from localllm_kernels.products.gpu_linears import BlockProduct, GpuLinears, Int4Product
from localllm_kernels.products.traits import triton_multiplies

pytestmark = needs_interpreter

TYPES = list(BLOCK_SIZES)
# Of values that are rounded to float16 before the product, and of sums that are rounded to it.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3}


def workspace_of(num_processors: int) -> Workspace:
    workspace = Workspace(torch.device("cpu"))
    workspace.num_processors = num_processors
    return workspace


@pytest.mark.parametrize("name", TYPES)
def test_values_of_a_type_are_exact(name: str) -> None:
    width = 512 if BLOCK_SIZES[name][0] == 256 else 416
    weight = random_blocks(name, 5, width)
    with GuardedMemory() as memory:
        out = torch.empty(5, width)
        rows = arranged(BlockRows(name, weight.codes))
        dequantize_rows(BlockRows(name, memory.guarded(rows.codes)), out)
    memory.check()
    torch.testing.assert_close(out, weight.dequantize(), rtol=1e-6, atol=0)


def expected_of(x: Tensor, weight: BlockWeight, bias: Tensor | None) -> Tensor:
    dtype = x.dtype
    return block_matmul_reference(x, weight.coded(), bias, partial(_values, dtype=dtype))


def _values(rows: BlockRows, dtype: torch.dtype) -> Tensor:
    """As the products have them: for a row they are not rounded, but that makes no difference."""
    return dequantize_blocks(BLOCKS[rows.type], rows.codes).to(dtype)


def assert_close(found: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    assert found.dtype == dtype
    off = (found.double() - expected).abs().max() / expected.abs().max()
    assert off <= TOLERANCE[dtype]


@pytest.mark.parametrize(
    ("name", "num_rows", "dtype", "has_bias"),
    in_turns(TYPES, [1, 3, 17, 65], list(TOLERANCE), [True, False, False]),
)
def test_products(name: str, num_rows: int, dtype: torch.dtype, has_bias: bool) -> None:
    width = 512 if BLOCK_SIZES[name][0] == 256 else 544
    weight = random_blocks(name, 37, width)
    x = torch.randn(num_rows, width).to(dtype)
    bias = torch.randn(37).to(dtype) if has_bias else None
    with GuardedMemory() as memory:
        rows = arranged(BlockRows(name, weight.codes))
        part = BlockRows(name, memory.guarded(rows.codes))
        given = PackedBlocks((part,), width, None, None if bias is None else memory.guarded(bias))
        found = block_matmul(memory.guarded(x), given, workspace_of(1))
    memory.check()
    assert_close(found, expected_of(x, weight, bias), dtype)


@pytest.mark.parametrize("num_rows", [0, 1, 3, 65])
def test_parts_of_several_types_in_another_order(num_rows: int) -> None:
    parts = [random_blocks(name, rows, 256) for name, rows in (("Q4_K", 20), ("Q6_K", 13))]
    weight = BlockWeight.stack([parts[0], *parts]).take_rows(torch.randperm(53))
    bias, x = torch.randn(53), torch.randn(num_rows, 256)
    product = GpuLinears(workspace_of(1)).packed(weight.coded(), bias, torch.float32)
    assert isinstance(product, BlockProduct)
    assert [len(part.codes) for part in product.weight.parts] == [40, 13]
    expected = expected_of(x, weight, bias)
    assert product(x).shape == expected.shape
    if num_rows:
        assert_close(product(x), expected, torch.float32)


@pytest.mark.parametrize("num_rows", [1, 2])
@pytest.mark.parametrize("name", ["Q4_K", "Q5_K", "Q6_K", "Q3_K"])
def test_a_sum_is_split_among_programs(name: str, num_rows: int) -> None:
    """In uneven parts: nine blocks, of which a turn for one row has four."""
    weight, x = random_blocks(name, 3, 2304), torch.randn(num_rows, 2304)
    workspace = workspace_of(8)
    packed = PackedBlocks.pack(weight.coded(), None)
    for _ in range(2):
        found = block_matmul(x, packed, workspace)
        assert workspace.parts(0).numel() > 0
        assert not workspace.counters(1).any()
        assert_close(found, expected_of(x, weight, None), torch.float32)


@pytest.mark.parametrize("name", ["Q4_0", "MXFP4", "Q5_0"])
@pytest.mark.parametrize("is_ordered", [True, False])
def test_a_weight_of_one_type(name: str, is_ordered: bool) -> None:
    """Of types that other kernels have it becomes a weight of theirs, exactly."""
    weight = BlockWeight.stack([random_blocks(name, rows, 96) for rows in (7, 9)])
    if not is_ordered:
        weight = weight.take_rows(torch.randperm(16))
    bias, x = torch.randn(16), torch.randn(3, 96)
    product = GpuLinears(workspace_of(1)).packed(weight.coded(), bias, torch.float32)
    assert product is not None
    kinds = {"Q4_0": Int4Product, "MXFP4": StackedProduct, "Q5_0": BlockProduct}
    assert isinstance(product, kinds[name])
    assert_close(product(x), expected_of(x, weight, bias), torch.float32)


@pytest.mark.parametrize("name", TYPES)
@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_a_product_of_experts(name: str, dtype: torch.dtype) -> None:
    """Of 80 outputs in another order; of a width that ends within a step if the type has such."""
    width = 512 if BLOCK_SIZES[name][0] == 256 else 416
    weight = random_blocks(name, 80, width).take_rows(torch.randperm(80))
    bias, x = torch.randn(80).to(dtype), torch.randn(2, width).to(dtype)
    product = ExpertLinears().packed(weight.coded(), bias, dtype)
    assert isinstance(product, StackedProduct)
    assert (product.weight.kind == "blocks") == (name not in ("Q4_0", "MXFP4"))
    with GuardedMemory() as memory:
        guarded = replace(product.weight, codes=memory.guarded(product.weight.codes))
        found = StackedProduct(guarded)(memory.guarded(x))
    memory.check()
    assert_close(found, expected_of(x, weight, bias), dtype)


def test_experts_of_two_types_cannot_be_stacked() -> None:
    """Whether an expert has parts of both, or each expert one, with as many bytes."""
    weights, linears = [random_blocks(name, 4, 256) for name in ("Q5_K", "Q5_0")], ExpertLinears()
    mixed = BlockWeight.stack(weights)
    assert linears.packed(mixed.coded(), None, torch.float32) is None
    [first, second] = [linears.packed(each.coded(), None, torch.float32) for each in weights]
    assert isinstance(first, StackedProduct)
    assert isinstance(second, StackedProduct)
    assert first.weight.codes.shape == second.weight.codes.shape
    assert linears.experts([first, second], [first, first], "silu") is None
    assert linears.experts([first, first], [second, second], "silu") is not None


def test_types_without_a_kernel_are_dequantized() -> None:
    weight = random_blocks("IQ2_XS", 2, 256)
    assert not triton_multiplies(weight.layout, torch.bfloat16, "cuda")
    assert GpuLinears(workspace_of(1)).packed(weight.coded(), None, torch.bfloat16) is None
    for name in TYPES:
        layout = random_blocks(name, 2, 256).layout
        assert triton_multiplies(layout, torch.bfloat16, "cuda")
