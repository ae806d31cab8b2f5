"""Products with weights of 8 bits, whose codes are multiplied as the format has them.

Weights are read once for up to BLOCK_M rows. If outputs are few, inputs are split among programs,
and the last program adds up the parts in order.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from localllm_kernels.compiling.aot import AotSpec, Work
from localllm_kernels.compiling.launch import Workspace, present, tile_config
from localllm_kernels.primitives.e4m3 import from_e4m3
from localllm_kernels.products.split_sum import add_parts

# Integers, whose products are added up as plain ones; bytes of e4m3, which are widened; and e4m3
# that is multiplied as such.
FORMATS = (torch.int8, torch.uint8, torch.float8_e4m3fn)


@triton.jit(do_not_specialize=["num_rows", "num_splits"])
def _eight_bit_kernel(
    x_ptr,
    x_scales_ptr,
    codes_ptr,
    scales_ptr,
    bias_ptr,
    out_ptr,
    parts_ptr,
    counters_ptr,
    num_rows,
    width_in,
    width_out,
    num_splits,
    SCALE_N: tl.constexpr,
    SCALE_K: tl.constexpr,
    FORMAT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """FORMAT: an index of FORMATS."""
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    block_n, block_m, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    rows = block_m * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = block_n * BLOCK_N + tl.arange(0, BLOCK_N)
    is_row, is_column = rows < num_rows, columns < width_out
    steps_each = tl.cdiv(tl.cdiv(width_in, BLOCK_K), num_splits)
    first = split * steps_each * BLOCK_K
    end = tl.minimum(first + steps_each * BLOCK_K, width_in)
    row_at = rows.to(tl.int64)[:, None] * width_in
    column_at = columns.to(tl.int64)[:, None] * width_in
    # SCALE_K is 0 if one scale covers all inputs.
    scales_each = 1 if SCALE_K == 0 else tl.cdiv(width_in, SCALE_K)
    scale_at = columns // SCALE_N * scales_each
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(first, end, BLOCK_K):
        inputs = start + tl.arange(0, BLOCK_K)
        is_input = inputs < width_in
        x_mask = is_row[:, None] & is_input[None, :]
        x = tl.load(x_ptr + row_at + inputs[None, :], mask=x_mask, other=0.0)
        code_mask = is_column[:, None] & is_input[None, :]
        nothing = 0.0 if FORMAT == 2 else 0
        codes = tl.load(codes_ptr + column_at + inputs[None, :], mask=code_mask, other=nothing)
        if FORMAT == 0:
            acc = tl.dot(x, tl.trans(codes.to(dtype)), acc, input_precision="ieee")
        else:
            if FORMAT == 2:
                part = tl.dot(x, tl.trans(codes), max_num_imprecise_acc=BLOCK_K)
            else:
                part = tl.dot(x, tl.trans(from_e4m3(codes).to(dtype)), input_precision="ieee")
            if SCALE_K != 0:
                of_block = scales_ptr + scale_at + start // SCALE_K
                scales = tl.load(of_block, mask=is_column, other=0.0)
                part *= scales.to(tl.float32)[None, :]
            acc += part
    if num_splits > 1:
        task = block_n * tl.num_programs(1) + block_m
        acc, is_done = add_parts(
            acc, parts_ptr, counters_ptr, task, split, num_splits, BLOCK_M, BLOCK_N
        )
        if not is_done:
            return
    if SCALE_K == 0:
        scales = tl.load(scales_ptr + scale_at, mask=is_column, other=0.0).to(tl.float32)
        acc *= scales[None, :]
    if FORMAT == 2:
        acc *= tl.load(x_scales_ptr + rows, mask=is_row, other=0.0)[:, None]
    if HAS_BIAS:
        acc += tl.load(bias_ptr + columns, mask=is_column, other=0.0).to(tl.float32)[None, :]
    at = rows.to(tl.int64)[:, None] * width_out + columns[None, :]
    tl.store(
        out_ptr + at, acc.to(out_ptr.dtype.element_ty), mask=is_row[:, None] & is_column[None, :]
    )


@dataclass(frozen=True, slots=True)
class ByteWeight:
    """`codes`: [out, in], of one of FORMATS; `scales`: [ceil(out / block[0]), ceil(in / block[1])];
    `bias`: [out] or None.
    """

    codes: Tensor
    scales: Tensor
    block: tuple[int, int]
    bias: Tensor | None


def multiply(
    inputs: Tensor, x_scales: Tensor | None, weight: ByteWeight, out: Tensor, workspace: Workspace
) -> None:
    """`inputs`: [rows, in], with a scale for each row if in e4m3 -> `out`, [rows, out]."""
    (num_rows, width_in), width_out = inputs.shape, len(weight.codes)
    if num_rows == 0:
        return
    family = "int8" if weight.codes.dtype == torch.int8 else "fp8"
    config = tile_config(family, num_rows, width_out, width_in, workspace)
    tasks = config.num_tasks(num_rows, width_out)
    _eight_bit_kernel[config.grid(num_rows, width_out)](
        inputs,
        present(x_scales, weight.scales),
        weight.codes,
        weight.scales,
        present(weight.bias, out),
        out,
        workspace.parts(config.num_part_values(tasks)),
        workspace.counters(tasks),
        num_rows,
        width_in,
        width_out,
        config.num_splits,
        SCALE_N=weight.block[0],
        SCALE_K=0 if weight.block[1] >= width_in else weight.block[1],
        FORMAT=FORMATS.index(weight.codes.dtype),
        HAS_BIAS=weight.bias is not None,
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        BLOCK_K=config.block_k,
        num_warps=config.num_warps,
    )


def spec_of(label: str, call: Callable[[Workspace], object], **options: Any) -> AotSpec:
    """A compilation for a launch of `multiply`; `options`: more fields of AotSpec."""
    work = Work("weight", 1, 1, times=("BLOCK_N", "BLOCK_K"))
    sizes = ("width_in", "width_out")
    return AotSpec(_eight_bit_kernel, label, call, multiples_of_16=sizes, work=work, **options)
