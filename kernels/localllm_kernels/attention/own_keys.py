"""Queries' own keys, which are kept uncoded beside a cache in 4 bits (four_bits.py), on a GPU.

A first launch is over these and leaves maximum, sum and values of each query, which the second one,
over all other keys, joins to its own.
"""

from collections.abc import Callable

import triton
import triton.language as tl
from torch import Tensor

from localllm_kernels.attention.kv_cache import KVCache
from localllm_kernels.attention.paged_attention import AttentionArguments
from localllm_kernels.compiling.launch import Workspace

# Which keys a launch is over: OWN of the kernels.
ALL_KEYS, OTHER_KEYS, OWN_ONLY = 0, 1, 2


def over_all_keys(
    launch: Callable[[KVCache, AttentionArguments, int | None, Tensor, Tensor | None, int], None],
    query: Tensor,
    cache: KVCache,
    workspace: Workspace,
    num_splits: int | None,
    out: Tensor | None,
    how: AttentionArguments,
) -> Tensor:
    """`out`, or a new tensor, after one launch over all keys, or one over queries' own and one over
    the others.

    `launch`: of a cache, how it is read, the programs that share keys, the output, what is left of
    own keys, and which keys it is over.
    """
    num_tokens, heads, head_dim = query.shape
    value_dim = how.get("value_dim") or head_dim
    out = query.new_empty(num_tokens, heads, value_dim) if out is None else out
    if len(how["seq_lens"]) == 0:
        return out
    tables = how.get("uncoded_tables")
    if cache.uncoded is None or tables is None:
        launch(cache, how, num_splits, out, None, ALL_KEYS)
        return out
    own = workspace.own(num_tokens * heads * (value_dim + 4))
    # Sinks count once.
    launch(cache.uncoded, {**how, "block_tables": tables, "sinks": None}, 1, out, own, OWN_ONLY)
    launch(cache, how, num_splits, out, own, OTHER_KEYS)
    return out


@triton.jit
def shares(most, own_most):
    """What sums and values of others and of own keys are multiplied by to be added."""
    greater = tl.maximum(most, own_most)
    # From a query that sees nothing, nothing is subtracted.
    reference = tl.where(greater == float("-inf"), 0.0, greater)
    return tl.exp2(most - reference), tl.exp2(own_most - reference)


@triton.jit
def leave_own(
    own_ptr, rows, is_row, most, total, values, WIDTH: tl.constexpr, BLOCK_D: tl.constexpr
):
    """Leave what rows [BLOCK_M] have of their own keys: for each, WIDTH values, maximum and sum."""
    columns = tl.arange(0, BLOCK_D)[None, :]
    at = own_ptr + rows * (WIDTH + 4)  # so that rows of values begin at multiples of 16 bytes
    tl.store(at[:, None] + columns, values, mask=is_row[:, None] & (columns < WIDTH))
    tl.store(at + WIDTH, most, mask=is_row)
    tl.store(at + WIDTH + 1, total, mask=is_row)


@triton.jit
def with_own(
    own_ptr, rows, is_row, most, total, values, WIDTH: tl.constexpr, BLOCK_D: tl.constexpr
):
    """Sums and values with those that were left of own keys."""
    columns = tl.arange(0, BLOCK_D)[None, :]
    at = own_ptr + rows * (WIDTH + 4)
    own_most = tl.load(at + WIDTH, mask=is_row, other=float("-inf"))
    own_total = tl.load(at + WIDTH + 1, mask=is_row, other=0.0)
    is_value = is_row[:, None] & (columns < WIDTH)
    own_values = tl.load(at[:, None] + columns, mask=is_value, other=0.0)
    keep, own_keep = shares(most, own_most)
    total = total * keep + own_total * own_keep
    return total, values * keep[:, None] + own_values * own_keep[:, None]
