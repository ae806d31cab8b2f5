"""The last part of the kernels with 4-bit weights, after their sums."""

import triton
import triton.language as tl

from localllm_kernels.primitives.arrival import is_last


@triton.jit
def silu(x):
    """x · sigmoid(x)."""
    return x / (1.0 + tl.exp(-x))


@triton.jit
def sums_of_programs(mine, LENGTH: tl.constexpr, parts_ptr, counters_ptr, task, split, num_splits):
    """The sums of all `num_splits` programs that share a task, in the order of their parts; and
    whether this is the program that has them, the one that arrives last.

    `mine`: a tuple of [threads], this program's, of which the first LENGTH count.
    """
    COUNT: tl.constexpr = len(mine)
    THREADS: tl.constexpr = mine[0].shape[0]
    thread = tl.arange(0, THREADS)
    counts = thread < LENGTH
    parts_ptr += task.to(tl.int64) * num_splits * (COUNT * LENGTH) + thread
    for i in tl.static_range(COUNT):
        tl.store(parts_ptr + (split * COUNT + i) * LENGTH, mine[i], mask=counts)
    is_done = is_last(counters_ptr + task, num_splits)
    total = (tl.zeros([THREADS], tl.float32),) * COUNT
    if is_done:
        for part in range(num_splits):
            more = ()
            for i in tl.static_range(COUNT):
                at = parts_ptr + (part * COUNT + i) * LENGTH
                added = tl.load(at, mask=counts, other=0.0, cache_modifier=".cg")
                more = more + (total[i] + added,)
            total = more
    return total, is_done


@triton.jit
def finish(
    sums,
    up,
    column,
    row,
    is_inside,
    factor,
    outputs,
    bias_ptr,
    residual_ptr,
    out_ptr,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    IS_GATED: tl.constexpr,
):
    """Store outputs `column` of rows `row`; `up`: the sums of the second half, if it is gated."""
    sums *= factor
    if HAS_BIAS:
        sums += tl.load(bias_ptr + column, mask=is_inside, other=0.0).to(tl.float32)
    if IS_GATED:
        up *= factor
        if HAS_BIAS:
            up += tl.load(bias_ptr + outputs + column, mask=is_inside, other=0.0).to(tl.float32)
        sums = silu(sums) * up
    at = row.to(tl.int64) * outputs + column
    if HAS_RESIDUAL:
        sums += tl.load(residual_ptr + at, mask=is_inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + at, sums.to(out_ptr.dtype.element_ty), mask=is_inside)
