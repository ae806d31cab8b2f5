"""Rows of inputs rotated as weights on a trellis are; the reference is `rotated` of trellis.py."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from localllm_kernels.compiling.aot import AotSpec
from localllm_kernels.trellis import num_mixed

# Rows that are rotated at a time, and outputs of the Hadamard matrix.
_ROWS, _PART = 16, 64


@triton.jit(do_not_specialize=["num_rows"])
def _rotate_kernel(
    x_ptr,
    signs_ptr,
    out_ptr,
    num_rows,
    width,
    factor,
    MIXED: tl.constexpr,
    PART: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """`PART` outputs for each program, of those inputs that are mixed."""
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    apart, first, part = width // MIXED, tl.program_id(1), tl.program_id(2)
    inner, outer = tl.arange(0, MIXED), part * PART + tl.arange(0, PART)
    is_row, row_at = (rows < num_rows)[:, None], rows.to(tl.int64)[:, None] * width
    inputs, outputs = first + inner * apart, first + outer * apart
    x = tl.load(x_ptr + row_at + inputs[None, :], mask=is_row, other=0.0).to(tl.float32)
    x = tl.where(tl.load(signs_ptr + inputs)[None, :] < 0, -x, x)
    # The sign of the Hadamard matrix: whether an odd number of bits are in both indices.
    both = inner[:, None] & outer[None, :]
    both ^= both >> 4
    both ^= both >> 2
    both = (both ^ (both >> 1)) & 1
    signs = (1 - 2 * both).to(dtype)
    mixed = tl.dot(x.to(dtype), signs, input_precision="ieee")
    tl.store(out_ptr + row_at + outputs[None, :], (mixed * factor).to(dtype), mask=is_row)


def rotate_rows(x: Tensor, by: Tensor) -> Tensor:
    """`rotated` for rows in their own dtype, [rows, in]: added up in float32 and rounded once."""
    out, (num_rows, width) = torch.empty_like(x), x.shape
    mixed = num_mixed(width)
    part = min(mixed, _PART)
    if num_rows:
        grid = (triton.cdiv(num_rows, _ROWS), width // mixed, mixed // part)
        _rotate_kernel[grid](
            x,
            by,
            out,
            num_rows,
            width,
            mixed**-0.5,
            MIXED=mixed,
            PART=part,
            BLOCK_M=_ROWS,
            num_warps=4,
        )
    return out


AOT_SPECS = [
    AotSpec(
        _rotate_kernel,
        "bf16",
        lambda _: rotate_rows(torch.empty(1, 4096, dtype=torch.bfloat16), torch.empty(4096)),
        multiples_of_16=("width",),
    ),
]
