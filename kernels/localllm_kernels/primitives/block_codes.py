"""The values of GGUF's blocks in a kernel, STEP neighbouring inputs at a time.

For each type there is a function that reads the bytes of such a step, of some outputs, and returns
their values. A step is four blocks of 32 values, or half of a block of 256: there the second half
of the inputs has bytes of its own for the lower bits of its codes, but shares those of the others.

Every byte is read once by one thread, and makes as many values as it has codes: these are put
beside each other (`tl.join`) and brought into the order of the inputs, which moves nothing between
threads. Where a code's bits are in several bytes, they are put together before that, byte by byte.
Source of the layouts: `src/ggml-common.h` and `src/ggml-quants.c` of ggml;
`localllm/model/packed/gguf_blocks.py` has the same in torch.
"""

import triton
import triton.language as tl

# Inputs of a step.
STEP = 128
_OF_STEP = tl.constexpr(STEP)
# The sixteen values of IQ4_NL and IQ4_XS plus 128, as the bytes of four words, lowest first.
_IQ4_WORDS = tl.constexpr((0x3F2D1801, 0x766A5D4F, 0xA6998D81 - (1 << 32), 0xF1D9C5B5 - (1 << 32)))


@triton.jit
def block_values(
    codes_ptr,
    row_at,
    is_row,
    start,
    width_in,
    TYPE: tl.constexpr,
    NUM_VALUES: tl.constexpr,
    NUM_BYTES: tl.constexpr,
):
    """The values of inputs `start` to `start` + STEP, float32 [outputs, STEP]; zeros, or tiny
    values for MXFP4, where there are no inputs or outputs.

    `row_at`: int64 [outputs], the byte where each output begins; `is_row`: [outputs]; NUM_VALUES,
    NUM_BYTES: of a block.
    """
    if NUM_VALUES == 256:
        at, half = row_at + start // 256 * NUM_BYTES, start % 256 // 128
        if TYPE == "Q2_K":
            return _q2_k(codes_ptr, at, is_row, half)
        elif TYPE == "Q3_K":
            return _q3_k(codes_ptr, at, is_row, half)
        elif TYPE == "Q4_K":
            return _q4_k(codes_ptr, at, is_row, half)
        elif TYPE == "Q5_K":
            return _q5_k(codes_ptr, at, is_row, half)
        elif TYPE == "Q6_K":
            return _q6_k(codes_ptr, row_at, is_row, start // 256, width_in // 256, half)
        else:
            tl.static_assert(TYPE == "IQ4_XS")
            return _iq4_xs(codes_ptr, at, is_row, half)
    else:
        blocks = start // 32 + tl.arange(0, _OF_STEP // 32)
        at = row_at[:, None] + blocks[None, :] * NUM_BYTES
        is_block = is_row[:, None] & (blocks < width_in // 32)[None, :]
        if TYPE == "Q4_0":
            return _q4_0(codes_ptr, at, is_block)
        elif TYPE == "Q4_1":
            return _q4_1(codes_ptr, at, is_block)
        elif TYPE == "Q5_0":
            return _q5_0(codes_ptr, at, is_block)
        elif TYPE == "Q5_1":
            return _q5_1(codes_ptr, at, is_block)
        elif TYPE == "Q8_0":
            return _q8_0(codes_ptr, at, is_block)
        elif TYPE == "IQ4_NL":
            return _iq4_nl(codes_ptr, at, is_block)
        else:
            tl.static_assert(TYPE == "MXFP4")
            return _mxfp4(codes_ptr, at, is_block)


@triton.jit
def _half(codes_ptr, at, mask):
    """The 16-bit floats at these bytes, which are even, in 32 bits."""
    halves_ptr = codes_ptr.to(tl.pointer_type(tl.float16))
    return tl.load(halves_ptr + (at >> 1), mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _bytes(codes_ptr, at, mask, FIRST: tl.constexpr, COUNT: tl.constexpr):
    """COUNT bytes from FIRST on, behind each of `at`: uint8 [*at.shape, COUNT]."""
    places = FIRST + tl.arange(0, COUNT)
    if len(at.shape) == 1:
        return tl.load(codes_ptr + at[:, None] + places[None, :], mask=mask[:, None], other=0)
    else:
        of_blocks = codes_ptr + at[:, :, None]
        return tl.load(of_blocks + places[None, None, :], mask=mask[:, :, None], other=0)


@triton.jit
def _number(codes, MIDDLE: tl.constexpr):
    """Codes below 2^23, less MIDDLE, as float32.

    As the lower bits of a float of 2^23: conversions are a quarter as fast on a GPU.
    """
    return (codes.to(tl.int32) | 0x4B000000).to(tl.float32, bitcast=True) - (8388608.0 + MIDDLE)


@triton.jit
def _nibbles(codes):
    """Both codes of each byte, the low ones of all first: uint8 [a, b, c] -> [a, b, 2 c]."""
    both = tl.permute(tl.join(codes & 15, codes >> 4), (0, 1, 3, 2))
    return tl.reshape(both, [codes.shape[0], codes.shape[1], 2 * codes.shape[2]])


@triton.jit
def _fifth_bits(codes_ptr, at, mask, FIRST: tl.constexpr):
    """Sixteen times the bits of four bytes, lowest first: [a, b] -> uint8 [a, b, 32]."""
    codes = _bytes(codes_ptr, at, mask, FIRST, 4)[:, :, :, None]
    bits = (codes >> tl.arange(0, 8).to(tl.uint8)[None, None, None, :]) & 1
    return tl.reshape(bits << 4, [at.shape[0], at.shape[1], 32])


@triton.jit
def _in_order(values):
    """[outputs, groups, inputs of a group] -> [outputs, STEP]."""
    return tl.reshape(values, [values.shape[0], _OF_STEP])


@triton.jit
def _q4_0(codes_ptr, at, mask):
    codes = _nibbles(_bytes(codes_ptr, at, mask, 2, 16))
    return _in_order(_number(codes, 8) * _half(codes_ptr, at, mask)[:, :, None])


@triton.jit
def _q4_1(codes_ptr, at, mask):
    codes = _nibbles(_bytes(codes_ptr, at, mask, 4, 16))
    scale, offset = _half(codes_ptr, at, mask), _half(codes_ptr, at + 2, mask)
    return _in_order(_number(codes, 0) * scale[:, :, None] + offset[:, :, None])


@triton.jit
def _q5_0(codes_ptr, at, mask):
    codes = _nibbles(_bytes(codes_ptr, at, mask, 6, 16)) | _fifth_bits(codes_ptr, at, mask, 2)
    return _in_order(_number(codes, 16) * _half(codes_ptr, at, mask)[:, :, None])


@triton.jit
def _q5_1(codes_ptr, at, mask):
    codes = _nibbles(_bytes(codes_ptr, at, mask, 8, 16)) | _fifth_bits(codes_ptr, at, mask, 4)
    scale, offset = _half(codes_ptr, at, mask), _half(codes_ptr, at + 2, mask)
    return _in_order(_number(codes, 0) * scale[:, :, None] + offset[:, :, None])


@triton.jit
def _q8_0(codes_ptr, at, mask):
    # Signed: with the sign's bit turned over they are 128 more, without a sign.
    codes = _bytes(codes_ptr, at, mask, 2, 32) ^ 0x80
    return _in_order(_number(codes, 128) * _half(codes_ptr, at, mask)[:, :, None])


@triton.jit
def _iq4_number(codes):
    """The value of a code of IQ4: a byte of one of four words."""
    small = tl.where(codes < 4, _IQ4_WORDS[0], _IQ4_WORDS[1])
    large = tl.where(codes < 12, _IQ4_WORDS[2], _IQ4_WORDS[3])
    word = tl.where(codes < 8, small, large)
    return _number((word >> ((codes & 3) * 8).to(tl.int32)) & 0xFF, 128)


@triton.jit
def _iq4_nl(codes_ptr, at, mask):
    codes = _nibbles(_bytes(codes_ptr, at, mask, 2, 16))
    return _in_order(_iq4_number(codes) * _half(codes_ptr, at, mask)[:, :, None])


@triton.jit
def _mxfp4(codes_ptr, at, mask):
    bits = _nibbles(_bytes(codes_ptr, at, mask, 1, 16)).to(tl.int32)
    # The exponent and the fraction (e2m1) where float32 has them; 2^126 puts the exponent right.
    values = ((bits & 8) << 28 | (bits & 7) << 22).to(tl.float32, bitcast=True) * 2.0**126
    exponents = tl.load(codes_ptr + at, mask=mask, other=0).to(tl.int32)
    # Of 0, the bits are those of 2^-127, below the normal numbers.
    scales = tl.where(exponents == 0, 1 << 22, exponents << 23).to(tl.float32, bitcast=True)
    return _in_order(values * scales[:, :, None])


@triton.jit
def _side_by_side(first, second, third, fourth):
    """Four runs of inputs: [outputs, 32] each -> [outputs, 4, 32]."""
    runs = tl.join(tl.join(first, third), tl.join(second, fourth))
    return tl.reshape(tl.permute(runs, (0, 2, 3, 1)), [first.shape[0], 4, 32])


@triton.jit
def _late(codes, half):
    """With the upper four bits of bytes in place of the lower ones for a block's second half."""
    return tl.where(half == 0, codes, codes >> 4)


@triton.jit
def _of_16(codes):
    """[outputs, 4, 32] -> [outputs, 8, 16], as scales belong to them."""
    return tl.reshape(codes, [codes.shape[0], _OF_STEP // 16, 16])


@triton.jit
def _q2_k(codes_ptr, at, mask, half):
    bits = _bytes(codes_ptr, at + 32 * half, mask, 16, 32)
    codes = _of_16(_side_by_side(bits & 3, bits >> 2 & 3, bits >> 4 & 3, bits >> 6))
    steps = _bytes(codes_ptr, at + 8 * half, mask, 0, 8)
    scales = _half(codes_ptr, at + 80, mask)[:, None] * _number(steps & 15, 0)
    offsets = _half(codes_ptr, at + 82, mask)[:, None] * _number(steps >> 4, 0)
    return _in_order(scales[:, :, None] * _number(codes, 0) - offsets[:, :, None])


@triton.jit
def _q3_k(codes_ptr, at, mask, half):
    high = _late(_bytes(codes_ptr, at, mask, 0, 32), half)
    bits = _bytes(codes_ptr, at + 32 * half, mask, 32, 32)
    codes = _of_16(
        _side_by_side(
            bits & 3 | high << 2 & 4,
            bits >> 2 & 3 | high << 1 & 4,
            bits >> 4 & 3 | high & 4,
            bits >> 6 | high >> 1 & 4,
        )
    )
    low = (_bytes(codes_ptr, at, mask, 96, 8).to(tl.int32) >> 4 * half) & 15
    groups = tl.arange(0, 8)
    upper_at = codes_ptr + at[:, None] + (104 + groups % 4)[None, :]
    shifts = (groups // 4 * 2 + 4 * half).to(tl.uint8)
    upper = (tl.load(upper_at, mask=mask[:, None], other=0) >> shifts[None, :]) & 3
    scales = _half(codes_ptr, at + 108, mask)[:, None] * _number(low | upper << 4, 32)
    return _in_order(scales[:, :, None] * _number(codes, 4))


@triton.jit
def _of_32(codes_ptr, at, mask, half, codes):
    """Codes [outputs, 4, 32] with the scales and offsets at the beginning of the blocks.

    Eight of each, of six bits: those of the first half of the inputs are the lower bits of eight
    bytes; those of the second half have their lower four bits in the last four bytes and the upper
    two in the first eight.
    """
    first, second = _bytes(codes_ptr, at, mask, 4, 4), _bytes(codes_ptr, at, mask, 8, 4)
    last = _bytes(codes_ptr, at, mask, 12, 4)
    scales = tl.where(half == 0, first & 63, (last & 15) | (first >> 6) << 4)
    offsets = tl.where(half == 0, second & 63, (last >> 4) | (second >> 6) << 4)
    scale = _half(codes_ptr, at, mask)[:, None] * _number(scales, 0)
    offset = _half(codes_ptr, at + 2, mask)[:, None] * _number(offsets, 0)
    return _in_order(scale[:, :, None] * _number(codes, 0) - offset[:, :, None])


@triton.jit
def _q4_k(codes_ptr, at, mask, half):
    # 32 bytes serve 64 inputs; the low codes come first.
    first = _bytes(codes_ptr, at + 64 * half, mask, 16, 32)
    second = _bytes(codes_ptr, at + 64 * half, mask, 48, 32)
    codes = _side_by_side(first & 15, first >> 4, second & 15, second >> 4)
    return _of_32(codes_ptr, at, mask, half, codes)


@triton.jit
def _q5_k(codes_ptr, at, mask, half):
    first = _bytes(codes_ptr, at + 64 * half, mask, 48, 32)
    second = _bytes(codes_ptr, at + 64 * half, mask, 80, 32)
    high = _late(_bytes(codes_ptr, at, mask, 16, 32), half)
    codes = _side_by_side(
        first & 15 | high << 4 & 16,
        first >> 4 | high << 3 & 16,
        second & 15 | high << 2 & 16,
        second >> 4 | high << 1 & 16,
    )
    return _of_32(codes_ptr, at, mask, half, codes)


@triton.jit
def _q6_k(codes_ptr, row_at, mask, block, num_blocks, half):
    """Of rows as `coded_blocks.arranged` has them: the same bytes of all blocks together."""
    low_at = row_at + block * 128 + half * 64
    first, second = _bytes(codes_ptr, low_at, mask, 0, 32), _bytes(codes_ptr, low_at, mask, 32, 32)
    high_at = row_at + num_blocks * 128 + block * 64 + half * 32
    high = _bytes(codes_ptr, high_at, mask, 0, 32)
    codes = _of_16(
        _side_by_side(
            first & 15 | high << 4 & 48,
            second & 15 | high << 2 & 48,
            first >> 4 | high & 48,
            second >> 4 | high >> 2 & 48,
        )
    )
    steps = _bytes(codes_ptr, row_at + num_blocks * 192 + block * 16 + half * 8, mask, 0, 8) ^ 0x80
    scale = _half(codes_ptr, row_at + num_blocks * 208 + block * 2, mask)
    return _in_order((scale[:, None] * _number(steps, 128))[:, :, None] * _number(codes, 32))


@triton.jit
def _iq4_xs(codes_ptr, at, mask, half):
    groups = tl.arange(0, 4)
    group_at = at[:, None] + (64 * half + 16 * groups)[None, :]
    is_group = tl.broadcast_to(mask[:, None], group_at.shape)
    codes = _nibbles(_bytes(codes_ptr, group_at, is_group, 8, 16))
    low_at = codes_ptr + at[:, None] + (4 + 2 * half + groups // 2)[None, :]
    low = tl.load(low_at, mask=is_group, other=0) >> (groups % 2 * 4).to(tl.uint8)[None, :] & 15
    high = tl.load(codes_ptr + at + 2 + half, mask=mask, other=0)[:, None]
    steps = low | (high >> (groups * 2).to(tl.uint8)[None, :] & 3) << 4
    scales = _half(codes_ptr, at, mask)[:, None] * _number(steps, 32)
    return _in_order(_iq4_number(codes) * scales[:, :, None])
