"""Products with weights of 3 bits on a trellis, see trellis.py.

    y[m, n] = scale[n] · Σ_k table[window[n, k]] · rotated x[m, k]  (+ bias[n])

The steps of the table are exact in any type of x, and each scale is applied once.
"""

from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from localllm_kernels.compiling.aot import AotSpec, Work
from localllm_kernels.compiling.launch import Workspace, present, tile_config
from localllm_kernels.linears import CodedWeight
from localllm_kernels.pointwise.rotate_rows import rotate_rows
from localllm_kernels.primitives.trellis_windows import windows_from
from localllm_kernels.products.split_sum import add_parts
from localllm_kernels.products.store_outputs import store_outputs
from localllm_kernels.trellis import TABLE, Mixing, rotated, signs, unpack_windows


@triton.jit(do_not_specialize=["num_rows", "num_splits"])
def _trellis_kernel(
    x_ptr,
    codes_ptr,
    steps_ptr,
    scales_ptr,
    bias_ptr,
    out_ptr,
    parts_ptr,
    counters_ptr,
    num_rows,
    width_in,
    width_out,
    row_bytes,
    num_splits,
    HAS_BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    block_n, block_m, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    rows = block_m * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = block_n * BLOCK_N + tl.arange(0, BLOCK_N)
    is_row, is_column = rows < num_rows, columns < width_out
    steps_each = tl.cdiv(tl.cdiv(width_in, BLOCK_K), num_splits)
    first = split * steps_each * BLOCK_K
    end = tl.minimum(first + steps_each * BLOCK_K, width_in)
    row_at = rows.to(tl.int64)[:, None] * width_in
    column_ptr = codes_ptr + columns.to(tl.int64) * row_bytes
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(first, end, BLOCK_K):
        inputs = start + tl.arange(0, BLOCK_K)
        is_input = inputs < width_in
        x_mask = is_row[:, None] & is_input[None, :]
        x = tl.load(x_ptr + row_at + inputs[None, :], mask=x_mask, other=0.0)
        windows = windows_from(column_ptr, is_column, start, width_in, BLOCK_K)
        weights = tl.load(steps_ptr + windows)
        acc = tl.dot(x, tl.trans(weights), acc, input_precision="ieee")
    if num_splits > 1:
        task = block_n * tl.num_programs(1) + block_m
        acc, is_done = add_parts(
            acc, parts_ptr, counters_ptr, task, split, num_splits, BLOCK_M, BLOCK_N
        )
        if not is_done:
            return
    store_outputs(acc, scales_ptr, bias_ptr, out_ptr, rows, columns, num_rows, width_out, HAS_BIAS)


@dataclass(frozen=True, slots=True)
class PackedTrellis:
    """A weight for the kernel.

    `codes`: uint8 [out, 1 + 3 · in / 8], the bits of each row behind a byte of zeros; `scales`:
    float32 [out].
    """

    codes: Tensor
    scales: Tensor
    mixing: Mixing
    bias: Tensor | None

    @classmethod
    def pack(cls, weight: CodedWeight, bias: Tensor | None, dtype: torch.dtype) -> "PackedTrellis":
        """Of a weight, for rows in `dtype`."""
        return cls(
            F.pad(weight.codes, (1, 0)),
            weight.scales.flatten().float(),
            Mixing.of(weight.layout.width_in, dtype, weight.codes.device),
            bias,
        )


def trellis_matmul(x: Tensor, weight: PackedTrellis, workspace: Workspace) -> Tensor:
    """`x`: [rows, in] -> [rows, out]."""
    (num_rows, width_in), width_out = x.shape, len(weight.codes)
    out = x.new_empty(num_rows, width_out)
    if num_rows == 0:
        return out
    config = tile_config("trellis3", num_rows, width_out, width_in, workspace)
    tasks = config.num_tasks(num_rows, width_out)
    _trellis_kernel[config.grid(num_rows, width_out)](
        rotate_rows(x.contiguous(), weight.mixing.signs),
        weight.codes,
        weight.mixing.steps,
        weight.scales,
        present(weight.bias, out),
        out,
        workspace.parts(config.num_part_values(tasks)),
        workspace.counters(tasks),
        num_rows,
        width_in,
        width_out,
        weight.codes.stride(0),
        config.num_splits,
        HAS_BIAS=weight.bias is not None,
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        BLOCK_K=config.block_k,
        num_warps=config.num_warps,
    )
    return out


def trellis_matmul_reference(x: Tensor, weight: CodedWeight, bias: Tensor | None) -> Tensor:
    """The same in float64."""
    table = torch.tensor(TABLE, dtype=torch.float64)
    values = table[unpack_windows(weight.codes).int()] * weight.scales.double()
    by = signs(weight.layout.width_in).double()
    return F.linear(rotated(x.double(), by), values, None if bias is None else bias.double())


def _example(workspace: Workspace, num_rows: int) -> None:
    codes = torch.empty(4096, 4096 // 8 * 3, dtype=torch.uint8)
    weight = CodedWeight("trellis3", codes, torch.empty(4096, 1))
    packed = PackedTrellis.pack(weight, None, torch.bfloat16)
    trellis_matmul(torch.empty(num_rows, 4096, dtype=torch.bfloat16), packed, workspace)


AOT_SPECS = [
    AotSpec(
        _trellis_kernel,
        f"{rows} rows",
        partial(_example, num_rows=rows),
        multiples_of_16=("width_in", "width_out"),
        max_stack=24,  # on sm_80
        work=Work("weight", 1, 3 / 8, times=("BLOCK_N", "BLOCK_K")),
    )
    for rows in (1, 64, 512)
]
