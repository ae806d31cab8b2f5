"""The product of 2 to 64 rows with a 4-bit weight by Triton's own products of tiles; and the weight
in 16 bits, for more rows.

In bfloat16 codes become mantissas of 128, which is subtracted with the zero; in float16, mantissas
of 1,024, which is subtracted at once. (Frantar et al. 2024, "MARLIN", section 3.)
"""

import triton
import triton.language as tl

from localllm_kernels.primitives.arrival import is_last
from localllm_kernels.products.int4_finish import silu


@triton.jit
def _words_of(words_ptr, columns, is_column, block, num_blocks, i: tl.constexpr):
    """The words with inputs 32 i to 32 i + 31 of a block: [columns, 4]."""
    tile, g, h = (columns // 16).to(tl.int64), columns % 8, (columns % 16) // 8
    lane = (g * 4)[:, None] + tl.arange(0, 4)[None, :]
    at = (tile * num_blocks + block)[:, None] * 128 + lane * 4 + (2 * h + i)[:, None]
    return tl.load(words_ptr + at, mask=is_column[:, None], other=0)


@triton.jit
def _codes_of(words, s: tl.constexpr):
    """Sixteen inputs of each column, in their order: int32 [columns, 16]."""
    q = tl.arange(0, 4)
    places = 8 * s + 4 * (q // 2) + 16 * (q % 2)
    codes = (words[:, :, None] >> places[None, None, :]) & 15
    return tl.reshape(codes, [words.shape[0], 16])


@triton.jit
def _values_of(codes, dtype: tl.constexpr):
    """Codes as mantissas: 128 too large in bfloat16, exact in other types."""
    if dtype == tl.bfloat16:
        return (codes | 0x4300).to(tl.int16).to(tl.bfloat16, bitcast=True)
    if dtype == tl.float16:
        return (codes | 0x6400).to(tl.int16).to(tl.float16, bitcast=True) - 1024.0
    return codes.to(dtype)


@triton.jit
def _add_block(
    acc,
    squares,
    x_ptr,
    words_ptr,
    scales_ptr,
    zeros_ptr,
    permutation_ptr,
    norm_ptr,
    block,
    rows,
    is_row,
    columns,
    is_column,
    width_in,
    num_blocks,
    GROUP: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    HAS_PERMUTATION: tl.constexpr,
    HAS_NORM: tl.constexpr,
):
    """`acc` [rows, columns] and `squares` [rows] plus the 64 inputs of one more block."""
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    offset: tl.constexpr = 128.0 if dtype == tl.bfloat16 else 0.0
    part = tl.zeros_like(acc)
    sum_x = tl.zeros_like(squares)
    for i in tl.static_range(2):
        words = _words_of(words_ptr, columns, is_column, block, num_blocks, i)
        for s in tl.static_range(2):
            inputs = block * 64 + 32 * i + 16 * s + tl.arange(0, 16)
            is_input = inputs < width_in
            if HAS_PERMUTATION:
                inputs = tl.load(permutation_ptr + inputs, mask=is_input, other=0)
            x = tl.load(
                x_ptr + rows.to(tl.int64)[:, None] * width_in + inputs[None, :],
                mask=is_row[:, None] & is_input[None, :],
                other=0.0,
            )
            if HAS_NORM:
                wide = x.to(tl.float32)
                squares += tl.sum(wide * wide, axis=1)
                weight = tl.load(norm_ptr + inputs, mask=is_input, other=0.0).to(tl.float32)
                x = (wide * weight[None, :]).to(dtype)
            values = _values_of(_codes_of(words, s), dtype)
            part = tl.dot(x, tl.trans(values), part, input_precision="ieee")
            sum_x += tl.sum(x.to(tl.float32), axis=1)
            if (32 * i + 16 * s + 16) % GROUP == 0 or (i == 1 and s == 1):
                group = (block * 64 + 32 * i + 16 * s) // GROUP
                of_group = columns.to(tl.int64) * (width_in // GROUP) + group
                is_group = is_column & (group * GROUP < width_in)
                scale = tl.load(scales_ptr + of_group, mask=is_group, other=0.0).to(tl.float32)
                zero = tl.full(columns.shape, 8.0, tl.float32)
                if HAS_ZEROS:
                    zero = tl.load(zeros_ptr + of_group, mask=is_group, other=0).to(tl.float32)
                acc += (part - sum_x[:, None] * (zero + offset)[None, :]) * scale[None, :]
                part = tl.zeros_like(acc)
                sum_x = tl.zeros_like(squares)
    return acc, squares


@triton.jit(do_not_specialize=["num_rows", "num_splits"])
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
    num_blocks,
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
    task, split = tl.program_id(0), tl.program_id(1)
    outputs = width_out // 2 if IS_GATED else width_out
    columns = task * BLOCK_N + tl.arange(0, BLOCK_N)
    is_column = columns < outputs
    rows = tl.arange(0, BLOCK_M)
    is_row = rows < num_rows
    blocks_each = tl.cdiv(num_blocks, num_splits)
    first, end = split * blocks_each, tl.minimum((split + 1) * blocks_each, num_blocks)
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    up = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    squares = tl.zeros([BLOCK_M], tl.float32)
    ignored = tl.zeros([BLOCK_M], tl.float32)
    for block in range(first, end):
        acc, squares = _add_block(
            acc, squares, x_ptr, words_ptr, scales_ptr, zeros_ptr, permutation_ptr, norm_ptr,
            block, rows, is_row, columns, is_column, width_in, num_blocks,
            GROUP, HAS_ZEROS, HAS_PERMUTATION, HAS_NORM,
        )  # fmt: skip
        if IS_GATED:
            up, ignored = _add_block(
                up, ignored, x_ptr, words_ptr, scales_ptr, zeros_ptr, permutation_ptr, norm_ptr,
                block, rows, is_row, columns + outputs, is_column, width_in, num_blocks,
                GROUP, HAS_ZEROS, HAS_PERMUTATION, HAS_NORM,
            )  # fmt: skip
    if num_splits > 1:
        # A part: the sums of the tile, those of its second half, and those of the squares.
        PART: tl.constexpr = BLOCK_M * (2 * BLOCK_N + 1)
        parts_ptr += task.to(tl.int64) * num_splits * PART
        mine = parts_ptr + split * PART
        inside = rows[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
        tl.store(mine + inside, acc)
        if IS_GATED:
            tl.store(mine + BLOCK_M * BLOCK_N + inside, up)
        tl.store(mine + 2 * BLOCK_M * BLOCK_N + rows, squares)
        if not is_last(counters_ptr + task, num_splits):
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
        acc = silu(acc) * up
    at = rows.to(tl.int64)[:, None] * outputs + columns[None, :]
    is_inside = is_row[:, None] & is_column[None, :]
    if HAS_RESIDUAL:
        acc += tl.load(residual_ptr + at, mask=is_inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + at, acc.to(out_ptr.dtype.element_ty), mask=is_inside)


@triton.jit(do_not_specialize=["first_column", "end_column"])
def _dequantize_kernel(
    words_ptr,
    scales_ptr,
    zeros_ptr,
    out_ptr,
    first_column,
    end_column,
    width_in,
    num_blocks,
    GROUP: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Dequantize outputs into [end_column - first_column, width_in], one program per block."""
    block = tl.program_id(0)
    inside = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    columns = first_column + inside
    is_column = columns < end_column
    for i in tl.static_range(2):
        words = _words_of(words_ptr, columns, is_column, block, num_blocks, i)
        for s in tl.static_range(2):
            first = block * 64 + 32 * i + 16 * s
            group = first // GROUP
            of_group = columns.to(tl.int64) * (width_in // GROUP) + group
            is_group = is_column & (group * GROUP < width_in)
            scale = tl.load(scales_ptr + of_group, mask=is_group, other=0.0).to(tl.float32)
            zero = tl.full([BLOCK_N], 8.0, tl.float32)
            if HAS_ZEROS:
                zero = tl.load(zeros_ptr + of_group, mask=is_group, other=0).to(tl.float32)
            values = (_codes_of(words, s).to(tl.float32) - zero[:, None]) * scale[:, None]
            inputs = first + tl.arange(0, 16)
            tl.store(
                out_ptr + inside.to(tl.int64)[:, None] * width_in + inputs[None, :],
                values.to(out_ptr.dtype.element_ty),
                mask=is_column[:, None] & (inputs < width_in)[None, :],
            )
