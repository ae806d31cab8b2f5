"""Products with weights in e4m3, with one scale per output or per block of the weight.

    y[m, n] = Σ_b scale[n, b] · Σ_{k in b} code[n, k] · x[m, k]  (+ bias[n])

GPUs that multiply 8-bit floats (capability 8.9 and newer) get x in e4m3 too, with one scale per row
that is computed on the fly:  x ≈ code · max |x| / 448; or with the checkpoint's, if it has one.
Their sums are kept in float32 after at most 128 inputs: the adders of Hopper drop bits (DeepSeek-V3
technical report, section 3.3.2). On other GPUs the codes are widened to the type of x, where they
are exact.
"""

from functools import partial

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from localllm_kernels.compiling.aot import AotSpec
from localllm_kernels.compiling.launch import Workspace, present
from localllm_kernels.products.eight_bits import ByteWeight, multiply, spec_of
from localllm_kernels.products.traits import takes_blocks

NATIVE_CAPABILITY = 89


@triton.jit
def _quantize_kernel(
    x_ptr, given_ptr, codes_ptr, scales_ptr, width, IS_GIVEN: tl.constexpr, BLOCK: tl.constexpr
):
    """One row of x per program; IS_GIVEN: with the scale at `given_ptr`."""
    row = tl.program_id(0)
    columns = tl.arange(0, BLOCK)
    at, inside = row.to(tl.int64) * width + columns, columns < width
    x = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
    largest = tl.load(given_ptr) * 448.0 if IS_GIVEN else tl.max(tl.abs(x), axis=0)
    # Divided exactly, as by torch: x is often half-way between two codes.
    factor = tl.where(largest > 0.0, tl.div_rn(448.0, largest), 0.0)
    scaled = x * factor
    if IS_GIVEN:
        scaled = tl.minimum(tl.maximum(scaled, -448.0), 448.0)
    tl.store(codes_ptr + at, scaled.to(codes_ptr.dtype.element_ty), mask=inside)
    # A value that is not finite makes the scale so too, and with it the row's results.
    tl.store(scales_ptr + row, tl.div_rn(largest, 448.0) + tl.sum(x - x, axis=0))


def rounds_inputs(device: torch.device) -> bool:
    """Whether inputs are rounded to e4m3 on `device`, since its matrix units multiply that."""
    return Workspace(device).capability >= NATIVE_CAPABILITY


def fp8_matmul(
    x: Tensor,
    codes: Tensor,
    scales: Tensor,
    block: tuple[int, int],
    bias: Tensor | None,
    workspace: Workspace,
    input_scale: Tensor | None = None,
) -> Tensor:
    """`x`: [rows, in]; `codes`: float8_e4m3fn [out, in]; `scales`: [ceil(out / block[0]),
    ceil(in / block[1])]; `input_scale`: float32 [], of the codes of x -> [rows, out].

    Raises: ValueError for blocks that `takes_blocks` rejects.
    """
    if not takes_blocks(block[1], x.shape[1]):
        raise ValueError(f"scales for blocks of {block[1]} inputs are not supported")
    out = x.new_empty(len(x), len(codes))
    inputs, x_scales = x.contiguous(), None
    if workspace.capability < NATIVE_CAPABILITY:
        codes = codes.view(torch.uint8)
    elif len(x):
        inputs, x_scales = quantize_inputs(inputs, input_scale)
    multiply(inputs, x_scales, ByteWeight(codes, scales, block, bias), out, workspace)
    return out


def quantize_inputs(x: Tensor, given: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """`x`: [rows, width] -> e4m3 codes of the same shape, and float32 scales [rows]; with `given`,
    float32 [], that one, and larger values are clipped.
    """
    num_rows, width = x.shape
    codes = torch.empty_like(x, dtype=torch.float8_e4m3fn)
    scales = x.new_empty(num_rows, dtype=torch.float32)
    block = triton.next_power_of_2(width)
    _quantize_kernel[(num_rows,)](
        x,
        present(given, scales),
        codes,
        scales,
        width,
        IS_GIVEN=given is not None,
        BLOCK=block,
        num_warps=min(8, max(1, block // 512)),
    )
    return codes, scales


def fp8_matmul_reference(
    x: Tensor, codes: Tensor, scales: Tensor, block: tuple[int, int], bias: Tensor | None
) -> Tensor:
    """The same in float64, with x unrounded."""
    width_out, width_in = codes.shape
    rows = scales.double().repeat_interleave(block[0], 0)[:width_out]
    weight = codes.double() * rows.repeat_interleave(block[1], 1)[:, :width_in]
    return F.linear(x.double(), weight, None if bias is None else bias.double())


def _example(workspace: Workspace, num_rows: int, scale_k: int) -> None:
    codes = torch.empty(4096, 4096, dtype=torch.float8_e4m3fn)
    block = (128, scale_k) if scale_k else (1, 4096)
    scales = torch.empty(4096 // block[0], 4096 // block[1])
    x = torch.empty(num_rows, 4096, dtype=torch.bfloat16)
    fp8_matmul(x, codes, scales, block, None, workspace)


AOT_SPECS = [
    *(
        spec_of(
            f"{rows} rows, scales for {scale_k or 'all'} inputs{', native' if is_native else ''}",
            partial(_example, num_rows=rows, scale_k=scale_k),
            min_capability=NATIVE_CAPABILITY if is_native else 80,
            only=() if is_native else (80, 86),
            max_stack=8,  # on sm_100 the compiler spills two values from before the loop
        )
        for rows, is_native, scale_k in (
            (1, False, 0),
            (512, False, 128),
            (64, True, 0),
            (512, True, 128),
        )
    ),
    AotSpec(
        _quantize_kernel,
        "bf16",
        lambda _: quantize_inputs(torch.empty(1, 4096, dtype=torch.bfloat16)),
        min_capability=NATIVE_CAPABILITY,
    ),
]
