"""The product of up to 64 rows with a 4-bit weight, on the matrix units.

In a step of `matrix_units.py`, weights are the 16 rows and eight rows of x the columns; codes
become mantissas of 128 (of 1,024 in float16). For up to eight rows of bfloat16 the excess is
subtracted at the end together with the zero, which takes the sum of x: a step of the units with
ones. Otherwise it is subtracted from each code, once for all rows (and 1,024 would cost the sum too
many digits). The norm takes the sum of the squares of x: the diagonal of a step with x itself.

A turn is 128 inputs per warp; the words of the next ones come meanwhile. Warps of a program
share outputs, each with its own inputs, or stand side by side: then they share rows of x, which
come from the L1 cache for all but the first of them.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from localllm_kernels.primitives.matrix_units import (
    add_pairs,
    code_pairs,
    four_of,
    multiply_add,
    multiply_fours,
    pairs_of,
)
from localllm_kernels.primitives.shared_memory import exchange_bytes, shared_memory, sums_over_warps
from localllm_kernels.products.int4_finish import finish, sums_of_programs
from localllm_kernels.products.int4_ring import ask_for_words, ring_bytes, stages_of, take_words
from localllm_kernels.products.int4_turn import (
    ends_group,
    fetch_words,
    group_pointers,
    groups_of_turn,
    of_groups,
    two_tiles,
    word_pointers,
    words_of_turn,
)


@triton.jit(do_not_specialize=["num_rows", "num_splits", "ahead"])
def _fragment_kernel(
    x_ptr,
    words_ptr,
    scales_ptr,
    zeros_ptr,
    bias_ptr,
    norm_ptr,
    residual_ptr,
    out_ptr,
    parts_ptr,
    counters_ptr,
    num_rows,
    width_in,
    width_out,
    num_blocks,
    num_splits,
    ahead,
    eps,
    GROUP: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_NORM: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    IS_GATED: tl.constexpr,
    IS_EVEN: tl.constexpr,
    EIGHTS: tl.constexpr,
    DEEP: tl.constexpr,
    WIDE: tl.constexpr,
    PTX: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """`x_ptr` and `norm_ptr`: int64, four 16-bit floats each, of the type of `out_ptr`; EIGHTS: the
    number of rows over 8, rounded up to a power of two; DEEP, WIDE: the warps that share outputs,
    and those that share inputs; IS_EVEN: the inputs are whole turns; OVERLAPS: whether the launch
    overlaps the one before, see `Workspace`; if so, `ahead`: the turns whose words are brought into
    the L2 cache before its results are waited for.
    """
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    is_bf16: tl.constexpr = dtype == tl.bfloat16
    by_sums: tl.constexpr = EIGHTS == 1 and is_bf16
    COUNT: tl.constexpr = groups_of_turn(GROUP)
    THREADS: tl.constexpr = 32 * DEEP * WIDE
    STAGES: tl.constexpr = stages_of(THREADS)
    IN_RING: tl.constexpr = PTX and EIGHTS > 1
    task, split = tl.program_id(0), tl.program_id(1)
    outputs = width_out // 2 if IS_GATED else width_out
    thread = tl.arange(0, THREADS)
    lane, warp = thread % 32, thread // 32
    tiles = two_tiles(task * WIDE + warp % WIDE, width_out, IS_GATED)
    g, t = lane // 4, lane % 4
    turns_each = tl.cdiv(tl.cdiv(num_blocks, 2 * DEEP), num_splits)
    start = split * turns_each * (2 * DEEP)
    end = tl.minimum(start + turns_each * (2 * DEEP), num_blocks)
    num_groups, fours = width_in // GROUP, width_in // 4
    magic = tl.full([THREADS], 0x43004300 if is_bf16 else 0x64006400, tl.int32)
    ones = tl.full([THREADS], 0x3F803F80 if is_bf16 else 0x3C003C00, tl.int32)
    no_bits = tl.zeros([THREADS], tl.int32)
    nothing = tl.zeros([THREADS], tl.float32)
    # For both tiles and every eight rows, the four values of a step.
    totals = (nothing,) * (8 * EIGHTS)
    squares = (nothing,) * (4 * EIGHTS)
    of_words = word_pointers(words_ptr, tiles, num_blocks, lane)
    of_scales = group_pointers(scales_ptr, tiles, g, num_groups)
    of_zeros = group_pointers(zeros_ptr, tiles, g, num_groups)
    mine = 2 * (warp // WIDE)
    if OVERLAPS:
        fetched = tl.minimum(start + ahead * (2 * DEEP), end)
        fetch_words(words_ptr, task, width_out, num_blocks, thread, start, fetched, IS_GATED, WIDE)
    memory, stage, next_words = thread, 0, ()
    if PTX:
        memory = shared_memory(THREADS, ring_bytes(THREADS) if IN_RING else exchange_bytes(THREADS))
    if IN_RING:
        for turn in tl.static_range(STAGES - 1):
            ask_for_words(of_words, memory, turn, start + mine + turn * (2 * DEEP), end)
    else:
        next_words = words_of_turn(of_words, start + mine, num_blocks, PTX)
    next_scales, next_zeros = (), ()
    if COUNT == 1:
        next_scales, next_zeros = _scales_and_zeros(
            of_scales, of_zeros, tiles, g, start + mine, num_groups, width_out,
            GROUP, HAS_ZEROS, IS_EVEN,
        )  # fmt: skip
    if OVERLAPS:
        gdc_wait()
        gdc_launch_dependents()
    for first in range(start, end, 2 * DEEP):
        block = first + mine
        next_block = block + 2 * DEEP
        if IN_RING:
            last = STAGES - 1 if stage == 0 else stage - 1
            ask_for_words(of_words, memory, last, block + (STAGES - 1) * (2 * DEEP), end)
            words = take_words(memory, stage)
            stage = 0 if stage == STAGES - 1 else stage + 1
        else:
            words = next_words
            next_words = words_of_turn(of_words, next_block, num_blocks, PTX)
        # Those of one group are asked for a turn ahead, too; more would take many registers.
        wanted = block if COUNT > 1 else next_block
        asked = _scales_and_zeros(
            of_scales, of_zeros, tiles, g, wanted, num_groups, width_out,
            GROUP, HAS_ZEROS, IS_EVEN,
        )  # fmt: skip
        scales, zeros = asked if COUNT > 1 else (next_scales, next_zeros)
        sums, sums_x = (nothing,) * (8 * EIGHTS), (nothing,) * 4
        for step in tl.static_range(8):
            xs = _rows_of_step(x_ptr, block, g, t, step, num_rows, fours, EIGHTS, IS_EVEN)
            if HAS_NORM:
                norm = _four_inputs(norm_ptr, block, t, step, fours, IS_EVEN)
                xs, squares = _normed(xs, norm, squares, no_bits, EIGHTS, dtype, PTX)
            if by_sums:
                sums_x = multiply_add((ones, no_bits, ones, no_bits), xs[0], sums_x, dtype, PTX)
            sums = _with_step(
                sums, xs, words, zeros, magic, step, COUNT, HAS_ZEROS, by_sums, EIGHTS, dtype, PTX
            )
            if ends_group(step, GROUP):
                totals = _with_group(
                    totals,
                    sums,
                    sums_x,
                    scales,
                    zeros,
                    step,
                    COUNT,
                    HAS_ZEROS,
                    by_sums,
                    EIGHTS,
                    dtype,
                )
                sums, sums_x = (nothing,) * (8 * EIGHTS), (nothing,) * 4
        if COUNT == 1:
            next_scales, next_zeros = asked
    found = totals
    if HAS_NORM:
        for n in tl.static_range(EIGHTS):
            found = found + (squares[4 * n], squares[4 * n + 1])
    found = sums_over_warps(found, memory, DEEP, PTX)
    if num_splits > 1:
        found, is_done = sums_of_programs(
            found, 32 * WIDE, parts_ptr, counters_ptr, task, split, num_splits
        )
        if not is_done:
            return
    _finish_rows(
        found, task, warp, g, t, num_rows, width_in, outputs, eps,
        bias_ptr, residual_ptr, out_ptr,
        HAS_NORM, HAS_BIAS, HAS_RESIDUAL, IS_GATED, EIGHTS, WIDE,
    )  # fmt: skip


@triton.jit
def _rows_of_step(
    x_ptr, block, g, t, step: tl.constexpr, num_rows, fours,
    EIGHTS: tl.constexpr, IS_EVEN: tl.constexpr,
):  # fmt: skip
    """Row g of every eight rows of x; copies of the last one, not stored, where there is none."""
    xs = ()
    for n in tl.static_range(EIGHTS):
        row = tl.minimum(8 * n + g, num_rows - 1).to(tl.int64)
        xs = xs + (_four_inputs(x_ptr + row * fours, block, t, step, fours, IS_EVEN),)
    return xs


@triton.jit
def _normed(
    xs, norm, squares, no_bits, EIGHTS: tl.constexpr, dtype: tl.constexpr, PTX: tl.constexpr
):
    """The inputs of a step times the weight of the norm, and the sums of squares with theirs."""
    more, scaled = (), ()
    for n in tl.static_range(EIGHTS):
        low, high = pairs_of(xs[n])
        more = more + multiply_add(
            (low, no_bits, high, no_bits), xs[n], four_of(squares, n), dtype, PTX
        )
        scaled = scaled + (multiply_fours(xs[n], norm, dtype, PTX),)
    return scaled, more


@triton.jit
def _with_step(
    sums, xs, words, zeros, magic, step: tl.constexpr, COUNT: tl.constexpr,
    HAS_ZEROS: tl.constexpr, by_sums: tl.constexpr, EIGHTS: tl.constexpr,
    dtype: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """The sums with the products of a step: of both tiles with every eight rows."""
    more = ()
    for m in tl.static_range(2):
        codes = _codes_of_step(words, zeros, magic, m, step, COUNT, HAS_ZEROS, by_sums, dtype, PTX)
        for n in tl.static_range(EIGHTS):
            before = four_of(sums, m * EIGHTS + n)
            more = more + multiply_add(codes, xs[n], before, dtype, PTX)
    return more


@triton.jit
def _codes_of_step(
    words,
    zeros,
    magic,
    m: tl.constexpr,
    step: tl.constexpr,
    COUNT: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    by_sums: tl.constexpr,
    dtype: tl.constexpr,
    PTX: tl.constexpr,
):
    """The codes of tile m as the rows of a step, less their excess and zeros unless `by_sums`."""
    minus_offset: tl.constexpr = -0x3CFF3D00 if dtype == tl.bfloat16 else -0x1BFF1C00  # pairs of it
    codes = ()
    for c in tl.static_range(4):
        # Outputs g and 8 + g with the first two inputs of four, then with the others.
        word = words[8 * m + 4 * (step // 4) + 2 * (c % 2) + step // 2 % 2]
        pair = code_pairs(word, magic, 8 * (step % 2) + 4 * (c // 2), PTX)
        if not by_sums:
            less = tl.full([magic.shape[0]], minus_offset + 0x00080008, tl.int32)
            if HAS_ZEROS:
                zero = zeros[(2 * m + c % 2) * COUNT + step * COUNT // 8].to(tl.int32)
                less = zero * 0x00010001 + minus_offset
            pair = add_pairs(pair, less, dtype, PTX)
        codes = codes + (pair,)
    return codes


@triton.jit
def _with_group(
    totals,
    sums,
    sums_x,
    scales,
    zeros,
    step: tl.constexpr,
    COUNT: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    by_sums: tl.constexpr,
    EIGHTS: tl.constexpr,
    dtype: tl.constexpr,
):
    """The totals with the scaled sums of the group that ends with a step. `by_sums`: less what the
    excess of the codes and their zeros make of the sum of x.
    """
    offset: tl.constexpr = 128.0 if dtype == tl.bfloat16 else 1024.0
    more = ()
    for m in tl.static_range(2):
        for n in tl.static_range(EIGHTS):
            part = four_of(sums, m * EIGHTS + n)
            total = four_of(totals, m * EIGHTS + n)
            for c in tl.static_range(4):
                value = part[c]
                if by_sums:
                    less = 8.0 + offset
                    if HAS_ZEROS:
                        # A mantissa of 2^23, without a conversion.
                        zero = zeros[(2 * m + c // 2) * COUNT + step * COUNT // 8]
                        bits = zero.to(tl.int32) | 0x4B000000
                        less = bits.to(tl.float32, bitcast=True) - (8388608.0 - offset)
                    value -= less * sums_x[c % 2]
                scale = scales[(2 * m + c // 2) * COUNT + step * COUNT // 8]
                more = more + (total[c] + scale.to(tl.float32) * value,)
    return more


@triton.jit
def _finish_rows(
    found, task, warp, g, t, num_rows, width_in, outputs, eps,
    bias_ptr, residual_ptr, out_ptr,
    HAS_NORM: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
    IS_GATED: tl.constexpr, EIGHTS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Store a thread's results; `found`: the totals, then the sums of the squares of x."""
    pair = task * WIDE + warp
    factors = ()
    for n in tl.static_range(EIGHTS):
        for c in tl.static_range(2):
            factor = 1.0
            if HAS_NORM:
                square = _diagonal(found[8 * EIGHTS + 2 * n + c], c)
                factor = tl.rsqrt(square / width_in + eps)
            factors = factors + (factor,)
    for m in tl.static_range(1 if IS_GATED else 2):
        for n in tl.static_range(EIGHTS):
            for c in tl.static_range(4):
                column = (pair if IS_GATED else 2 * pair + m) * 16 + 8 * (c // 2) + g
                row = 8 * n + 2 * t + c % 2
                finish(
                    found[4 * (m * EIGHTS + n) + c], found[4 * (EIGHTS + n) + c], column, row,
                    (warp < WIDE) & (column < outputs) & (row < num_rows),
                    factors[2 * n + c % 2], outputs,
                    bias_ptr, residual_ptr, out_ptr, HAS_BIAS, HAS_RESIDUAL, IS_GATED,
                )  # fmt: skip


@triton.jit
def _scales_and_zeros(
    of_scales,
    of_zeros,
    tiles,
    g,
    block,
    num_groups,
    width_out,
    GROUP: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    IS_EVEN: tl.constexpr,
):
    """See `of_groups`; no zeros if the weight has none."""
    scales = of_groups(of_scales, tiles, g, block, num_groups, width_out, GROUP, IS_EVEN)
    zeros = ()
    if HAS_ZEROS:
        zeros = of_groups(of_zeros, tiles, g, block, num_groups, width_out, GROUP, IS_EVEN)
    return scales, zeros


@triton.jit
def _four_inputs(ptr, block, t, step: tl.constexpr, fours, IS_EVEN: tl.constexpr):
    """The inputs of a step, four per thread; 0 after the last one."""
    four = block * 16 + t
    if IS_EVEN:
        return tl.load(ptr + four + 4 * step)
    return tl.load(ptr + four + 4 * step, mask=four + 4 * step < fours, other=0)


@triton.jit
def _diagonal(values, c: tl.constexpr):
    """For lanes 4 g + t: the value of lane g = 2 t + c of their warp, in all lanes of that t."""
    THREADS: tl.constexpr = values.shape[0]
    lane = tl.arange(0, THREADS) % 32
    kept = tl.where(lane // 4 == 2 * (lane % 4) + c, values, 0.0)
    shape: tl.constexpr = [THREADS // 32, 8, 4]
    of_columns = tl.sum(tl.reshape(kept, shape), axis=1)
    return tl.reshape(tl.broadcast_to(of_columns[:, None, :], shape), [THREADS])
