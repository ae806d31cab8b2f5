"""What a warp reads of a 4-bit weight in one turn of the kernels without tiles: 128 inputs of two
tiles, 32 outputs, in the layout of `int4_weight.py`. All tensors are [threads].

A compiler places loads late, to need few registers, so what a turn loads for the next one arrives
after it is needed. The words of a program's first turns are therefore brought into the L2 cache
first, which takes no register, and even before the kernel waits for its inputs.
"""

import triton
import triton.language as tl


@triton.constexpr_function
def ends_group(step, group_size):
    """Whether sums are scaled after step `step` of the eight in a turn, with 16 inputs each."""
    return step == 7 or (step + 1) * 16 % group_size == 0


@triton.constexpr_function
def groups_of_turn(group_size):
    """Groups that begin within a turn; 1 if a group is larger than a turn."""
    return max(128 // group_size, 1)


@triton.jit
def split_four(values):
    """[threads, 4] as four [threads]."""
    THREADS: tl.constexpr = values.shape[0]
    even, odd = tl.split(tl.reshape(values, [THREADS, 2, 2]))
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    return first, second, third, fourth


@triton.jit
def two_tiles(task, width_out, IS_GATED: tl.constexpr):
    """The two tiles of a program, int64: neighbours, or the same outputs of both halves."""
    if IS_GATED:
        return task.to(tl.int64), (task + width_out // 32).to(tl.int64)
    last = tl.cdiv(width_out, 16) - 1
    return (2 * task).to(tl.int64), tl.minimum(2 * task + 1, last).to(tl.int64)


@triton.jit
def word_pointers(words_ptr, tiles, num_blocks, lane):
    """Pointers to each thread's four words of the first block of both tiles: [threads, 4] each."""
    words_ptr += lane[:, None] * 4 + tl.arange(0, 4)[None, :]
    return words_ptr + tiles[0] * num_blocks * 128, words_ptr + tiles[1] * num_blocks * 128


@triton.jit
def words_of_turn(pointers, block, num_blocks):
    """Sixteen words per thread: those of tile m and block b of the turn begin at 8 m + 4 b. Past
    the end of the inputs the last block is read again.
    """
    words = ()
    for m in tl.static_range(2):
        for b in tl.static_range(2):
            place = tl.minimum(block + b, num_blocks - 1) * 128
            words = words + split_four(tl.load(pointers[m] + place[:, None]))
    return words


@triton.jit
def fetch_words(words_ptr, tiles, num_blocks, thread, first, end):
    """Bring both tiles' words from block `first` up to `end` into the L2 cache. Those of a tile are
    contiguous, so one thread asks for all (PTX ISA, "cp.async.bulk.prefetch"; capability 9.0).
    """
    tile = tl.where(thread == 0, tiles[0], tiles[1])
    num_bytes = tl.where((thread < 2) & (first < end), (end - first) * 512, 0)
    tl.inline_asm_elementwise(
        "{ .reg .pred p; setp.ne.s32 p, $2, 0;"
        " @p cp.async.bulk.prefetch.L2.global [$1], $2; mov.b32 $0, 0; }",
        "=r,l,r",
        [(words_ptr + (tile * num_blocks + first) * 128).to(tl.int64), num_bytes],
        tl.int32,
        False,
        1,
    )


@triton.jit
def group_pointers(ptr, tiles, g, num_groups, GROUP: tl.constexpr, IS_EVEN: tl.constexpr):
    """Pointers to the groups of a thread's four rows of outputs: that of tile m and output 8 h + g
    is at 2 m + h.
    """
    if IS_EVEN:
        num_groups = tl.multiple_of(num_groups, groups_of_turn(GROUP))
    first = ptr + (tiles[0] * 16 + g) * num_groups
    second = ptr + (tiles[1] * 16 + g) * num_groups
    return first, first + 8 * num_groups, second, second + 8 * num_groups


@triton.jit
def of_groups(
    pointers, tiles, g, block, num_groups, width_out, GROUP: tl.constexpr, IS_EVEN: tl.constexpr
):
    """The values of the turn's groups for a thread's four rows of outputs: a tuple of rows times
    groups, with 0 where there is none.
    """
    COUNT: tl.constexpr = groups_of_turn(GROUP)
    WIDE: tl.constexpr = COUNT if COUNT < 4 else 4
    found = ()
    for r in tl.static_range(4):
        is_output = tiles[r // 2] * 16 + 8 * (r % 2) + g < width_out
        for part in tl.static_range(COUNT // WIDE):
            group = block * 64 // GROUP if GROUP >= 128 else block // 2 * COUNT + part * WIDE
            if WIDE == 1:
                is_there = is_output & (group < num_groups)
                found = found + (tl.load(pointers[r] + group, mask=is_there, other=0),)
            else:
                at = group[:, None] + tl.arange(0, WIDE)[None, :]
                is_there = is_output[:, None] & ((at < num_groups) if not IS_EVEN else True)
                values = tl.load(pointers[r][:, None] + at, mask=is_there, other=0)
                found = found + (tl.split(values) if WIDE == 2 else split_four(values))
    return found
