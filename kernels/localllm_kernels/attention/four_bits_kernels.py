"""Keys and values in 4 bits on a GPU: the formulas of four_bits.py for the rows of a program.

Queries are turned as keys are, so that scores are products with codes; what attention finds in
codes of values is turned back once. A scale is 16 bits of bfloat16, which are the upper half of
a float32.
"""

import triton
import triton.language as tl

from localllm_kernels.attention.four_bits import NUM_MEANS as MEANS
from localllm_kernels.attention.four_bits import OWN_KEYS as ALL_OWN_KEYS
from localllm_kernels.attention.four_bits import REACHES as ALL_REACHES
from localllm_kernels.primitives.log2 import log2

NUM_MEANS = tl.constexpr(MEANS)
OWN_KEYS = tl.constexpr(ALL_OWN_KEYS)
REACHES = tl.constexpr(ALL_REACHES)
NUM_REACHES = tl.constexpr(len(ALL_REACHES))


@triton.jit
def number_of(byte, is_low, dtype: tl.constexpr):
    """The codes in the low or the high halves of bytes, less what stands for 0."""
    # As the highest bits of the mantissa of 128: no conversion from whole numbers, which takes long
    code = (byte.to(tl.int32) << tl.where(is_low, 16, 12)) & 0xF0000
    return ((code | 0x43000000).to(tl.float32, bitcast=True) - 136.0).to(dtype)


