"""What the fragments of fragments.py are where keys and values have 4 bits: see four_bits.py.

A row is half as many bytes as numbers, and both halves of the row lie in the same bytes, so a
thread has numbers of both:

    keys     lane 4 g + t: of keys g and g + 8, the t-th fourth of the bytes
    values   of keys 2 t, 2 t + 1, 2 t + 8 and 2 t + 9, the g-th eighth of the bytes

A Hadamard matrix is the same in every order of numbers that moves the bits of their indices. So
queries are turned, and what was found is turned back, in the order in which threads hold them.
"""

import triton
import triton.language as tl

from localllm_kernels.attention.four_bits_kernels import NUM_MEANS, rotated
from localllm_kernels.primitives.log2 import log2
from localllm_kernels.primitives.matrix_units import add_pairs, code_pairs, pack_pair, two_as_four


@triton.jit
def turned_fours(
    query_ptr, row, is_query, t, factors_ptr, HEAD_DIM: tl.constexpr, dtype: tl.constexpr,
    PTX: tl.constexpr,
):  # fmt: skip
    """A query's operands of all steps as they meet codes of keys, int64 [threads] each."""
    STEPS: tl.constexpr = HEAD_DIM // 16
    THREADS: tl.constexpr = t.shape[0]
    step, place = tl.arange(0, STEPS)[None, :, None], tl.arange(0, 4)[None, None, :]
    number = t[:, None, None] * (HEAD_DIM // 8) + 4 * (step % (STEPS // 2)) + place
    number += step // (STEPS // 2) * (HEAD_DIM // 2)
    at = query_ptr + row[:, None, None] * HEAD_DIM + number
    x = tl.load(at, mask=is_query[:, None, None], other=0.0).to(tl.float32)
    x = rotated(x / tl.load(factors_ptr + number), HEAD_DIM)
    even, odd = tl.split(tl.reshape(x, [THREADS, STEPS, 2, 2]))
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    low, high = pack_pair(first, third, dtype, PTX), pack_pair(second, fourth, dtype, PTX)
    return _columns_of(two_as_four(low, high))


@triton.jit
def offsets_of_columns(
    query_ptr, first_query, num_queries, kv_head, first_column, t, means_ptr, scale,
    HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr,
):  # fmt: skip
    """What each mean adds to the scores of a lane's two queries, of eight from `first_column` on:
    [threads], eight.
    """
    column, numbers = first_column + tl.arange(0, 8), tl.arange(0, HEAD_DIM)[None, :]
    row = (first_query + column // GROUP).to(tl.int64) * HEADS + kv_head * GROUP + column % GROUP
    is_query = column // GROUP < num_queries
    at = query_ptr + row[:, None] * HEAD_DIM + numbers
    x = tl.load(at, mask=is_query[:, None], other=0.0).to(tl.float32)
    found = ()
    for m in tl.static_range(NUM_MEANS):
        mean = tl.load(means_ptr + m * HEAD_DIM + numbers)
        of_query = tl.sum(x * mean, axis=1) * scale
        for c in tl.static_range(2):
            found = found + (tl.gather(of_query, 2 * t + c, axis=0),)
    return found


@triton.jit
def offset_of_key(offsets, mean, c: tl.constexpr):
    """What its mean adds to the score of a key with column c."""
    is_odd = mean % 2 == 1
    low = tl.where(is_odd, offsets[2 + c], offsets[c])
    return tl.where(mean >= 2, tl.where(is_odd, offsets[6 + c], offsets[4 + c]), low)


@triton.jit
def key_pairs_4(key_ptr, row, t, HEAD_DIM: tl.constexpr, dtype: tl.constexpr, PTX: tl.constexpr):
    """A thread's numbers of a key: two pairs for each step."""
    words = words_of(key_ptr + row * (HEAD_DIM // 8), t, HEAD_DIM // 32)
    low, high = (), ()
    for i in tl.static_range(HEAD_DIM // 32):
        low = low + numbers_of(words[i], 0, dtype, PTX)
        high = high + numbers_of(words[i], 4, dtype, PTX)
    return low + high


@triton.jit
def found_turned_back(found, STEPS: tl.constexpr):
    """Values [32, places] of what the weights found, see fragments.py."""
    EIGHTS: tl.constexpr = found.shape[1] // (4 * STEPS)
    # lanes g and t; eighths, steps, numbers and columns
    apart = tl.reshape(found, [8, 4, EIGHTS, STEPS, 2, 2])
    together = tl.permute(apart, (1, 2, 5, 0, 3, 4))
    turned = tl.permute(rotated(together, 16 * STEPS), (3, 0, 1, 4, 5, 2))
    return tl.reshape(turned, found.shape)


@triton.jit
def words_of(ptr, part, COUNT: tl.constexpr):
    """The `part`-th COUNT words of rows: [threads] each."""
    words = tl.load((ptr + part * COUNT)[:, None] + tl.arange(0, COUNT)[None, :])
    return _columns_of(words)


@triton.jit
def numbers_of(word, place: tl.constexpr, dtype: tl.constexpr, PTX: tl.constexpr):
    """The codes in one half of four bytes less what stands for 0, two pairs: of bytes 0 and 2, then
    1 and 3.
    """
    # 128 and -136 in bfloat16; 1,024 and -1,032 in float16
    magic = tl.full(word.shape, 0x43004300 if dtype == tl.bfloat16 else 0x64006400, tl.int32)
    less = tl.full(word.shape, -0x3CF73CF8 if dtype == tl.bfloat16 else -0x1BF71BF8, tl.int32)
    first = add_pairs(code_pairs(word, magic, place, PTX), less, dtype, PTX)
    return first, add_pairs(code_pairs(word, magic, place + 8, PTX), less, dtype, PTX)


@triton.jit
def _columns_of(x):
    """[threads, a power of two] as [threads] each, in their order."""
    THREADS: tl.constexpr = x.shape[0]
    found = (x,)
    for _ in tl.static_range(log2(x.shape[1])):
        more = ()
        for i in tl.static_range(len(found)):
            halves = tl.reshape(found[i], [THREADS, 2, found[i].shape[1] // 2])
            more = more + tl.split(tl.permute(halves, (0, 2, 1)))
        found = more
    columns = ()
    for i in tl.static_range(len(found)):
        columns = columns + (tl.reshape(found[i], [THREADS]),)
    return columns
