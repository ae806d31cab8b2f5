"""NVFP4 products with inputs in NVFP4, under Triton's interpreter, against float64."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from blocks import random_e4m3
from guards import GuardedMemory, needs_interpreter
from torch import Tensor
from triton.language.semantic import TritonSemantic
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

from localllm_kernels.compiling.launch import Workspace
from localllm_kernels.experts.product import E2M1
from localllm_kernels.linears import CodedWeight
from localllm_kernels.products.gpu_linears import GpuLinears
from localllm_kernels.products.nvfp4_matmul import (
    NATIVE_CAPABILITY,
    nvfp4_matmul_reference,
    quantize_to_nvfp4,
)

pytestmark = needs_interpreter
VALUES = np.array((*E2M1, *(-each for each in E2M1)), np.float32)


def scaled_product(
    builder: InterpreterBuilder,
    a: TensorHandle,
    a_scale: TensorHandle,
    a_format: object,
    b: TensorHandle,
    b_scale: TensorHandle,
    b_format: object,
    fast: bool,
    a_packed: bool,
    b_packed: bool,
    total: TensorHandle,
) -> TensorHandle:
    """What matrix units make of two tiles in NVFP4: the interpreter has no such product."""
    assert a_packed
    assert b_packed
    assert str(a_format).endswith("E2M1")
    assert str(b_format).endswith("E2M1")
    left, right = (
        widened(codes, scales.data) for codes, scales in ((a.data, a_scale), (b.data.T, b_scale))
    )
    return TensorHandle(left @ right.T + total.data, total.dtype.scalar)


def widened(codes: np.ndarray, scales: np.ndarray) -> np.ndarray:
    pairs = VALUES[np.stack((codes & 15, codes >> 4), -1)].reshape(len(codes), 2 * codes.shape[1])
    stored = torch.from_numpy(np.ascontiguousarray(scales)).view(torch.uint8)
    factors = stored.view(torch.float8_e4m3fn).float().numpy()
    return pairs * factors.repeat(16, 1)


def drawn(width_out: int, width_in: int) -> CodedWeight:
    codes = torch.randint(16, (width_out, width_in), dtype=torch.uint8)
    factors, scale = torch.rand(width_out) / 1000, torch.tensor(0.004)
    scales = random_e4m3(width_out, width_in // 16)
    return CodedWeight("nvfp4", codes, scales, factors=factors, input_scale=scale)


def inputs_of(codes: Tensor, scales: Tensor) -> Tensor:
    return torch.from_numpy(widened(codes.numpy(), scales.view(torch.uint8).numpy())).double()


def values_of(weight: CodedWeight) -> Tensor:
    assert weight.factors is not None
    scales = weight.scales.double() * weight.factors.double()[:, None]
    return torch.from_numpy(VALUES)[weight.codes.int()].double() * scales.repeat_interleave(16, 1)


def test_inputs_are_rounded() -> None:
    """The interpreter does not round to e4m3 as GPUs do: see tests/gpu."""
    x, scale = torch.randn(3, 304), torch.tensor([0.01])
    # Ties, a group of zeros, and one whose scale is the greatest.
    x[0, :16] = torch.tensor([0.25, -0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0] * 2) * 0.01 * 16
    x[1, :16] = 0
    x[2, :16] *= 1000
    codes, scales = quantize_to_nvfp4(x, scale)
    found = inputs_of(codes, scales) * 0.01
    expected = torch.tensor([0.0, -1.0, 1.0, 2.0, 2.0, 4.0, 4.0, 6.0] * 2) * 0.16
    torch.testing.assert_close(found[0, :16].float(), expected)
    assert not found[1, :16].any()
    assert scales.view(torch.uint8)[2, 0] == 0x7E  # 448
    rest = (found - x)[:, 16:]
    assert rest.norm() < 0.12 * x[:, 16:].norm()


@pytest.mark.parametrize(
    ("shape", "num_rows", "has_bias"),
    [((64, 70), 1, True), ((1056, 33), 17, False), ((320, 40), 130, True), ((64, 8), 0, False)],
)
@pytest.mark.parametrize("capability", [100, 120])
def test_products(
    shape: tuple[int, int],
    num_rows: int,
    has_bias: bool,
    capability: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(InterpreterBuilder, "create_dot_scaled", scaled_product, raising=False)
    # It takes the shapes of interpreter.py for others.
    monkeypatch.setattr(TritonSemantic, "verify_scaled_shape", lambda *args: None)
    width_in, width_out = shape
    weight = drawn(width_out, width_in)
    bias: Tensor | None = torch.randn(width_out) if has_bias else None
    workspace = Workspace(torch.device("cpu"))
    workspace.num_processors, workspace.capability = 3, capability
    product = GpuLinears(workspace).packed(weight, bias, torch.float32)
    assert product is not None
    x = torch.randn(num_rows, width_in)
    with GuardedMemory() as memory:
        found = product(memory.guarded(x))
    memory.check()
    assert weight.input_scale is not None
    inputs = inputs_of(*quantize_to_nvfp4(x, weight.input_scale[None])) * weight.input_scale
    expected = F.linear(inputs, values_of(weight), None if bias is None else bias.double())
    torch.testing.assert_close(found.double(), expected, atol=1e-4, rtol=1e-4)
    whole = nvfp4_matmul_reference(x, weight, bias)
    assert (found - whole).norm() <= 0.06 * whole.norm()


def test_other_gpus_and_other_checkpoints_keep_their_inputs() -> None:
    weight, x = drawn(40, 64), torch.randn(5, 64)
    expected = x.double() @ values_of(weight).T
    without = CodedWeight("nvfp4", weight.codes, weight.scales, factors=weight.factors)
    for capability, each in ((NATIVE_CAPABILITY - 10, weight), (NATIVE_CAPABILITY, without)):
        workspace = Workspace(torch.device("cpu"))
        workspace.capability = capability
        product = GpuLinears(workspace).packed(each, None, torch.float32)
        assert product is not None
        torch.testing.assert_close(product(x).double(), expected, atol=1e-5, rtol=1e-4)
