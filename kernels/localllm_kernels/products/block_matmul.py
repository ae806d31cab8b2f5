"""Products with weights in GGUF's blocks, which are multiplied as the file has them.

    y[m, n] = Σ_k value(block[n, k]) · x[m, k]  (+ bias[n])

For one row, each value is multiplied in float32 as it was unpacked, and the types of which most
files are made are read in words (`block_row.py`); for up to 64 rows, values are rounded to x's type
for the matrix units; for more, slices of the weight are dequantized, which the library's product
then reads. If outputs are few, inputs are split among programs, see `split_sum.py`. What a type's
bytes stand for is in `block_codes.py`.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from localllm_kernels.coded_blocks import BLOCK_SIZES, type_constants
from localllm_kernels.compiling.aot import AotSpec, Work
from localllm_kernels.compiling.launch import Workspace, present, row_bucket
from localllm_kernels.compiling.tiles import MIN_STEPS
from localllm_kernels.linears import BlockRows, BlocksWeight
from localllm_kernels.primitives.block_codes import STEP, block_values
from localllm_kernels.products.block_row import (
    OUTPUTS_OF_ROW,
    ROW_TYPES,
    STEP_OF_ROW,
    row_sums,
)
from localllm_kernels.products.block_weight import PackedBlocks
from localllm_kernels.products.split_sum import add_parts

MAX_ROWS = 64
# Outputs of a program: the rows of a product on Hopper's matrix units, where each of four warps
# unpacks what it multiplies; with 32, or with more warps, each value is unpacked twice. Fewer for
# one row, where threads keep a sum for each input of a step.
_OUTPUTS, _OUTPUTS_OF_ONE = 64, OUTPUTS_OF_ROW
_OF_STEP = tl.constexpr(STEP)
# Inputs of a turn for more rows than 16: with two products in it Triton gives each warp outputs of
# its own before Hopper, too, and each value is unpacked once.
_STEP_OF_MANY = 2 * STEP


@triton.jit
def _sums(
    x_ptr,
    codes_ptr,
    output_at,
    is_output,
    num_rows,
    width_in,
    begin,
    end,
    TYPE: tl.constexpr,
    NUM_VALUES: tl.constexpr,
    NUM_BYTES: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    STEP: tl.constexpr,
):
    """Sums over inputs `begin` to `end`, float32 [OUTPUTS, ROWS]; STEP: inputs of a turn."""
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    rows = tl.arange(0, ROWS)
    is_row = rows < num_rows
    if ROWS == 1:
        # A sum for each input of a step, so that threads exchange nothing before the end.
        sums = tl.zeros([OUTPUTS, STEP], tl.float32)
    else:
        acc = tl.zeros([OUTPUTS, ROWS], tl.float32)
    for turn in tl.range(begin, end, STEP, num_stages=1):
        for after in tl.static_range(0, STEP, _OF_STEP):
            start = turn + after
            inputs = start + tl.arange(0, _OF_STEP)
            is_input = inputs < width_in
            values = block_values(
                codes_ptr, output_at, is_output, start, width_in, TYPE, NUM_VALUES, NUM_BYTES
            )
            if ROWS == 1:
                x = tl.load(x_ptr + inputs, mask=is_input, other=0.0).to(tl.float32)
                sums += values * x[None, :]
            else:
                at = rows[None, :] * width_in + inputs[:, None]
                x = tl.load(x_ptr + at, mask=is_row[None, :] & is_input[:, None], other=0.0)
                acc = tl.dot(values.to(dtype), x, acc, input_precision="ieee")
    if ROWS == 1:
        acc = tl.sum(sums, axis=1)[:, None]
    return acc


@triton.jit(do_not_specialize=["num_rows", "num_splits", "first"])
def _block_kernel(
    x_ptr,
    codes_ptr,
    places_ptr,
    bias_ptr,
    out_ptr,
    parts_ptr,
    counters_ptr,
    num_rows,
    width_in,
    row_bytes,
    num_outputs,
    first,
    width_out,
    num_splits,
    TYPE: tl.constexpr,
    NUM_VALUES: tl.constexpr,
    NUM_BYTES: tl.constexpr,
    HAS_PLACES: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BY_WORDS: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    STEP: tl.constexpr,
):
    """`num_outputs`: of this part, which are outputs `first` and so on of all `width_out`; ROWS: 1,
    or at least 16; BY_WORDS: for one row, as `block_row.py` has it.
    """
    task, split = tl.program_id(0), tl.program_id(1)
    outputs = task * OUTPUTS + tl.arange(0, OUTPUTS)
    is_output = outputs < num_outputs
    output_at = outputs.to(tl.int64) * row_bytes
    rows = tl.arange(0, ROWS)
    is_row = rows < num_rows
    steps_each = tl.cdiv(tl.cdiv(width_in, STEP), num_splits)
    begin = split * steps_each * STEP
    end = tl.minimum(begin + steps_each * STEP, width_in)
    if BY_WORDS:
        acc = row_sums(
            x_ptr, codes_ptr, task * OUTPUTS, num_outputs, row_bytes, width_in, begin, end, TYPE
        )
    else:
        acc = _sums(
            x_ptr, codes_ptr, output_at, is_output, num_rows, width_in, begin, end,
            TYPE, NUM_VALUES, NUM_BYTES, ROWS, OUTPUTS, STEP,
        )  # fmt: skip
    if num_splits > 1:
        acc, is_done = add_parts(
            acc, parts_ptr, counters_ptr, task, split, num_splits, OUTPUTS, ROWS
        )
        if not is_done:
            return
    places = first + outputs
    if HAS_PLACES:
        places = tl.load(places_ptr + places, mask=is_output, other=0)
    if HAS_BIAS:
        acc += tl.load(bias_ptr + places, mask=is_output, other=0.0).to(tl.float32)[:, None]
    at = rows.to(tl.int64)[None, :] * width_out + places[:, None]
    tl.store(
        out_ptr + at, acc.to(out_ptr.dtype.element_ty), mask=is_output[:, None] & is_row[None, :]
    )


@triton.jit(do_not_specialize=["num_outputs"])
def _dequantize_blocks_kernel(
    codes_ptr,
    out_ptr,
    num_outputs,
    row_bytes,
    width_in,
    TYPE: tl.constexpr,
    NUM_VALUES: tl.constexpr,
    NUM_BYTES: tl.constexpr,
    OUTPUTS: tl.constexpr,
    STEP: tl.constexpr,
):
    outputs = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    is_output, start = outputs < num_outputs, tl.program_id(0) * STEP
    output_at = outputs.to(tl.int64) * row_bytes
    values = block_values(
        codes_ptr, output_at, is_output, start, width_in, TYPE, NUM_VALUES, NUM_BYTES
    )
    inputs = start + tl.arange(0, STEP)
    at = outputs.to(tl.int64)[:, None] * width_in + inputs[None, :]
    mask = is_output[:, None] & (inputs < width_in)[None, :]
    tl.store(out_ptr + at, values.to(out_ptr.dtype.element_ty), mask=mask)


def block_matmul(x: Tensor, weight: PackedBlocks, workspace: Workspace) -> Tensor:
    """`x`: [rows, in] -> [rows, out]."""
    x = x.contiguous()
    if len(x) > MAX_ROWS:
        return _by_library(x, weight, workspace)
    out, first = x.new_empty(len(x), weight.width_out), 0
    for part in weight.parts if len(x) else ():
        _multiply(x, weight, part, first, out, workspace)
        first += len(part.codes)
    return out


def _multiply(
    x: Tensor,
    weight: PackedBlocks,
    part: BlockRows,
    first: int,
    out: Tensor,
    workspace: Workspace,
) -> None:
    """Outputs `first` and following, those of a part."""
    num_rows, num_outputs = len(x), len(part.codes)
    rows = row_bucket(num_rows)
    outputs = _OUTPUTS_OF_ONE if rows == 1 else _OUTPUTS
    num_tasks = triton.cdiv(num_outputs, outputs)
    by_words = rows == 1 and part.type in ROW_TYPES
    step = STEP if rows <= 16 else _STEP_OF_MANY
    if by_words:
        step = STEP_OF_ROW
    most_splits = max(1, weight.width_in // max(step, MIN_STEPS * STEP))
    num_splits = min(workspace.splits_for(num_tasks), most_splits)
    num_part_values = num_tasks * num_splits * outputs * rows if num_splits > 1 else 0
    _block_kernel[(num_tasks, num_splits)](
        x,
        part.codes,
        present(weight.places, x),
        present(weight.bias, x),
        out,
        workspace.parts(num_part_values),
        workspace.counters(num_tasks),
        num_rows,
        weight.width_in,
        part.codes.shape[1],
        num_outputs,
        first,
        weight.width_out,
        num_splits,
        **type_constants(part.type),
        HAS_PLACES=weight.places is not None,
        HAS_BIAS=weight.bias is not None,
        BY_WORDS=by_words,
        ROWS=rows,
        OUTPUTS=outputs,
        STEP=step,
        num_warps=4,
    )


def _by_library(x: Tensor, weight: PackedBlocks, workspace: Workspace) -> Tensor:
    """Dequantize and multiply one slice of the weight after another."""
    out = x.new_empty(len(x), weight.width_out)
    most, first = max(64, workspace.slice_bytes // (weight.width_in * x.itemsize) // 64 * 64), 0
    for part in weight.parts:
        for codes in part.codes.split(most):
            values = workspace.slice(len(codes), weight.width_in, x.dtype)
            dequantize_rows(BlockRows(part.type, codes), values)
            torch.mm(x, values.T, out=out[:, first : first + len(codes)])
            first += len(codes)
    if weight.places is not None:
        out = torch.empty_like(out).index_copy_(1, weight.places.long(), out)
    return out if weight.bias is None else out.add_(weight.bias)


def dequantize_rows(rows: BlockRows, out: Tensor) -> None:
    """The values of `rows` into `out` [rows, in], of any float type."""
    (num_outputs, row_bytes), width_in = rows.codes.shape, out.shape[1]
    _dequantize_blocks_kernel[(triton.cdiv(width_in, STEP), triton.cdiv(num_outputs, 32))](
        rows.codes,
        out,
        num_outputs,
        row_bytes,
        width_in,
        **type_constants(rows.type),
        OUTPUTS=32,
        STEP=STEP,
        num_warps=4,
    )


def block_matmul_reference(
    x: Tensor,
    weight: BlocksWeight,
    bias: Tensor | None,
    dequantize: Callable[[BlockRows], Tensor],
) -> Tensor:
    """The same in float64; `dequantize`: the values of some rows, [rows, in]."""
    values = torch.cat([dequantize(part).double() for part in weight.parts])
    ordered = values if weight.order is None else values[weight.order]
    return F.linear(x.double(), ordered, None if bias is None else bias.double())


@dataclass(frozen=True, slots=True)
class _Example:
    type: str
    rows: int

    def __call__(self, workspace: Workspace) -> None:
        num_values, num_bytes = BLOCK_SIZES[self.type]
        codes = torch.empty(4096, 4096 // num_values * num_bytes, dtype=torch.uint8)
        weight = PackedBlocks((BlockRows(self.type, codes),), 4096, None, None)
        block_matmul(torch.empty(self.rows, 4096, dtype=torch.bfloat16), weight, workspace)


def _spec(name: str, rows: int) -> AotSpec:
    num_values, num_bytes = BLOCK_SIZES[name]
    return AotSpec(
        _block_kernel if rows <= MAX_ROWS else _dequantize_blocks_kernel,
        f"{name}, {rows} rows",
        _Example(name, rows),
        # Ten values of 2,000 instructions, or two: for few types on few cards.
        max_stack={16: 8, 64: 40}.get(rows, 0),
        multiples_of_16=("width_in", "row_bytes", "width_out", "num_outputs"),
        # The types of most weights in most files stand for the others.
        work=Work("weight", 1, num_bytes / num_values, times=("OUTPUTS", "STEP"))
        if name in ("Q4_K", "Q6_K")
        else None,
    )


AOT_SPECS = [_spec(name, rows) for name in BLOCK_SIZES for rows in (1, 16, 64)]
AOT_SPECS += [_spec(name, 512) for name in ("Q4_K", "Q6_K")]
