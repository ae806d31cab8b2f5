"""One tile of keys after another, for the rows of one program; both attention kernels use this.

Softmax is online (Milakov and Gimelshein 2018) and in base 2. Rows are queries times the heads that
share a key/value head, so a key is read once for all of them. The scales of an 8-bit cache are
applied to the columns of scores and weights, not to keys and values; so are those of a cache in 4
bits, whose queries are turned first, and values last, see four_bits_kernels.py. A sink (see
paged_attention.py) is where a row's running maximum and sum start.
"""

import triton
import triton.language as tl
from torch import Tensor

from localllm_kernels.attention.four_bits_kernels import (
    NUM_MEANS,
    OWN_KEYS,
    added,
    load_scales,
    number_of,
    offsets_of_keys,
    turned_back,
    turned_query,
)
from localllm_kernels.attention.own_keys import leave_own, with_own
from localllm_kernels.compiling.launch import present
from localllm_kernels.primitives.e4m3 import from_e4m3

LOG2_E = 1.4426950408889634
# Capabilities of GPUs with products of wide tiles and much shared memory.
WIDE = (90, 100)
# The least width of what is multiplied.
MIN_DOT = 16


@triton.jit
def _load_numbers(
    ptr, rows, columns, mask, dtype: tl.constexpr, HEAD_DIM: tl.constexpr, KIND: tl.constexpr
):
    """Keys or values as `dtype`, without their scales; `rows` and `columns`: of all numbers."""
    if KIND == 3:
        # Both halves of a row lie in the same bytes.
        HALF: tl.constexpr = HEAD_DIM // 2
        at = ptr + rows * HALF + columns % HALF
        return number_of(tl.load(at, mask=mask, other=0), columns < HALF, dtype)
    codes = tl.load(ptr + rows * HEAD_DIM + columns, mask=mask, other=0)
    if KIND == 2:
        return from_e4m3(codes).to(dtype)
    return codes.to(dtype)