@triton.jit
def load_scales(ptr, row, mask, KIND: tl.constexpr):
    """float32 scales of rows; of words of two scales, those of 4 bits."""
    if KIND == 3:
        # A word is the least that a GPU copies while it computes.
        word = tl.load(ptr + row // 2, mask=mask, other=0)
        return tl.where(row % 2 == 0, word << 16, word & -0x10000).to(tl.float32, bitcast=True)
    else:
        return tl.load(ptr + row, mask=mask, other=0.0)


@triton.jit
def mean_of(scale):
    """Which mean a key's scale names."""
    return (scale.to(tl.int32, bitcast=True) >> 16) & (NUM_MEANS - 1)


@triton.jit
def _is_second(DIMS: tl.constexpr, AT: tl.constexpr):
    """Which half of dimension AT of DIMS, all of 2, each number is in."""
    return tl.reshape(tl.arange(0, 2), [1] * AT + [2] + [1] * (DIMS - AT - 1)) == 1


@triton.jit
def rotated(x, SIZE: tl.constexpr):
    """float32, times the Hadamard matrix by SIZE neighbours of the last dimension; all sizes are
    powers of two.
    """
    DIMS: tl.constexpr = log2(x.numel)
    cube = tl.reshape(x, [2] * DIMS)
    for i in tl.static_range(log2(SIZE)):
        both = tl.sum(cube, axis=DIMS - 1 - i, keep_dims=True)
        cube = tl.where(_is_second(DIMS, DIMS - 1 - i), both - 2 * cube, both)
    return tl.reshape(cube, x.shape) * SIZE**-0.5


@triton.jit
def turned_query(
    query, columns, factors_ptr, means_ptr, scale, HEAD_DIM: tl.constexpr, SIZE: tl.constexpr
):
    """`query` [rows, columns] as it meets codes of keys, and its products with the means of keys,
    times `scale`. The pointers are those of a head.
    """
    is_column = columns < HEAD_DIM
    wide = query.to(tl.float32)
    offsets = ()
    for m in tl.static_range(NUM_MEANS):
        mean = tl.load(means_ptr + m * HEAD_DIM + columns, mask=is_column, other=0.0)
        offsets = offsets + (tl.sum(wide * mean[None, :], axis=1) * scale,)
    factors = tl.load(factors_ptr + columns, mask=is_column, other=1.0)
    return rotated(wide / factors[None, :], SIZE).to(query.dtype), offsets


@triton.jit
def added(offsets, others):
    """The sums of both."""
    found = ()
    for m in tl.static_range(NUM_MEANS):
        found = found + (offsets[m] + others[m],)
    return found


@triton.jit
def offsets_of_keys(offsets, scales):
    """What the means of keys, which their scales name, add: [rows, keys]."""
    mean = mean_of(scales)[None, :]
    is_odd, is_high = mean % 2 == 1, mean >= 2
    low = tl.where(is_odd, offsets[1][:, None], offsets[0][:, None])
    return tl.where(is_high, tl.where(is_odd, offsets[3][:, None], offsets[2][:, None]), low)


@triton.jit
def turned_back(
    found, total, factors_ptr, means_ptr, HEAD_DIM: tl.constexpr, SIZE: tl.constexpr,
    VALUES_ARE_KEYS: tl.constexpr,
):  # fmt: skip
    """Values [rows, columns] of what weights, whose sum is `total`, found in codes; keys that are
    values have one mean.
    """
    found = rotated(found, SIZE)
    if VALUES_ARE_KEYS:
        columns = tl.arange(0, found.shape[1])
        is_column = columns < HEAD_DIM
        factors = tl.load(factors_ptr + columns, mask=is_column, other=1.0)
        mean = tl.load(means_ptr + columns, mask=is_column, other=0.0)
        found = found / factors[None, :] + mean[None, :] * total[:, None]
    return found


@triton.jit
def _nearest(steps):
    # Adding this number rounds to a whole number, half to even.
    return tl.minimum(tl.maximum((steps + 12582912.0) - 12582912.0, -8.0), 7.0)


@triton.jit
def _inverse(scale):
    """0 where the scale is not normal."""
    return tl.where(tl.abs(scale) >= 1.1754943508222875e-38, 1 / scale, 0.0)


@triton.jit
def _marked(scale, place, KEPT: tl.constexpr):
    """A scale as bfloat16 has it, with the lowest bits of those not KEPT as in `place`."""
    bits = scale.to(tl.int32, bitcast=True)
    upper = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return (((upper & KEPT) | place) << 16).to(tl.float32, bitcast=True)


@triton.jit
def _scale_of_row(left, place, KEPT: tl.constexpr):
    """The best of a few scales for the numbers of a row."""
    # A number that is not finite makes the scale so.
    most = tl.max(tl.abs(left), axis=0) + tl.sum(left - left, axis=0)
    best, least = _marked(most, 0, 0xFFFF), float("inf")
    for i in tl.static_range(NUM_REACHES):
        tried = _marked(most / REACHES[i], place, KEPT)
        away = _nearest(left * _inverse(tried)) * tried - left
        error = tl.sum(away * away, axis=0)
        best = tl.where(error < least, tried, best)
        least = tl.minimum(error, least)
    return best


@triton.jit
def _store_codes(codes, scale, cache_ptr, scales_ptr, row, columns, HEAD_DIM: tl.constexpr):
    HALF: tl.constexpr = HEAD_DIM // 2
    whole = codes.to(tl.int32) + 8
    others = tl.gather(whole, tl.minimum(columns + HALF, HEAD_DIM - 1), axis=0)
    at = cache_ptr + row * HALF + columns
    tl.store(at, (whole | (others << 4)).to(tl.uint8), mask=columns < HALF)
    tl.store(scales_ptr + row, (scale.to(tl.int32, bitcast=True) >> 16).to(tl.int16))


@triton.jit
def store_value(x, cache_ptr, scales_ptr, row, columns, HEAD_DIM: tl.constexpr, SIZE: tl.constexpr):
    """Store a value, float32 [columns], 0 where there is no column, in row `row` of its cache."""
    left = rotated(x, SIZE)
    scale = _scale_of_row(left, 0, 0xFFFF)
    codes = _nearest(left * _inverse(scale))
    _store_codes(codes, scale, cache_ptr, scales_ptr, row, columns, HEAD_DIM)


@triton.jit
def store_key(
    x, cache_ptr, scales_ptr, row, columns, factors_ptr, means_ptr, feedback_ptr,
    HEAD_DIM: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """The same of a key; the pointers to its coding are those of a head."""
    inside = columns < HEAD_DIM
    factors = tl.load(factors_ptr + columns, mask=inside, other=0.0)
    left, place, least = x, 0, float("inf")
    for m in tl.static_range(NUM_MEANS):
        mean = tl.load(means_ptr + m * HEAD_DIM + columns, mask=inside, other=0.0)
        away = (x - mean) * factors
        distance = tl.sum(away * away, axis=0)
        left = tl.where((distance < least) | (m == 0), away, left)
        place = tl.where(distance < least, m, place)
        least = tl.minimum(distance, least)
    left = rotated(left, SIZE)
    scale = _scale_of_row(left, place, ~(NUM_MEANS - 1))
    inverse, codes = _inverse(scale), tl.zeros_like(left)
    for i in tl.range(0, HEAD_DIM, loop_unroll_factor=4):
        is_now = columns == i
        feedback = tl.load(feedback_ptr + i * HEAD_DIM + columns, mask=inside, other=0.0)
        # As whole numbers, whose sum is one instruction.
        bits = tl.sum(tl.where(is_now, left.to(tl.int32, bitcast=True), 0), axis=0)
        number = bits.to(tl.float32, bitcast=True)
        code = _nearest(number * inverse)
        codes = tl.where(is_now, code, codes)
        left -= (number - code * scale) * feedback
    _store_codes(codes, scale, cache_ptr, scales_ptr, row, columns, HEAD_DIM)
