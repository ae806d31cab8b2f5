"""The sums of one row with blocks of Q4_K, Q5_K and Q6_K, whose bytes can be read in words.

Eight neighbouring threads read a block's codes, 16 bytes each, and the inputs that belong to them;
these serve four outputs. So nothing moves between threads before the sums are done, and a group's
scale and offset are made once for 16 inputs. A code becomes the upper bits of a mantissa:

    m = 1 + code / 16,  so  Σ code · x = 16 · (Σ m · x − Σ x)

which takes no conversion and no subtraction for each code. Of Q5_K it is 32, of Q6_K 64.
"""

import triton
import triton.language as tl

THREADS = 128
# Outputs of a program: four of each warp. Inputs of a turn: a warp reads four blocks.
OUTPUTS_OF_ROW, STEP_OF_ROW = 16, 1024
ROW_TYPES = frozenset(("Q4_K", "Q5_K", "Q6_K"))
_THREADS = tl.constexpr(THREADS)


@triton.jit
def row_sums(
    x_ptr, codes_ptr, first, num_outputs, row_bytes, width_in, begin, end, TYPE: tl.constexpr
):
    """Sums over inputs `begin` to `end`, both at the ends of blocks, of outputs `first` to `first`
    + 16: float32 [16, 1].
    """
    BITS: tl.constexpr = 6 if TYPE == "Q6_K" else 5 if TYPE == "Q5_K" else 4
    BLOCK_WORDS: tl.constexpr = 44 if BITS == 5 else 36
    # What the mantissas are above the codes, by which all are divided.
    MIDDLE: tl.constexpr = 1.5 if BITS == 6 else 1.0
    words_ptr = codes_ptr.to(tl.pointer_type(tl.int32))
    num_blocks = width_in // 256
    thread = tl.arange(0, _THREADS)
    warp, part = thread // 32, thread % 8
    # The low codes of a thread's bytes belong to 16 inputs from here on, the high ones to 16 that
    # begin `apart` further.
    run, apart = part // 2, 32
    inputs_at = run * 64 + part % 2 * 16
    if BITS == 6:
        run, apart = part % 4 // 2, 64
        inputs_at = part // 4 * 128 + part % 4 * 16
    nothing = tl.zeros([_THREADS], tl.float32)
    sums = (nothing, nothing, nothing, nothing)
    for start in tl.range(begin, end, 1024, num_stages=1):
        block = start // 256 + thread % 32 // 8
        is_block = block < end // 256
        x_at = x_ptr + block * 256 + inputs_at
        low_0, low_1 = _planes(x_at, is_block), _planes(x_at + 8, is_block)
        x_at += apart
        high_0, high_1 = _planes(x_at, is_block), _planes(x_at + 8, is_block)
        low_x, high_x = _total(low_0) + _total(low_1), _total(high_0) + _total(high_1)
        more = ()
        for i in tl.static_range(4):
            output = first + 4 * warp + i
            mask = is_block & (output < num_outputs)
            row_at = output.to(tl.int64) * row_bytes
            if BITS == 6:
                of_row = words_ptr + row_at // 4
                code_0, code_1 = _words(of_row + block * 32 + part * 4, mask)
                upper_at = num_blocks * 32 + block * 16 + part // 4 * 8 + part % 2 * 4
                upper_0, upper_1 = _words(of_row + upper_at, mask)
                low_scale, high_scale = _scales_6(codes_ptr, row_at, block, num_blocks, part, mask)
            else:
                head_at = words_ptr + row_at // 4 + block * BLOCK_WORDS
                code_0, code_1 = _words(head_at + (BLOCK_WORDS - 32) + part * 4, mask)
                upper_0, upper_1 = code_0, code_1
                if BITS == 5:
                    upper_0, upper_1 = _words(head_at + 4 + part % 2 * 4, mask)
                low_scale, low_offset, high_scale, high_offset = _scales(head_at, mask, run)
            if BITS > 4:
                upper_0, upper_1 = upper_0 >> (2 * run)[:, None], upper_1 >> (2 * run)[:, None]
            low = _dots(code_0, upper_0, low_0, 0, BITS) + _dots(code_1, upper_1, low_1, 0, BITS)
            high = _dots(code_0, upper_0, high_0, 1, BITS)
            high += _dots(code_1, upper_1, high_1, 1, BITS)
            added = low_scale * (tl.sum(low, axis=1) - MIDDLE * low_x)
            added += high_scale * (tl.sum(high, axis=1) - MIDDLE * high_x)
            added = added * (1 << BITS) + sums[i]
            if BITS != 6:
                added -= low_offset * low_x + high_offset * high_x
            more = more + (added,)
        sums = more
    of_threads = tl.join(tl.join(sums[0], sums[2]), tl.join(sums[1], sums[3]))
    of_warps = tl.sum(tl.reshape(of_threads, [_THREADS // 32, 32, 4]), axis=1)
    return tl.reshape(of_warps, [_THREADS // 8, 1])


@triton.jit
def _planes(x_at, mask):
    """Eight neighbours of each thread, as those of the first, second, third and fourth bytes of two
    words: four of float32 [threads, 2].
    """
    x = tl.load(x_at[:, None] + tl.arange(0, 8)[None, :], mask=mask[:, None], other=0.0)
    even, odd = tl.split(tl.reshape(x.to(tl.float32), [_THREADS, 2, 2, 2]))
    x0, x2 = tl.split(even)
    x1, x3 = tl.split(odd)
    return x0, x1, x2, x3


@triton.jit
def _total(planes):
    return tl.sum(planes[0] + planes[1] + (planes[2] + planes[3]), axis=1)


@triton.jit
def _words(at, mask):
    """The first two and the last two of four words, int32 [threads, 2] each."""
    words = tl.load(at[:, None] + tl.arange(0, 4)[None, :], mask=mask[:, None], other=0)
    return tl.split(tl.permute(tl.reshape(words, [_THREADS, 2, 2]), (0, 2, 1)))


@triton.jit
def _dots(words, upper, planes, PLACE: tl.constexpr, BITS: tl.constexpr):
    """Σ m · x of two words' codes in the low (PLACE 0) or the high (1) halves of their bytes;
    `upper`: words with the bits above these four.
    """
    total = tl.zeros(words.shape, tl.float32)
    for i in tl.static_range(4):
        bits = _moved(words, 8 * i + 4 * PLACE, 23 - BITS) & (15 << (23 - BITS)) | 0x3F800000
        if BITS == 5:
            bits |= _moved(upper, 8 * i + PLACE, 22) & 0x400000
        if BITS == 6:
            bits |= _moved(upper, 8 * i + 4 * PLACE, 21) & 0x600000
        total += bits.to(tl.float32, bitcast=True) * planes[i]
    return total


@triton.jit
def _moved(words, FROM: tl.constexpr, TO: tl.constexpr):
    """With bit FROM at bit TO."""
    if FROM < TO:
        return words << (TO - FROM)
    else:
        return words >> (FROM - TO)


@triton.jit
def _scales_6(codes_ptr, row_at, block, num_blocks, part, mask):
    """The scales of the thread's first 16 inputs and of its second, of Q6_K."""
    at = row_at + num_blocks * 192 + block * 16 + part // 4 * 8 + part % 4
    steps_ptr = codes_ptr.to(tl.pointer_type(tl.int8))
    low = tl.load(steps_ptr + at, mask=mask, other=0).to(tl.float32)
    high = tl.load(steps_ptr + at + 4, mask=mask, other=0).to(tl.float32)
    halves_ptr = codes_ptr.to(tl.pointer_type(tl.float16))
    scale_at = (row_at + num_blocks * 208 + block * 2) >> 1
    scale = tl.load(halves_ptr + scale_at, mask=mask, other=0.0).to(tl.float32)
    return scale * low, scale * high


@triton.jit
def _scales(head_at, mask, run):
    """The scale and the offset of the thread's first group, and of its second; `run`: which of the
    four pairs of groups they are, see `block_codes._of_32`.
    """
    place, is_late = run % 2 * 16, run >= 2
    halves = tl.load(head_at, mask=mask, other=0)
    first = tl.load(head_at + 1, mask=mask, other=0) >> place
    second = tl.load(head_at + 2, mask=mask, other=0) >> place
    last = tl.load(head_at + 3, mask=mask, other=0) >> place
    scales = tl.where(is_late, last & 0x0F0F | (first >> 2) & 0x3030, first & 0x3F3F)
    offsets = tl.where(is_late, (last >> 4) & 0x0F0F | (second >> 2) & 0x3030, second & 0x3F3F)
    scale = (halves & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    offset = ((halves >> 16) & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    low_scale, low_offset = scale * _byte(scales, 0), offset * _byte(offsets, 0)
    return low_scale, low_offset, scale * _byte(scales, 8), offset * _byte(offsets, 8)


@triton.jit
def _byte(word, FROM: tl.constexpr):
    """As a mantissa of 2^23, see block_codes.py."""
    return ((word >> FROM) & 0xFF | 0x4B000000).to(tl.float32, bitcast=True) - 8388608.0
