"""Products with 4-bit weights, dequantized on their way to the arithmetic.

    y[m, n] = Σ_g scale[g, n] · Σ_{k in g} (code[k, n] − zero[g, n]) · x[m, k]  (+ bias[n])

Scales and zeros are applied once a group, to sums of products: Σ code · x − zero · Σ x.

The layout of the weight is that of `int4_weight.py`; one row, and up to 64, add up as
`int4_sums.py` says, and a few times as many one part after the other. More rows dequantize a slice
of the weight at a time and leave it to the library. Inputs are split among programs where outputs
are few, and the last program adds up in order.

Around the product, to spare launches: the norm before it (the weight of the norm goes to x, the
factor of the row to the sum), the gate behind it (`silu(gate) · up`, two halves of the outputs),
and the residual. Sources: Frantar et al. 2024, "MARLIN", section 3 (codes in mantissas); Hoque et
al. 2024 (arXiv 2402.00025; split inputs).
"""

from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from localllm_kernels.aot import AotSpec
from localllm_kernels.arrival import is_last
from localllm_kernels.int4_sums import add_row, add_tile
from localllm_kernels.int4_weight import NOTHING, SPAN, Around, PackedInt4
from localllm_kernels.launch import Workspace, present, row_bucket
from localllm_kernels.tiles import Ranges, TileConfig, neighbours

MAX_TILE_ROWS = 64
# Up to here a slice of rows after the other is better than to dequantize the weight, whose values
# are written and read again: 4.5 bytes each, in place of a half for each slice.
MAX_SLICED_ROWS = 192
# Of a slice of a dequantized weight: it stays in the second cache of the GPU.
SLICE_BYTES = 32 << 20
SYMMETRIC_ZERO = 8


@triton.jit
def _silu(x):
    return x / (1.0 + tl.exp(-x))


@triton.jit
def _finish_row(total, columns, is_column, factor, bias_ptr, HAS_BIAS: tl.constexpr):
    total *= factor
    if HAS_BIAS:
        total += tl.load(bias_ptr + columns, mask=is_column, other=0.0).to(tl.float32)
    return total


