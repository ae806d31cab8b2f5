"""Products with 8-bit weights that have one scale per output.

    y[m, n] = scale[n] · Σ_k code[n, k] · x[m, k]  (+ bias[n])

A code is exact in any type of x, so the sum is that of a plain product, and the scale is applied to
it once. Weights are read once for up to BLOCK_M rows. If outputs are few, inputs are split among
programs, and the last program adds up the parts in order.
"""

import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from localllm_kernels.compiling.aot import AotSpec, Work
from localllm_kernels.compiling.launch import Workspace, present, tile_config
from localllm_kernels.compiling.tiles import TileConfig, choose_tiles
from localllm_kernels.products.split_sum import add_parts


@triton.jit(do_not_specialize=["num_rows", "num_splits"])
def _int8_kernel(
    x_ptr,
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
    HAS_BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
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
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(first, end, BLOCK_K):
        inputs = start + tl.arange(0, BLOCK_K)
        is_input = inputs < width_in
        x_mask = is_row[:, None] & is_input[None, :]
        x = tl.load(x_ptr + row_at + inputs[None, :], mask=x_mask, other=0.0)
        code_mask = is_column[:, None] & is_input[None, :]
        codes = tl.load(codes_ptr + column_at + inputs[None, :], mask=code_mask, other=0)
        acc = tl.dot(x, tl.trans(codes.to(dtype)), acc, input_precision="ieee")
    if num_splits > 1:
        task = block_n * tl.num_programs(1) + block_m
        acc, is_done = add_parts(
            acc, parts_ptr, counters_ptr, task, split, num_splits, BLOCK_M, BLOCK_N
        )
        if not is_done:
            return
    scales = tl.load(scales_ptr + columns, mask=is_column, other=0.0).to(tl.float32)
    acc *= scales[None, :]
    if HAS_BIAS:
        acc += tl.load(bias_ptr + columns, mask=is_column, other=0.0).to(tl.float32)[None, :]
    at = rows.to(tl.int64)[:, None] * width_out + columns[None, :]
    tl.store(out_ptr + at, acc.to(dtype), mask=is_row[:, None] & is_column[None, :])


def int8_matmul(
    x: Tensor, codes: Tensor, scales: Tensor, bias: Tensor | None, workspace: Workspace
) -> Tensor:
    """`x`: [rows, in]; `codes`: int8 [out, in]; `scales`: [out] -> [rows, out]."""
    num_rows, width_in = x.shape
    width_out = codes.shape[0]
    out = x.new_empty(num_rows, width_out)
    if num_rows == 0:
        return out
    config = tile_config("int8", num_rows, width_out, width_in, workspace)
    tasks = config.num_tasks(num_rows, width_out)
    _int8_kernel[config.grid(num_rows, width_out)](
        x.contiguous(),
        codes,
        scales,
        present(bias, x),
        out,
        workspace.parts(config.num_part_values(tasks)),
        workspace.counters(tasks),
        num_rows,
        width_in,
        width_out,
        config.num_splits,
        HAS_BIAS=bias is not None,
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        BLOCK_K=config.block_k,
        num_warps=config.num_warps,
    )
    return out


def int8_matmul_reference(x: Tensor, codes: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
    """The same in float64."""
    weight = codes.double() * scales.double()[:, None]
    return F.linear(x.double(), weight, None if bias is None else bias.double())


def _spec(num_rows: int, config: TileConfig) -> AotSpec:
    return AotSpec(
        _int8_kernel,
        f"{num_rows} rows",
        {
            **dict.fromkeys(("x_ptr", "scales_ptr", "bias_ptr", "out_ptr"), "*bf16"),
            "codes_ptr": "*i8",
            "parts_ptr": "*fp32",
            "counters_ptr": "*i32",
            **dict.fromkeys(("num_rows", "width_in", "width_out", "num_splits"), "i32"),
        },
        {
            "HAS_BIAS": False,
            "BLOCK_M": config.block_m,
            "BLOCK_N": config.block_n,
            "BLOCK_K": config.block_k,
        },
        config.num_warps,
        multiples_of_16=("width_in", "width_out"),
        work=Work("weight", config.block_n * config.block_k, 1),
    )


AOT_SPECS = [_spec(rows, choose_tiles(rows, 4096, 4096, 132)) for rows in (1, 64, 512)]
