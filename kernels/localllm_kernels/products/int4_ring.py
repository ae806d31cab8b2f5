"""The words of the next turns of a warp, on their way into shared memory.

A thread reads only what it has copied itself, so there is no barrier, and what is under way takes
no register. From nine rows on, registers are what limits the warps of a processor; with fewer,
loads into registers (`int4_turn.py`) are faster (docs/performance.md).
"""

import triton
import triton.language as tl

from localllm_kernels.primitives.shared_memory import MAX_BYTES

_BYTES = 4 * 16  # of a thread's words in a turn
_MAX_STAGES = 4
_SIXTEEN_AND_ONE = tl.constexpr(",".join(["=&r"] * 16 + ["r"]))


@triton.constexpr_function
def stages_of(threads):
    """The turns whose words a program has in shared memory, the present one among them."""
    return max(min(MAX_BYTES // (_BYTES * threads), _MAX_STAGES), 1)


@triton.constexpr_function
def ring_bytes(threads):
    """The shared memory that a program needs for words."""
    return _BYTES * threads * stages_of(threads)


@triton.jit
def ask_for_words(pointers, memory, stage, block, end):
    """Copy a thread's words of a turn into a stage of shared memory; zeros from block `end` on."""
    THREADS: tl.constexpr = memory.shape[0]
    place = memory + (stage * (4 * 16 * THREADS) + 16 * tl.arange(0, THREADS))
    first = block * 128
    tl.inline_asm_elementwise(
        _copies(THREADS),
        "=r,r,l,l,l,l,r,r",
        [
            place,
            pointers[0] + first,
            pointers[0] + (first + 128),
            pointers[1] + first,
            pointers[1] + (first + 128),
            tl.where(block < end, 16, 0),
            tl.where(block + 1 < end, 16, 0),
        ],
        tl.int32,
        False,
        1,
    )


@triton.jit
def take_words(memory, stage):
    """Sixteen words per thread, when they have arrived: those of tile m and block b of the turn
    begin at 8 m + 4 b. Words of all later stages may still be under way.
    """
    THREADS: tl.constexpr = memory.shape[0]
    place = memory + (stage * (4 * 16 * THREADS) + 16 * tl.arange(0, THREADS))
    return tl.inline_asm_elementwise(
        _reads(THREADS), _SIXTEEN_AND_ONE, [place], (tl.int32,) * 16, False, 1
    )


@triton.constexpr_function
def _copies(threads):
    """PTX ISA, "cp.async": sixteen bytes each, past the L1 cache."""
    code = [
        f"cp.async.cg.shared.global [$1 + {16 * threads * i}], [${2 + i}], 16, ${6 + i % 2};"
        for i in range(4)
    ]
    return " ".join([*code, "cp.async.commit_group; mov.b32 $0, 0;"])


@triton.constexpr_function
def _reads(threads):
    code = [f"cp.async.wait_group {stages_of(threads) - 1};"]
    for i in range(4):
        words = ", ".join(f"${4 * i + j}" for j in range(4))
        code += [f"ld.shared.v4.b32 {{{words}}}, [$16 + {16 * threads * i}];"]
    return " ".join(code)
