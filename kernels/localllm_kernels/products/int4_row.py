"""The product of one row with a 4-bit weight, on the plain cores.

Each thread has four outputs and its share of the inputs, in the layout of the weight in memory
(`int4_weight.py`), so that nothing moves between threads before the sums are done. A code stays
where it is in its word and becomes the mantissa of 2^23 with one operation; x is scaled to make up
for the code's place. (Frantar et al. 2024, "MARLIN", section 3, for the mantissas.)
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from localllm_kernels.primitives.shared_memory import exchange_bytes, shared_memory, sums_over_warps
from localllm_kernels.products.int4_finish import finish, sums_of_programs
from localllm_kernels.products.int4_turn import (
    ends_group,
    fetch_words,
    group_pointers,
    groups_of_turn,
    of_groups,
    split_four,
    two_tiles,
    word_pointers,
    words_of_turn,
)


@triton.jit(do_not_specialize=["num_splits", "ahead"])
def _row_kernel(
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
    width_in,
    width_out,
    num_blocks,
    num_splits,
    ahead,
    magic,
    eps,
    GROUP: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    HAS_PERMUTATION: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_NORM: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    IS_GATED: tl.constexpr,
    IS_EVEN: tl.constexpr,
    WARPS: tl.constexpr,
    PTX: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """`magic`: 0x4B000000, the bits of 2^23, hidden from the compiler: a constant would take one
    more instruction per code. IS_EVEN: the inputs are whole turns; `ahead`, OVERLAPS: see
    int4_fragments.py.
    """
    COUNT: tl.constexpr = groups_of_turn(GROUP)
    task, split = tl.program_id(0), tl.program_id(1)
    outputs = width_out // 2 if IS_GATED else width_out
    tiles = two_tiles(task, width_out, IS_GATED)
    thread = tl.arange(0, 32 * WARPS)
    lane = thread % 32
    g, t = lane // 4, lane % 4
    turns_each = tl.cdiv(tl.cdiv(num_blocks, 2 * WARPS), num_splits)
    start = split * turns_each * (2 * WARPS)
    end = tl.minimum(start + turns_each * (2 * WARPS), num_blocks)
    num_groups = width_in // GROUP
    nothing = tl.zeros([32 * WARPS], tl.float32)
    totals = (nothing,) * 4
    squares = nothing
    of_words = word_pointers(words_ptr, tiles, num_blocks, lane)
    of_scales = group_pointers(scales_ptr, tiles, g, num_groups)
    of_zeros = group_pointers(zeros_ptr, tiles, g, num_groups)
    mine = 2 * (thread // 32)
    if OVERLAPS:
        fetched = tl.minimum(start + ahead * (2 * WARPS), end)
        fetch_words(words_ptr, task, width_out, num_blocks, thread, start, fetched, IS_GATED, 1)
    memory = thread
    if PTX:
        memory = shared_memory(32 * WARPS, exchange_bytes(32 * WARPS))
    words = words_of_turn(of_words, start + mine, num_blocks, PTX)
    if OVERLAPS:
        gdc_wait()
        gdc_launch_dependents()
    for first in range(start, end, 2 * WARPS):
        block = first + mine
        later = words_of_turn(of_words, block + 2 * WARPS, num_blocks, PTX)
        scales = of_groups(of_scales, tiles, g, block, num_groups, width_out, GROUP, IS_EVEN)
        zeros = scales
        if HAS_ZEROS:
            zeros = of_groups(of_zeros, tiles, g, block, num_groups, width_out, GROUP, IS_EVEN)
        sums, sum_x = (nothing,) * 4, nothing
        for step in tl.static_range(8):
            place = block * 64 + 4 * t
            x = _inputs(x_ptr, permutation_ptr, place, step, width_in, HAS_PERMUTATION, IS_EVEN)
            if HAS_NORM:
                squares += (x[0] * x[0] + x[1] * x[1]) + (x[2] * x[2] + x[3] * x[3])
                norm = _inputs(
                    norm_ptr, permutation_ptr, place, step, width_in, HAS_PERMUTATION, IS_EVEN
                )
                x = (x[0] * norm[0], x[1] * norm[1], x[2] * norm[2], x[3] * norm[3])
            sum_x += (x[0] + x[1]) + (x[2] + x[3])
            near = 1.0 / (1 << 8 * (step % 2))
            x0, x1, x2, x3 = x[0] * near, x[1] * near, x[2] * (near / 16), x[3] * (near / 16)
            more = ()
            for r in tl.static_range(4):
                word = words[8 * (r // 2) + 4 * (step // 4) + 2 * (r % 2) + step // 2 % 2]
                upper = word >> 16
                added = sums[r] + _code(word, magic, 8 * (step % 2)) * x0
                added += _code(upper, magic, 8 * (step % 2)) * x1
                added += _code(word, magic, 8 * (step % 2) + 4) * x2
                added += _code(upper, magic, 8 * (step % 2) + 4) * x3
                more = more + (added,)
            sums = more
            if ends_group(step, GROUP):
                more = ()
                for r in tl.static_range(4):
                    zero = 8.0
                    if HAS_ZEROS:
                        bits = zeros[r * COUNT + step * COUNT // 8].to(tl.int32) | magic
                        zero = bits.to(tl.float32, bitcast=True) - 8388608.0
                    part = sums[r] - zero * sum_x
                    scale = scales[r * COUNT + step * COUNT // 8].to(tl.float32)
                    more = more + (totals[r] + scale * part,)
                totals = more
                sums, sum_x = (nothing,) * 4, nothing
        words = later
    found = totals
    if HAS_NORM:
        found = found + (squares,)
    found = sums_over_warps(found, memory, WARPS, PTX)
    if num_splits > 1:
        found, is_done = sums_of_programs(
            found, 32, parts_ptr, counters_ptr, task, split, num_splits
        )
        if not is_done:
            return
    factor = 1.0
    if HAS_NORM:
        factor = tl.rsqrt(_over_inputs(found[4]) / width_in + eps)
    sums = ()
    for r in tl.static_range(4):
        sums = sums + (_over_inputs(found[r]),)
    is_mine = (thread < 32) & (t == 0)
    for r in tl.static_range(2 if IS_GATED else 4):
        column = task * (16 if IS_GATED else 32) + 8 * r + g
        finish(
            sums[r], sums[(r + 2) % 4], column, column * 0, is_mine & (column < outputs), factor,
            outputs, bias_ptr, residual_ptr, out_ptr, HAS_BIAS, HAS_RESIDUAL, IS_GATED,
        )  # fmt: skip


@triton.jit
def _inputs(
    ptr,
    permutation_ptr,
    place,
    step: tl.constexpr,
    width_in,
    HAS_PERMUTATION: tl.constexpr,
    IS_EVEN: tl.constexpr,
):
    """Four neighbouring inputs per thread in a step of 16, in float32; 0 after the last one."""
    at = place[:, None] + tl.arange(0, 4)[None, :]
    if IS_EVEN and not HAS_PERMUTATION:
        return split_four(tl.load(ptr + at + 16 * step).to(tl.float32))
    at += 16 * step
    is_input = (place + 16 * step < width_in)[:, None]
    if HAS_PERMUTATION:
        at = tl.load(permutation_ptr + at, mask=is_input, other=0)
    return split_four(tl.load(ptr + at, mask=is_input, other=0.0).to(tl.float32))


@triton.jit
def _code(word, magic, place: tl.constexpr):
    """The code at bit `place`, below 20, times 2^place."""
    bits = (word & (15 << place)) | magic
    return bits.to(tl.float32, bitcast=True) - 8388608.0


@triton.jit
def _over_inputs(values):
    """[threads]: the sums over the four lanes with the same g, in each of them."""
    THREADS: tl.constexpr = values.shape[0]
    shape: tl.constexpr = [THREADS // 4, 4]
    sums = tl.sum(tl.reshape(values, shape), axis=1)
    return tl.reshape(tl.broadcast_to(sums[:, None], shape), [THREADS])
