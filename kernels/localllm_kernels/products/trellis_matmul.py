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
from localllm_kernels.products.split_sum import add_parts
from localllm_kernels.products.store_outputs import store_outputs
from localllm_kernels.trellis import TABLE, num_mixed, rotated, signs, unpack_windows

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


@triton.jit(do_not_specialize=["num_rows", "num_splits"])
def _trellis_kernel(
    x_ptr,
    codes_ptr,
    table_ptr,
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
    column_at = columns.to(tl.int64)[:, None] * row_bytes
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(first, end, BLOCK_K):
        inputs = start + tl.arange(0, BLOCK_K)
        is_input = inputs < width_in
        x_mask = is_row[:, None] & is_input[None, :]
        x = tl.load(x_ptr + row_at + inputs[None, :], mask=x_mask, other=0.0)
        # A row begins with a byte of zeros: the state before its first weight ends in it.
        bits = 4 + 3 * inputs
        at = codes_ptr + column_at + (bits >> 3)[None, :]
        mask = is_column[:, None] & is_input[None, :]
        low = tl.load(at, mask=mask, other=0).to(tl.int32)
        high = tl.load(at + 1, mask=mask, other=0).to(tl.int32)
        windows = ((low | (high << 8)) >> (bits & 7)[None, :]) & 127
        weights = tl.load(table_ptr + windows)
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

    `codes`: uint8 [out, 2 + 3 · in / 8], the bits of each row between two bytes of zeros; `table`:
    [128], in the dtype of rows; `scales`: float32 [out]; `signs`: float32 [in].
    """

    codes: Tensor
    table: Tensor
    scales: Tensor
    signs: Tensor
    bias: Tensor | None

    @classmethod
    def pack(cls, weight: CodedWeight, bias: Tensor | None, dtype: torch.dtype) -> "PackedTrellis":
        """Of a weight, for rows in `dtype`."""
        device = weight.codes.device
        return cls(
            F.pad(weight.codes, (1, 1)),
            torch.tensor(TABLE, dtype=dtype, device=device),
            weight.scales.flatten().float(),
            signs(weight.layout.width_in).to(device),
            bias,
        )


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


def trellis_matmul(x: Tensor, weight: PackedTrellis, workspace: Workspace) -> Tensor:
    """`x`: [rows, in] -> [rows, out]."""
    (num_rows, width_in), width_out = x.shape, len(weight.codes)
    out = x.new_empty(num_rows, width_out)
    if num_rows == 0:
        return out
    config = tile_config("trellis3", num_rows, width_out, width_in, workspace)
    tasks = config.num_tasks(num_rows, width_out)
    _trellis_kernel[config.grid(num_rows, width_out)](
        rotate_rows(x.contiguous(), weight.signs),
        weight.codes,
        weight.table,
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
    *(
        AotSpec(
            _trellis_kernel,
            f"{rows} rows",
            partial(_example, num_rows=rows),
            multiples_of_16=("width_in", "width_out"),
            max_stack=24,  # on sm_80
            work=Work("weight", 1, 3 / 8, times=("BLOCK_N", "BLOCK_K")),
        )
        for rows in (1, 64, 512)
    ),
    AotSpec(
        _rotate_kernel,
        "bf16",
        lambda _: rotate_rows(torch.empty(1, 4096, dtype=torch.bfloat16), torch.empty(4096)),
        multiples_of_16=("width",),
    ),
]
