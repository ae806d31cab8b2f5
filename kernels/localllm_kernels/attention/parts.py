"""The keys of a task, split among programs; the one that arrives last adds up their parts.

    out = Σ_i values_i · 2^(most_i − most) / Σ_i total_i · 2^(most_i − most)

A part is [BLOCK_M, BLOCK_D] values, then [BLOCK_M] maxima and [BLOCK_M] sums, float32.
Source: Dao et al. 2023, "Flash-Decoding"; here the second reduction needs no second launch.
"""

import triton
import triton.language as tl

from localllm_kernels.compiling.launch import Workspace
from localllm_kernels.primitives.arrival import is_last


def wanted_splits(workspace: Workspace, num_tasks: int, num_keys: int, min_keys: int) -> int:
    """Programs to share the keys of each task, with at least `min_keys` each. Tasks fill the device
    better than parts that have to be added up.
    """
    most: int = triton.cdiv(num_keys, min_keys)
    return max(1, min(workspace.splits_for(num_tasks), most))


@triton.jit
def tiles_of_part(num_tiles, num_splits, split, MIN_TILES: tl.constexpr):
    """The first tile of a part, the end of its tiles, and how many parts have any. If there are
    fewer tiles than it takes to fill all splits, the other splits have none.
    """
    tiles_each = tl.maximum(tl.cdiv(num_tiles, num_splits), MIN_TILES)
    num_parts = tl.maximum(tl.cdiv(num_tiles, tiles_each), 1)
    low = split * tiles_each
    return low, tl.minimum(low + tiles_each, num_tiles), num_parts


@triton.jit
def add_parts(
    most,
    total,
    values,
    parts_ptr,
    counter_ptr,
    split,
    num_parts,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
    MAX_PARTS: tl.constexpr,
    UNROLL: tl.constexpr,
):
    """Maxima, sums and values of all parts, and whether this program is the one that has them."""
    PART: tl.constexpr = BLOCK_M * (BLOCK_D + 2)
    rows, columns = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
    inside = rows[:, None] * BLOCK_D + columns[None, :]
    mine = parts_ptr + split * PART
    tl.store(mine + inside, values)
    tl.store(mine + BLOCK_M * BLOCK_D + rows, most)
    tl.store(mine + BLOCK_M * (BLOCK_D + 1) + rows, total)
    is_done = is_last(counter_ptr, num_parts)
    if is_done:
        # Maxima and sums of all parts come in one round trip, and no part's values wait for
        # another's.
        parts = tl.arange(0, MAX_PARTS)[:, None]
        of_part = parts_ptr + parts * PART + BLOCK_M * BLOCK_D + rows[None, :]
        is_part = parts < num_parts
        mosts = tl.load(of_part, mask=is_part, other=float("-inf"), cache_modifier=".cg")
        totals = tl.load(of_part + BLOCK_M, mask=is_part, other=0.0, cache_modifier=".cg")
        most = tl.max(mosts, axis=0)
        reference = tl.where(most == float("-inf"), 0.0, most)
        total = tl.sum(totals * tl.exp2(mosts - reference[None, :]), axis=0)
        values = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
        for part in tl.range(0, num_parts, loop_unroll_factor=UNROLL):
            other = parts_ptr + part * PART
            its_most = tl.load(other + BLOCK_M * BLOCK_D + rows, cache_modifier=".cg")
            its_values = tl.load(other + inside, cache_modifier=".cg")
            values += its_values * tl.exp2(its_most - reference)[:, None]
    return most, total, values, is_done
