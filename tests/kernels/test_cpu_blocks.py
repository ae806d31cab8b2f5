"""Products with GGUF's blocks in the C library: the values of the reference, and a row's bits."""

import shutil

import pytest
import torch
from blocks import random_blocks
from torch import Tensor

from localllm.model.packed.blocks import BlockWeight
from localllm.user.places import cache_folder
from localllm_kernels.cpu.build import load_library
from localllm_kernels.cpu.linear import CpuLinears
from localllm_kernels.cpu.team import Team
from localllm_kernels.cpu.traits import C_BLOCKS
from localllm_kernels.linears import Product

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler")


@pytest.fixture
def linears() -> CpuLinears:
    return CpuLinears(load_library(cache_folder("kernels")), Team())


def rounded(x: Tensor) -> Tensor:
    """Inputs in eight bits, with one scale for each 16 of them."""
    groups = x.view(len(x), -1, 16)
    scales = groups.abs().amax(-1, keepdim=True) / 127
    codes = (groups * torch.where(scales > 0, 1 / scales, 0)).round()
    return (codes * scales).view(x.shape)


def product_of(linears: CpuLinears, weight: BlockWeight, bias: Tensor | None = None) -> Product:
    product = linears.packed(weight.coded(), bias, torch.bfloat16)
    assert product is not None
    return product


@pytest.mark.parametrize("name", sorted(C_BLOCKS))
def test_a_product_is_that_of_the_values(linears: CpuLinears, name: str) -> None:
    """Of more inputs than are unpacked at a time, and rows that fill no vector of outputs."""
    weight, x = random_blocks(name, 45, 1280), torch.randn(21, 1280)
    product = product_of(linears, weight)
    found = product(x)
    expected = rounded(x).double() @ weight.dequantize().double().T
    torch.testing.assert_close(
        found.double(), expected, atol=1e-6 * float(expected.abs().max()), rtol=0
    )
    for count in (1, 2, 3, 5, 8, 9):
        assert torch.equal(product(x[:count]), found[:count])


def test_parts_of_several_types_in_another_order(linears: CpuLinears) -> None:
    parts = [random_blocks(name, rows, 512) for name, rows in (("Q4_K", 40), ("Q6_K", 9))]
    order, bias = torch.randperm(49), torch.randn(49)
    weight = BlockWeight.stack(parts).take_rows(order)
    x = torch.randn(11, 512)
    found = product_of(linears, weight, bias)(x)
    alone = torch.cat([product_of(linears, part)(x) for part in parts], dim=1)
    assert torch.equal(found, alone[:, order] + bias)


def test_inputs_that_are_not_finite_give_no_numbers(linears: CpuLinears) -> None:
    product = product_of(linears, random_blocks("Q4_K", 16, 256))
    for bad in (torch.nan, torch.inf, -torch.inf):
        x = torch.randn(3, 256)
        x[1, 200] = bad
        assert product(x).isfinite().all(1).tolist() == [True, False, True]


def test_the_file_is_not_copied(linears: CpuLinears) -> None:
    weight = random_blocks("Q8_0", 32, 64)
    product, x = product_of(linears, weight), torch.ones(1, 64)
    before = product(x)
    weight.parts[0].codes.zero_()
    assert before.abs().max() > 0
    assert product(x).abs().max() == 0


def test_no_product_in_float32_and_none_of_other_types(linears: CpuLinears) -> None:
    weight = random_blocks("Q4_K", 16, 256)
    assert linears.packed(weight.coded(), None, torch.float32) is None