@triton.jit
def attend_tiles(
    query,
    rest,
    positions,
    key_ptr,
    value_ptr,
    key_scales_ptr,
    value_scales_ptr,
    table_ptr,
    kv_head,
    first_key,
    end_key,
    length,
    scale,
    window,
    cap,
    sinks,
    factors_ptr,
    means_ptr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    REST: tl.constexpr,
    VALUES_ARE_KEYS: tl.constexpr,
    CACHE_BLOCK: tl.constexpr,
    KIND: tl.constexpr,
    ROTATED: tl.constexpr,
    OWN: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    NUM_HIDDEN: tl.constexpr,
    HAS_CAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Maximum [BLOCK_M], sum [BLOCK_M] and weighted values [BLOCK_M, BLOCK_D] of a run of keys.

    `query`: the first VALUE_DIM numbers of HEAD_DIM, [BLOCK_M, BLOCK_D], at `positions` [BLOCK_M];
    `rest`: the others, [BLOCK_M, REST], not read if REST is 0; of values only VALUE_DIM numbers are
    read. The keys are those from `first_key`, a
    multiple of BLOCK_N, up to `end_key`, of `length` in all. `scale`, `cap` and `sinks` [BLOCK_M]
    are in base 2; a sink is minus infinity where another run of keys counts it. ROTATED: neighbours
    that are rotated together in 4 bits. OWN: see own_keys.py.
    """
    dtype: tl.constexpr = query.dtype
    columns = tl.arange(0, BLOCK_D)
    is_column = columns < VALUE_DIM
    others = VALUE_DIM + tl.arange(0, REST if REST else 1)
    most = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    if HAS_SINKS:
        most = sinks
        total = tl.where(sinks > float("-inf"), 1.0, 0.0)
    values = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    offsets = (0.0, 0.0, 0.0, 0.0)
    if KIND == 3:
        factors_ptr += kv_head * HEAD_DIM
        means_ptr += kv_head * NUM_MEANS * HEAD_DIM
        query, offsets = turned_query(
            query, columns, factors_ptr, means_ptr, scale, HEAD_DIM, ROTATED
        )
        if REST:
            rest, others_offsets = turned_query(
                rest, others, factors_ptr, means_ptr, scale, HEAD_DIM, ROTATED
            )
            offsets = added(offsets, others_offsets)
    for start in range(first_key, end_key, BLOCK_N):
        keys = start + tl.arange(0, BLOCK_N)
        is_key = keys < length
        block = tl.load(table_ptr + keys // CACHE_BLOCK, mask=is_key, other=0).to(tl.int64)
        row = (block * KV_HEADS + kv_head) * CACHE_BLOCK + keys % CACHE_BLOCK
        key = _load_numbers(
            key_ptr,
            row[None, :],
            columns[:, None],
            is_key[None, :] & is_column[:, None],
            dtype,
            HEAD_DIM,
            KIND,
        )
        scores = tl.dot(query, key, input_precision="ieee")
        if REST:
            further = _load_numbers(
                key_ptr,
                row[None, :],
                others[:, None],
                is_key[None, :] & (others < HEAD_DIM)[:, None],
                dtype,
                HEAD_DIM,
                KIND,
            )
            scores = tl.dot(rest, further, scores, input_precision="ieee")
        scores *= scale
        if KIND != 0:
            key_scales = load_scales(key_scales_ptr, row, is_key, KIND)
            scores *= key_scales[None, :]
            if KIND == 3:
                scores += offsets_of_keys(offsets, key_scales)
        if HAS_CAP:
            # cap · tanh(score / cap), of scores that are log2(e) times as large
            scores = cap - 2 * cap / (1 + tl.exp2(scores * (2.8853900817779268 / cap)))
        is_seen = keys[None, :] <= positions[:, None]
        if OWN:
            is_own = keys[None, :] >= (positions // OWN_KEYS * OWN_KEYS)[:, None]
            is_seen &= is_own if OWN == 2 else ~is_own
        if HAS_WINDOW:
            is_seen &= keys[None, :] > positions[:, None] - window
        if NUM_HIDDEN:
            is_seen &= keys[None, :] >= NUM_HIDDEN
        scores = tl.where(is_seen, scores, float("-inf"))
        most_now = tl.maximum(most, tl.max(scores, axis=1))
        # If a row has seen nothing yet, nothing is subtracted from its minus infinities.
        reference = tl.where(most_now == float("-inf"), 0.0, most_now)
        weights = tl.exp2(scores - reference[:, None])
        keep = tl.exp2(most - reference)
        total = total * keep + tl.sum(weights, axis=1)
        if KIND != 0:
            weights *= load_scales(value_scales_ptr, row, is_key, KIND)[None, :]
        if VALUES_ARE_KEYS:
            value = tl.trans(key)
        else:
            value = _load_numbers(
                value_ptr,
                row[:, None],
                columns[None, :],
                is_key[:, None] & is_column[None, :],
                dtype,
                HEAD_DIM,
                KIND,
            )
        values = values * keep[:, None] + tl.dot(weights.to(dtype), value, input_precision="ieee")
        most = most_now
    return most, total, values


@triton.jit
def end_rows(
    most, total, values, rows, is_row, out_ptr, own_ptr, kv_head, factors_ptr, means_ptr,
    HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, KIND: tl.constexpr, ROTATED: tl.constexpr,
    VALUES_ARE_KEYS: tl.constexpr, OWN: tl.constexpr, NUM_HIDDEN: tl.constexpr,
    BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Store the results of `rows` [BLOCK_M], from what they have of all runs of keys, or leave that
    of their own keys.
    """
    if OWN == 2:
        leave_own(own_ptr, rows, is_row, most, total, values, VALUE_DIM, BLOCK_D)
    else:
        if KIND == 3:
            factors_ptr += kv_head * HEAD_DIM
            means_ptr += kv_head * NUM_MEANS * HEAD_DIM
            values = turned_back(
                values, total, factors_ptr, means_ptr, HEAD_DIM, ROTATED, VALUES_ARE_KEYS
            )
        if OWN:
            total, values = with_own(own_ptr, rows, is_row, most, total, values, VALUE_DIM, BLOCK_D)
        if NUM_HIDDEN:
            total = tl.where(total == 0, 1.0, total)
        columns = tl.arange(0, BLOCK_D)[None, :]
        at, is_inside = rows[:, None] * VALUE_DIM + columns, is_row[:, None] & (columns < VALUE_DIM)
        result = (values / total[:, None]).to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + at, result, mask=is_inside)


def score_arguments(
    cap: float | None, sinks: Tensor | None, instead: Tensor
) -> dict[str, Tensor | float | bool]:
    """A cap and sinks as the kernels take them; `instead`: a tensor that stands for no sinks."""
    return {
        "sinks_ptr": present(sinks, instead),
        "cap": 0.0 if cap is None else cap * LOG2_E,
        "HAS_CAP": cap is not None,
        "HAS_SINKS": sinks is not None,
    }


def head_constants(head_dim: int, value_dim: int) -> dict[str, int]:
    """How a head's numbers are divided: those that values have too, and the others."""
    rest = head_dim - value_dim
    return {
        "VALUE_DIM": value_dim,
        "REST": max(MIN_DOT, triton.next_power_of_2(rest)) if rest else 0,
        "BLOCK_D": max(MIN_DOT, triton.next_power_of_2(value_dim)),
    }
