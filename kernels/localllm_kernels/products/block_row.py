"""The sums of one row with blocks of Q4_K and Q5_K, whose bytes can be read in words.

Eight neighbouring threads read a block's codes, 16 bytes each, and the inputs that belong to them;
these serve four outputs. So nothing moves between threads before the sums are done, and a group's
scale and offset are made once for 16 inputs. A code becomes the upper bits of a mantissa:

    m = 1 + code / 16,  so  Σ code · x = 16 · (Σ m · x − Σ x)

which takes no conversion and no subtraction for each code. For Q5_K it is 32.
"""

import triton
import triton.language as tl

THREADS = 128
# Outputs of a program: four of each warp. Inputs of a turn: a warp reads four blocks.
OUTPUTS_OF_ROW, STEP_OF_ROW = 16, 1024
ROW_TYPES = frozenset(("Q4_K", "Q5_K"))
_THREADS = tl.constexpr(THREADS)


@triton.jit
def row_sums(x_ptr, codes_ptr, first, num_outputs, row_bytes, begin, end, HAS_FIFTH: tl.constexpr):
    """Sums over inputs `begin` to `end`, both at the ends of blocks, of outputs `first` to `first`
    + 16: float32 [16, 1]. HAS_FIFTH: the type is Q5_K.
    """
    block_words: tl.constexpr = 44 if HAS_FIFTH else 36
    whole: tl.constexpr = 32.0 if HAS_FIFTH else 16.0
    words_ptr = codes_ptr.to(tl.pointer_type(tl.int32))
    thread = tl.arange(0, _THREADS)
    warp, part = thread // 32, thread % 8
    # Of the four runs of 64 inputs in a block, two threads have one, which is two groups.
    run, inputs_at = part // 2, part // 2 * 64 + part % 2 * 16
    place, is_late = run % 2 * 16, run >= 2
    nothing = tl.zeros([_THREADS], tl.float32)
    sums = (nothing, nothing, nothing, nothing)
    for start in tl.range(begin, end, 1024, num_stages=1):
        block = start // 256 + thread % 32 // 8
        is_block = block < end // 256
        x_at = x_ptr + block * 256 + inputs_at
        low_0, low_1 = _planes(x_at, is_block), _planes(x_at + 8, is_block)
        high_0, high_1 = _planes(x_at + 32, is_block), _planes(x_at + 40, is_block)
        low_x, high_x = _total(low_0) + _total(low_1), _total(high_0) + _total(high_1)
        more = ()
        for i in tl.static_range(4):
            output = first + 4 * warp + i
            mask = is_block & (output < num_outputs)
            head_at = words_ptr + output.to(tl.int64) * (row_bytes // 4) + block * block_words
            low_scale, low_offset, high_scale, high_offset = _scales(head_at, mask, place, is_late)
            at = head_at + (block_words - 32) + part * 4
            code_0, code_1 = _words(at, mask)
            fifth_0, fifth_1 = code_0, code_1
            if HAS_FIFTH:
                fifth_0, fifth_1 = _words(head_at + 4 + part % 2 * 4, mask)
                fifth_0, fifth_1 = fifth_0 >> (2 * run)[:, None], fifth_1 >> (2 * run)[:, None]
            low = _dots(code_0, fifth_0, low_0, 0, HAS_FIFTH)
            low += _dots(code_1, fifth_1, low_1, 0, HAS_FIFTH)
            high = _dots(code_0, fifth_0, high_0, 1, HAS_FIFTH)
            high += _dots(code_1, fifth_1, high_1, 1, HAS_FIFTH)
            added = sums[i] + low_scale * whole * (tl.sum(low, axis=1) - low_x)
            added += high_scale * whole * (tl.sum(high, axis=1) - high_x)
            more = more + (added - low_offset * low_x - high_offset * high_x,)
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
def _dots(words, fifth, planes, PLACE: tl.constexpr, HAS_FIFTH: tl.constexpr):
    """Σ m · x of two words' codes in the low (PLACE 0) or the high (1) halves of their bytes."""
    total = tl.zeros(words.shape, tl.float32)
    for i in tl.static_range(4):
        bits = _moved(words, 8 * i + 4 * PLACE, 18 if HAS_FIFTH else 19)
        bits = bits & (0x3C0000 if HAS_FIFTH else 0x780000) | 0x3F800000
        if HAS_FIFTH:
            bits |= _moved(fifth, 8 * i + PLACE, 22) & 0x400000
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
def _scales(head_at, mask, place, is_late):
    """The scale and the offset of the thread's first group, and of its second; `place`: where the
    bits of both begin in each word; `is_late`: they are among the last four of the block's.
    """
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
