"""A sum over the inputs of a product that several programs share."""

import triton
import triton.language as tl

from localllm_kernels.primitives.arrival import is_last


@triton.jit
def add_parts(
    acc,
    parts_ptr,
    counters_ptr,
    task,
    split,
    num_splits,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """The whole sum, and whether this program has it: only the last of `num_splits` to arrive has.

    `acc`: this program's part, float32 [BLOCK_M, BLOCK_N]; parts are added in their order.
    """
    inside = tl.arange(0, BLOCK_M)[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    parts_ptr += task.to(tl.int64) * num_splits * (BLOCK_M * BLOCK_N)
    tl.store(parts_ptr + split * (BLOCK_M * BLOCK_N) + inside, acc)
    is_done = is_last(counters_ptr + task, num_splits)
    if is_done:
        acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for part in range(num_splits):
            at = parts_ptr + part * (BLOCK_M * BLOCK_N) + inside
            acc += tl.load(at, cache_modifier=".cg")
    return acc, is_done
