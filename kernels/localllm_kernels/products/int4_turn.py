"""What a warp reads of a 4-bit weight in one turn of the kernels without tiles: 128 inputs of two
tiles, 32 outputs, in the layout of `int4_weight.py`. All tensors are [threads].

A compiler places loads late, to need few registers, so what a turn loads for the next one would
arrive after it is needed. No load moves past a barrier; one of a warp takes no instruction where
its threads have not parted, and keeps them early. The words of a program's first turns are brought
into the L2 cache even before the kernel waits for its inputs.
"""

import triton
import triton.language as tl

_SIXTEEN_AND_FOUR = tl.constexpr(",".join(["=&r"] * 16 + ["l"] * 4))
# Four loads of sixteen bytes, and the barrier.
_LOADS = tl.constexpr(
    "".join(
        f"ld.global.v4.b32 {{${4 * i}, ${4 * i + 1}, ${4 * i + 2}, ${4 * i + 3}}}, [${16 + i}]; "
        for i in range(4)
    )
    + "bar.warp.sync 0xffffffff;"
)


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
def two_tiles(pair, width_out, IS_GATED: tl.constexpr):
    """The two tiles of a warp, int64: neighbours, or the same of both halves; at most the last."""
    if IS_GATED:
        first = tl.minimum(pair, width_out // 32 - 1)
        return first.to(tl.int64), (first + width_out // 32).to(tl.int64)
    last = tl.cdiv(width_out, 16) - 1
    return tl.minimum(2 * pair, last).to(tl.int64), tl.minimum(2 * pair + 1, last).to(tl.int64)


@triton.jit
def word_pointers(words_ptr, tiles, num_blocks, lane):
    """Pointers to each thread's four words of the first block of both tiles."""
    words_ptr += lane * 4
    return words_ptr + tiles[0] * num_blocks * 128, words_ptr + tiles[1] * num_blocks * 128


@triton.jit
def words_of_turn(pointers, block, num_blocks, PTX: tl.constexpr):
    """Sixteen words per thread: those of tile m and block b of the turn begin at 8 m + 4 b. Past
    the end of the inputs the last block is read again.
    """
    places = ()
    for m in tl.static_range(2):
        for b in tl.static_range(2):
            places = places + (pointers[m] + tl.minimum(block + b, num_blocks - 1) * 128,)
    words = ()
    if PTX:
        words = tl.inline_asm_elementwise(
            _LOADS, _SIXTEEN_AND_FOUR, places, (tl.int32,) * 16, False, 1
        )
    else:
        for i in tl.static_range(4):
            words = words + split_four(tl.load(places[i][:, None] + tl.arange(0, 4)[None, :]))
    return words


@triton.jit
def fetch_words(
    words_ptr,
    task,
    width_out,
    num_blocks,
    thread,
    first,
    end,
    IS_GATED: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Bring the words of a program's tiles from block `first` up to `end` into the L2 cache. Those
    of a tile are contiguous, so one thread asks for all (PTX ISA, "cp.async.bulk.prefetch";
    capability 9.0). WIDE: the pairs of tiles.
    """
    tiles = two_tiles(task * WIDE + thread % WIDE, width_out, IS_GATED)
    tile = tl.where(thread < WIDE, tiles[0], tiles[1])
    num_bytes = tl.where((thread < 2 * WIDE) & (first < end), (end - first) * 512, 0)
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
def group_pointers(ptr, tiles, g, num_groups):
    """Pointers to the groups of a thread's four outputs; tile m, output 8 h + g: at 2 m + h."""
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
    found = ()
    for r in tl.static_range(4):
        is_output = tiles[r // 2] * 16 + 8 * (r % 2) + g < width_out
        for i in tl.static_range(COUNT):
            group = block * 64 // GROUP if GROUP >= 128 else block // 2 * COUNT + i
            is_there = is_output
            if GROUP >= 128 or not IS_EVEN:
                is_there &= group < num_groups
            found = found + (tl.load(pointers[r] + group, mask=is_there, other=0),)
    return found
