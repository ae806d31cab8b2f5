"""8-bit products under Triton's interpreter against float64: rows, shapes, scales, splits."""

import pytest
import torch
from guards import GuardedMemory, needs_interpreter
from in_turns import in_turns

from localllm_kernels.compiling.launch import Workspace
from localllm_kernels.compiling.tiles import choose_tiles
from localllm_kernels.products.fp8_matmul import (
    fp8_matmul,
    fp8_matmul_reference,
    quantize_inputs,
)
from localllm_kernels.products.int8_matmul import int8_matmul, int8_matmul_reference

pytestmark = needs_interpreter

CPU = torch.device("cpu")
TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3}
SHAPES = [(16, 1), (200, 70), (128, 64), (1040, 33)]


def workspace_of(num_processors: int) -> Workspace:
    workspace = Workspace(CPU)
    workspace.num_processors = num_processors
    return workspace


@pytest.mark.parametrize(
    ("shape", "num_rows", "has_bias", "dtype"),
    in_turns(SHAPES, [0, 1, 17, 64, 130], [True, False], list(TOLERANCE)),
)
def test_int8(shape: tuple[int, int], num_rows: int, has_bias: bool, dtype: torch.dtype) -> None:
    width_in, width_out = shape
    codes = torch.randint(-127, 128, (width_out, width_in), dtype=torch.int8)
    scales = (torch.rand(width_out) / 100 / width_in**0.5).to(dtype)
    bias = torch.randn(width_out).to(dtype) if has_bias else None
    x = torch.randn(num_rows, width_in).to(dtype)
    workspace = workspace_of(1 + num_rows % 5)
    with GuardedMemory() as memory:
        given = [memory.guarded(each) for each in (x, codes, scales)]
        found = int8_matmul(*given, None if bias is None else memory.guarded(bias), workspace)
    memory.check()
    expected = int8_matmul_reference(x, codes, scales, bias)
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(found.double(), expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize(
    ("shape", "num_rows", "block", "dtype"),
    in_turns(SHAPES, [0, 1, 17, 130], [(1, 1 << 20), (128, 128), (64, 256)], list(TOLERANCE)),
)
def test_fp8(
    shape: tuple[int, int], num_rows: int, block: tuple[int, int], dtype: torch.dtype
) -> None:
    width_in, width_out = shape
    codes = torch.randn(width_out, width_in).to(torch.float8_e4m3fn)
    num_blocks = (-(-width_out // block[0]), -(-width_in // block[1]))
    scales = torch.rand(num_blocks) / width_in**0.5
    bias = torch.randn(width_out).to(dtype) if width_out > 50 else None
    x = torch.randn(num_rows, width_in).to(dtype)
    with GuardedMemory() as memory:
        given = [memory.guarded(each) for each in (x, codes, scales)]
        given_bias = None if bias is None else memory.guarded(bias)
        found = fp8_matmul(*given, block, given_bias, workspace_of(3))
    memory.check()
    expected = fp8_matmul_reference(x, codes, scales, block, bias)
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(found.double(), expected, atol=tolerance, rtol=tolerance)


def test_a_split_sum_leaves_the_counters_at_zero() -> None:
    codes = torch.randint(-127, 128, (70, 4096), dtype=torch.int8)
    scales, x = torch.rand(70) / 1000, torch.randn(3, 4096)
    workspace = workspace_of(8)
    assert choose_tiles(3, 70, 4096, 8).num_splits > 2
    for _ in range(2):
        found = int8_matmul(x, codes, scales, None, workspace)
        expected = int8_matmul_reference(x, codes, scales, None)
        torch.testing.assert_close(found.double(), expected, atol=1e-4, rtol=1e-4)
        assert not workspace.counters(1).any()


def test_inputs_in_fp8_take_a_given_scale_and_are_clipped_by_it() -> None:
    x = torch.randn(4, 300)
    x[1, 5], x[2, 7], x[3, 9] = 100.0, -100.0, torch.nan
    codes, scales = quantize_inputs(x, torch.tensor(0.1))
    assert scales[:3].tolist() == pytest.approx([0.1] * 3)
    assert scales[3].isnan()
    values = codes.float() * 0.1
    assert values[1, 5] == -values[2, 7] == pytest.approx(44.8)
    x[1, 5], x[2, 7] = 44.8, -44.8
    assert (values - x)[:3].norm() < 0.07 * x[:3].norm()  # the interpreter does not round to e4m3


def test_scales_that_straddle_a_step_are_refused() -> None:
    codes = torch.zeros(8, 256).to(torch.float8_e4m3fn)
    with pytest.raises(ValueError, match="96 inputs"):
        fp8_matmul(torch.zeros(1, 256), codes, torch.ones(8, 3), (1, 96), None, Workspace(CPU))
