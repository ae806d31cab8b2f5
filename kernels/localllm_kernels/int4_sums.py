"""What some more inputs add to a sum with 4-bit weights; their layout stands in `int4_weight.py`.

One row is a sum of vectors on the plain cores: the nibble stays where it is in the word and becomes
the mantissa of a float of 2^23 by one operation, and the place it stood at goes into x. Several
rows are products of tiles, where a nibble is the mantissa of a bfloat16 of 128 (of a float16 of
1,024), which is subtracted with the zero. (Frantar et al. 2024, "MARLIN", section 3.)
"""

import triton
import triton.language as tl


@triton.jit
def add_row(
    acc,
    squares,
    x_ptr,
    words_ptr,
    scales_ptr,
    zeros_ptr,
    permutation_ptr,
    norm_ptr,
    first_span,
    end_span,
    columns,
    is_column,
    width_in,
    num_spans,
    GROUP: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    HAS_PERMUTATION: tl.constexpr,
    HAS_NORM: tl.constexpr,
    SPANS: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """`acc` [BLOCK_N, SPANS, 16] and `squares` [SPANS, 16] with the inputs of SPANS more spans."""
    spans = first_span + tl.arange(0, SPANS)
    within = tl.arange(0, 16)[None, :]
    is_span = spans < end_span
    is_word = is_column[:, None, None] & is_span[None, :, None]
    at = columns.to(tl.int64)[:, None, None] * (num_spans * 16)
    words = tl.load(
        words_ptr + at + (spans[:, None] * 16 + within)[None, :, :], mask=is_word, other=0
    )
    part = tl.zeros([BLOCK_N, SPANS, 16], tl.float32)
    sum_x = tl.zeros([SPANS, 16], tl.float32)
    for plane in tl.static_range(8):
        inputs = spans[:, None] * 128 + plane * 16 + within
        is_input = is_span[:, None] & (inputs < width_in)
        if HAS_PERMUTATION:
            inputs = tl.load(permutation_ptr + inputs, mask=is_input, other=0)
        x = tl.load(x_ptr + inputs, mask=is_input, other=0.0).to(tl.float32)
        if HAS_NORM:
            squares += x * x
            x *= tl.load(norm_ptr + inputs, mask=is_input, other=0.0).to(tl.float32)
        # A mantissa has room for five nibbles; the last three come down first.
        place = 4 * (plane % 5)
        bits = words if plane < 5 else words >> 20
        bits = (bits & (15 << place)) | 0x4B000000
        codes = bits.to(tl.float32, bitcast=True) - 8388608.0
        part += codes * (x * (1.0 / (1 << place)))[None, :, :]
        sum_x += x
        if (plane * 16 + 16) % GROUP == 0 or plane == 7:
            group = (spans * 128 + plane * 16) // GROUP
            of_group = columns[:, None] * (width_in // GROUP) + group[None, :]
            is_group = is_column[:, None] & (is_span & (group * GROUP < width_in))[None, :]
            scale = tl.load(scales_ptr + of_group, mask=is_group, other=0.0).to(tl.float32)
            if HAS_ZEROS:
                zero = tl.load(zeros_ptr + of_group, mask=is_group, other=0).to(tl.float32)
                part -= zero[:, :, None] * sum_x[None, :, :]
            else:
                part -= 8.0 * sum_x[None, :, :]
            acc += scale[:, :, None] * part
            part = tl.zeros([BLOCK_N, SPANS, 16], tl.float32)
            sum_x = tl.zeros([SPANS, 16], tl.float32)
    return acc, squares


@triton.jit
def _plane_values(words, plane: tl.constexpr, dtype: tl.constexpr):
    """Codes as mantissas: 128 too large in bfloat16, as they are in other types."""
    nibbles = (words >> (4 * plane)) & 15
    if dtype == tl.bfloat16:
        return (nibbles | 0x4300).to(tl.int16).to(tl.bfloat16, bitcast=True)
    if dtype == tl.float16:
        return (nibbles | 0x6400).to(tl.int16).to(tl.float16, bitcast=True) - 1024.0
    return nibbles.to(dtype)


@triton.jit
def add_tile(
    acc,
    squares,
    x_ptr,
    words_ptr,
    scales_ptr,
    zeros_ptr,
    permutation_ptr,
    norm_ptr,
    span,
    rows,
    is_row,
    columns,
    is_column,
    width_in,
    num_spans,
    GROUP: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    HAS_PERMUTATION: tl.constexpr,
    HAS_NORM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """`acc` [BLOCK_M, BLOCK_N] and `squares` [BLOCK_M] with the inputs of one more span."""
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    offset: tl.constexpr = 128.0 if dtype == tl.bfloat16 else 0.0
    within = tl.arange(0, 16)
    at = columns.to(tl.int64)[:, None] * (num_spans * 16) + (span * 16 + within)[None, :]
    words = tl.load(words_ptr + at, mask=is_column[:, None], other=0)
    part = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    sum_x = tl.zeros([BLOCK_M], tl.float32)
    for plane in tl.static_range(8):
        inputs = span * 128 + plane * 16 + within
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
        values = _plane_values(words, plane, dtype)
        part = tl.dot(x, tl.trans(values), part, input_precision="ieee")
        sum_x += tl.sum(x.to(tl.float32), axis=1)
        if (plane * 16 + 16) % GROUP == 0 or plane == 7:
            group = (span * 128 + plane * 16) // GROUP
            of_group = columns * (width_in // GROUP) + group
            is_group = is_column & (group * GROUP < width_in)
            scale = tl.load(scales_ptr + of_group, mask=is_group, other=0.0).to(tl.float32)
            zero = tl.full([BLOCK_N], 8.0, tl.float32)
            if HAS_ZEROS:
                zero = tl.load(zeros_ptr + of_group, mask=is_group, other=0).to(tl.float32)
            part -= sum_x[:, None] * (zero + offset)[None, :]
            acc += part * scale[None, :]
            part = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
            sum_x = tl.zeros([BLOCK_M], tl.float32)
    return acc, squares