@triton.jit
def _row_kernel(
    x_ptr,
    words_ptr,
    scales_ptr,
    zeros_ptr,
    permutation_ptr,
    bias_ptr,
    norm_ptr,
    residual_ptr,
    out_ptr,
    parts_ptr,
    counters_ptr,
    width_in,
    width_out,
    num_spans,
    num_splits,
    eps,
    GROUP: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    HAS_PERMUTATION: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_NORM: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    IS_GATED: tl.constexpr,
    SPANS: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    block, split = tl.program_id(0), tl.program_id(1)
    outputs = width_out // 2 if IS_GATED else width_out
    columns = block * BLOCK_N + tl.arange(0, BLOCK_N)
    is_column = columns < outputs
    spans_each = tl.cdiv(tl.cdiv(num_spans, SPANS), num_splits) * SPANS
    first, end = split * spans_each, tl.minimum((split + 1) * spans_each, num_spans)
    acc = tl.zeros([BLOCK_N, SPANS, 16], tl.float32)
    up = tl.zeros([BLOCK_N, SPANS, 16], tl.float32)
    squares = tl.zeros([SPANS, 16], tl.float32)
    ignored = tl.zeros([SPANS, 16], tl.float32)
    for span in range(first, end, SPANS):
        acc, squares = add_row(
            acc, squares, x_ptr, words_ptr, scales_ptr, zeros_ptr, permutation_ptr, norm_ptr,
            span, end, columns, is_column, width_in, num_spans,
            GROUP, HAS_ZEROS, HAS_PERMUTATION, HAS_NORM, SPANS, BLOCK_N,
        )  # fmt: skip
        if IS_GATED:
            up, ignored = add_row(
                up, ignored, x_ptr, words_ptr, scales_ptr, zeros_ptr, permutation_ptr, norm_ptr,
                span, end, columns + outputs, is_column, width_in, num_spans,
                GROUP, HAS_ZEROS, HAS_PERMUTATION, HAS_NORM, SPANS, BLOCK_N,
            )  # fmt: skip
    total = tl.sum(tl.sum(acc, axis=2), axis=1)
    total_up = tl.sum(tl.sum(up, axis=2), axis=1)
    square = tl.sum(tl.sum(squares, axis=0), axis=0)
    if num_splits > 1:
        # A part: the sums of the outputs, those of their second half, and that of the squares.
        PART: tl.constexpr = 2 * BLOCK_N + 1
        parts_ptr += block.to(tl.int64) * num_splits * PART
        mine, inside = parts_ptr + split * PART, tl.arange(0, BLOCK_N)
        tl.store(mine + inside, total)
        if IS_GATED:
            tl.store(mine + BLOCK_N + inside, total_up)
        tl.store(mine + 2 * BLOCK_N, square)
        if not is_last(counters_ptr + block, num_splits):
            return
        total = tl.zeros([BLOCK_N], tl.float32)
        total_up = tl.zeros([BLOCK_N], tl.float32)
        square = 0.0
        for part in range(num_splits):
            other = parts_ptr + part * PART
            total += tl.load(other + inside, cache_modifier=".cg")
            if IS_GATED:
                total_up += tl.load(other + BLOCK_N + inside, cache_modifier=".cg")
            square += tl.load(other + 2 * BLOCK_N, cache_modifier=".cg")
    factor = 1.0
    if HAS_NORM:
        factor = tl.rsqrt(square / width_in + eps)
    total = _finish_row(total, columns, is_column, factor, bias_ptr, HAS_BIAS)
    if IS_GATED:
        total_up = _finish_row(total_up, columns + outputs, is_column, factor, bias_ptr, HAS_BIAS)
        total = _silu(total) * total_up
    if HAS_RESIDUAL:
        total += tl.load(residual_ptr + columns, mask=is_column, other=0.0).to(tl.float32)
    tl.store(out_ptr + columns, total.to(out_ptr.dtype.element_ty), mask=is_column)


@triton.jit
def _tile_kernel(
    x_ptr,
    words_ptr,
    scales_ptr,
    zeros_ptr,
    permutation_ptr,
    bias_ptr,
    norm_ptr,
    residual_ptr,
    out_ptr,
    parts_ptr,
    counters_ptr,
    num_rows,
    width_in,
    width_out,
    num_spans,
    num_splits,
    eps,
    GROUP: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    HAS_PERMUTATION: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_NORM: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    IS_GATED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    block, split = tl.program_id(0), tl.program_id(1)
    outputs = width_out // 2 if IS_GATED else width_out
    columns = block * BLOCK_N + tl.arange(0, BLOCK_N)
    is_column = columns < outputs
    rows = tl.arange(0, BLOCK_M)
    is_row = rows < num_rows
    spans_each = tl.cdiv(num_spans, num_splits)
    first, end = split * spans_each, tl.minimum((split + 1) * spans_each, num_spans)
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    up = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    squares = tl.zeros([BLOCK_M], tl.float32)
    ignored = tl.zeros([BLOCK_M], tl.float32)
    for span in range(first, end):
        acc, squares = add_tile(
            acc, squares, x_ptr, words_ptr, scales_ptr, zeros_ptr, permutation_ptr, norm_ptr,
            span, rows, is_row, columns, is_column, width_in, num_spans,
            GROUP, HAS_ZEROS, HAS_PERMUTATION, HAS_NORM, BLOCK_M, BLOCK_N,
        )  # fmt: skip
        if IS_GATED:
            up, ignored = add_tile(
                up, ignored, x_ptr, words_ptr, scales_ptr, zeros_ptr, permutation_ptr, norm_ptr,
                span, rows, is_row, columns + outputs, is_column, width_in, num_spans,
                GROUP, HAS_ZEROS, HAS_PERMUTATION, HAS_NORM, BLOCK_M, BLOCK_N,
            )  # fmt: skip
    if num_splits > 1:
        # A part: the sums of the tile, those of its second half, and those of the squares.
        PART: tl.constexpr = BLOCK_M * (2 * BLOCK_N + 1)
        parts_ptr += block.to(tl.int64) * num_splits * PART
        mine = parts_ptr + split * PART
        inside = rows[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
        tl.store(mine + inside, acc)
        if IS_GATED:
            tl.store(mine + BLOCK_M * BLOCK_N + inside, up)
        tl.store(mine + 2 * BLOCK_M * BLOCK_N + rows, squares)
        if not is_last(counters_ptr + block, num_splits):
            return
        acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        up = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        squares = tl.zeros([BLOCK_M], tl.float32)
        for part in range(num_splits):
            other = parts_ptr + part * PART
            acc += tl.load(other + inside, cache_modifier=".cg")
            if IS_GATED:
                up += tl.load(other + BLOCK_M * BLOCK_N + inside, cache_modifier=".cg")
            squares += tl.load(other + 2 * BLOCK_M * BLOCK_N + rows, cache_modifier=".cg")
    if HAS_NORM:
        factor = tl.rsqrt(squares / width_in + eps)
        acc *= factor[:, None]
        up *= factor[:, None]
    if HAS_BIAS:
        acc += tl.load(bias_ptr + columns, mask=is_column, other=0.0).to(tl.float32)[None, :]
    if IS_GATED:
        if HAS_BIAS:
            bias = tl.load(bias_ptr + outputs + columns, mask=is_column, other=0.0)
            up += bias.to(tl.float32)[None, :]
        acc = _silu(acc) * up
    at = rows.to(tl.int64)[:, None] * outputs + columns[None, :]
    is_inside = is_row[:, None] & is_column[None, :]
    if HAS_RESIDUAL:
        acc += tl.load(residual_ptr + at, mask=is_inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + at, acc.to(out_ptr.dtype.element_ty), mask=is_inside)


@triton.jit
def _dequantize_kernel(
    words_ptr,
    scales_ptr,
    zeros_ptr,
    out_ptr,
    first_row,
    num_rows,
    width_in,
    num_spans,
    GROUP: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Rows of the weight as a slice [num_rows, width_in], a span a program."""
    span = tl.program_id(0)
    inside = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_row = inside < num_rows
    rows = (first_row + inside).to(tl.int64)
    within = tl.arange(0, 16)
    at = rows[:, None] * (num_spans * 16) + (span * 16 + within)[None, :]
    words = tl.load(words_ptr + at, mask=is_row[:, None], other=0)
    for plane in tl.static_range(8):
        inputs = span * 128 + plane * 16 + within
        group = (span * 128 + plane * 16) // GROUP
        of_group = rows * (width_in // GROUP) + group
        is_group = is_row & (group * GROUP < width_in)
        scale = tl.load(scales_ptr + of_group, mask=is_group, other=0.0).to(tl.float32)
        zero = tl.full([BLOCK_N], 8.0, tl.float32)
        if HAS_ZEROS:
            zero = tl.load(zeros_ptr + of_group, mask=is_group, other=0).to(tl.float32)
        codes = ((words >> (4 * plane)) & 15).to(tl.float32)
        values = (codes - zero[:, None]) * scale[:, None]
        tl.store(
            out_ptr + inside.to(tl.int64)[:, None] * width_in + inputs[None, :],
            values.to(out_ptr.dtype.element_ty),
            mask=is_row[:, None] & (inputs < width_in)[None, :],
        )


def int4_matmul(
    x: Tensor, weight: PackedInt4, workspace: Workspace, around: Around = NOTHING
) -> Tensor:
    """`x`: [rows, in] -> [rows, out], of half the outputs where they are gated.

    Raises: ValueError where more than 64 rows are asked for with something around.
    """
    num_rows = x.shape[0]
    if num_rows > MAX_TILE_ROWS and around is not NOTHING:
        raise ValueError(f"{num_rows} rows have their norm and gate computed apart")
    if num_rows > MAX_SLICED_ROWS:
        return _by_library(x, weight)
    outputs = weight.width_out // 2 if around.is_gated else weight.width_out
    out = x.new_empty(num_rows, outputs)
    for first in range(0, num_rows, MAX_TILE_ROWS):
        rows = slice(first, first + MAX_TILE_ROWS)
        _launch(x[rows], weight, workspace, around, out[rows])
    return out


def _launch(
    x: Tensor, weight: PackedInt4, workspace: Workspace, around: Around, out: Tensor
) -> None:
    """The product of at most 64 rows, into `out`."""
    num_rows, width_in = x.shape
    outputs, num_spans = out.shape[1], weight.num_spans
    config = workspace.tunings.config(
        "int4",
        (row_bucket(num_rows), outputs, num_spans, weight.group_size, int(around.is_gated)),
        lambda: _choose(num_rows, outputs, num_spans, workspace.num_processors),
        _vary,
    )
    num_blocks = triton.cdiv(outputs, config.block_n)
    part = config.block_m * (2 * config.block_n + 1)
    num_parts = num_blocks * config.num_splits if config.num_splits > 1 else 0
    tensors = (
        x.contiguous(),
        weight.words,
        weight.scales,
        present(weight.zeros, weight.scales),
        present(weight.permutation, weight.words),
        present(weight.bias, x),
        present(around.norm, x),
        present(around.residual, x),
        out,
        workspace.parts(num_parts * part),
        workspace.counters(num_blocks),
    )
    flags = {
        "GROUP": weight.group_size,
        "HAS_ZEROS": weight.zeros is not None,
        "HAS_PERMUTATION": weight.permutation is not None,
        "HAS_BIAS": weight.bias is not None,
        "HAS_NORM": around.norm is not None,
        "HAS_RESIDUAL": around.residual is not None,
        "IS_GATED": around.is_gated,
        "BLOCK_N": config.block_n,
        "num_warps": config.num_warps,
    }
    sizes = (width_in, weight.width_out, num_spans, config.num_splits, around.eps)
    grid = (num_blocks, config.num_splits)
    if num_rows == 1:
        _row_kernel[grid](*tensors, *sizes, SPANS=config.block_k // SPAN, **flags)
    else:
        _tile_kernel[grid](*tensors, num_rows, *sizes, BLOCK_M=config.block_m, **flags)


def _choose(num_rows: int, outputs: int, num_spans: int, num_processors: int) -> TileConfig:
    """Tiles such that each processor of the GPU has two programs, if the weight is large enough."""
    if num_rows == 1:
        block_m, block_n, spans, num_warps = 1, 16, 8, 4
    else:
        block_m = max(16, triton.next_power_of_2(num_rows))
        # 64 outputs of 64 rows would not fit into the registers.
        block_n, spans, num_warps = 32 if block_m == 64 else 64, 1, 4
    num_blocks = triton.cdiv(outputs, block_n)
    wanted = triton.cdiv(2 * num_processors, num_blocks)
    # Parts below a few spans cost more to add up than they spare.
    most = max(1, num_spans // (2 * spans))
    return TileConfig(block_m, block_n, spans * SPAN, min(wanted, most), num_warps)


def _vary(config: TileConfig) -> list[TileConfig]:
    """What else may be taken: one row takes several spans at a time, more rows one."""
    if config.block_m == 1:
        return neighbours(config, Ranges((4, 64), (2 * SPAN, 32 * SPAN)))
    return neighbours(config, Ranges((16, 128), (SPAN, SPAN)))


def _by_library(x: Tensor, weight: PackedInt4) -> Tensor:
    """A slice of the weight after the other, dequantized and multiplied."""
    if weight.permutation is not None:
        x = x[:, weight.permutation]
    out = x.new_empty(x.shape[0], weight.width_out)
    rows_each = max(64, SLICE_BYTES // (weight.width_in * x.itemsize) // 64 * 64)
    for first in range(0, weight.width_out, rows_each):
        end = min(first + rows_each, weight.width_out)
        bias = None if weight.bias is None else weight.bias[first:end]
        out[:, first:end] = F.linear(x, dequantize_rows(weight, first, end, x.dtype), bias)
    return out


def dequantize_rows(weight: PackedInt4, first: int, end: int, dtype: torch.dtype) -> Tensor:
    """Outputs `first` to `end` as [end - first, in], inputs in the order of the permutation."""
    num_rows = end - first
    part = torch.empty((num_rows, weight.width_in), dtype=dtype, device=weight.words.device)
    num_spans, block_n = weight.num_spans, 64
    _dequantize_kernel[(num_spans, triton.cdiv(num_rows, block_n))](
        weight.words,
        weight.scales,
        present(weight.zeros, weight.scales),
        part,
        first,
        num_rows,
        weight.width_in,
        num_spans,
        GROUP=weight.group_size,
        HAS_ZEROS=weight.zeros is not None,
        BLOCK_N=block_n,
    )
    return part


def int4_matmul_reference(
    x: Tensor,
    codes: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    permutation: Tensor | None = None,
    bias: Tensor | None = None,
    around: Around = NOTHING,
) -> Tensor:
    """The same from the codes as `pack` takes them, in float64."""
    wide = x.double()
    if around.norm is not None:
        mean = wide.square().mean(-1, keepdim=True)
        wide = wide * torch.rsqrt(mean + around.eps) * around.norm.double()
    if permutation is not None:
        wide = wide[:, permutation]
    offsets = torch.full_like(scales, SYMMETRIC_ZERO) if zeros is None else zeros
    groups = codes.double().view(*scales.shape, -1) - offsets.double()[:, :, None]
    weight = (groups * scales.double()[:, :, None]).flatten(1)
    out = F.linear(wide, weight, None if bias is None else bias.double())
    if around.is_gated:
        gate, up = out.chunk(2, dim=-1)
        out = F.silu(gate) * up
    return out if around.residual is None else out + around.residual.double()


_POINTERS = ("x_ptr", "scales_ptr", "bias_ptr", "norm_ptr", "residual_ptr", "out_ptr")
_SIZES = ("width_in", "width_out", "num_spans", "num_splits")
_SIGNATURE = {
    **dict.fromkeys(_POINTERS, "*bf16"),
    "words_ptr": "*i32",
    "zeros_ptr": "*u8",
    "permutation_ptr": "*i64",
    "parts_ptr": "*fp32",
    "counters_ptr": "*i32",
    **dict.fromkeys(_SIZES, "i32"),
    "eps": "fp32",
}


def _flags(group: int, has_zeros: bool, around: str) -> dict[str, object]:
    return {
        "GROUP": group,
        "HAS_ZEROS": has_zeros,
        "HAS_PERMUTATION": False,
        "HAS_BIAS": False,
        "HAS_NORM": around in ("norm", "gate"),
        "HAS_RESIDUAL": around == "residual",
        "IS_GATED": around == "gate",
    }


def _spec(kernel: Any, num_rows: int, group: int, around: str) -> AotSpec:
    config = _choose(num_rows, 4096, 32, 132)
    sizes = {"SPANS": config.block_k // SPAN} if num_rows == 1 else {"BLOCK_M": config.block_m}
    return AotSpec(
        kernel,
        f"{num_rows} rows groups of {group} {around}",
        _SIGNATURE if num_rows == 1 else {**_SIGNATURE, "num_rows": "i32"},
        {**_flags(group, group == 32, around), **sizes, "BLOCK_N": config.block_n},
        config.num_warps,
        multiples_of_16=("width_in", "width_out"),
    )


AOT_SPECS = [
    _spec(_row_kernel, 1, 128, "norm"),
    _spec(_row_kernel, 1, 128, "residual"),
    _spec(_row_kernel, 1, 32, "gate"),
    _spec(_tile_kernel, 16, 128, "norm"),
    _spec(_tile_kernel, 16, 32, "gate"),
    _spec(_tile_kernel, 64, 128, "gate"),
    _spec(_tile_kernel, 64, 32, "residual"),
    AotSpec(
        _dequantize_kernel,
        "groups of 128",
        {
            "words_ptr": "*i32",
            "scales_ptr": "*bf16",
            "zeros_ptr": "*u8",
            "out_ptr": "*bf16",
            **dict.fromkeys(("first_row", "num_rows", "width_in", "num_spans"), "i32"),
        },
        {"GROUP": 128, "HAS_ZEROS": False, "BLOCK_N": 64},
        multiples_of_16=("width_in",),
    ),
]
