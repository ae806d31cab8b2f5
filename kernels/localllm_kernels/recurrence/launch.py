"""The recurrences of recurrence.py on a GPU, in three launches: the matrices, what the rings keep,
and the norms with the gates.

A program of the first takes some columns of a head's matrix, which know nothing of each other,
through all tokens of a request, in order. Every program computes the convolution of its head's
query and key by itself, so the rings are written only after all have read them.
"""

from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from localllm_kernels.compiling.aot import AotSpec
from localllm_kernels.compiling.launch import Workspace, present
from localllm_kernels.recurrence.recurrence import (
    LENGTH_EPS,
    Heads,
    RecurrenceRows,
    RecurrenceWeights,
)
from localllm_kernels.recurrence.state_cache import StateCache, States, StateSlots
from localllm_kernels.recurrence.state_rings import keep_inputs

COLUMNS = 16


@triton.jit
def _convolved(
    inputs_ptr,
    kept_ptr,
    conv_ptr,
    bias_ptr,
    channels,
    is_channel,
    row,
    position,
    start,
    input_stride,
    kept_stride,
    ring,
    width,
    HAS_BIAS: tl.constexpr,
    TAPS: tl.constexpr,
):
    """silu(bias + convolution) at `position`, of which `row` is the row in the batch; the ring of
    the request begins at `kept_ptr`.
    """
    total = tl.zeros([channels.shape[0]], tl.float32)
    if HAS_BIAS:
        total += tl.load(bias_ptr + channels, mask=is_channel, other=0.0)
    for tap in tl.static_range(TAPS):
        seen = position - TAPS + 1 + tap
        is_new = is_channel & (seen >= start)
        is_kept = is_channel & (seen >= 0) & (seen < start)
        new_at = inputs_ptr + (row - TAPS + 1 + tap).to(tl.int64) * input_stride + channels
        kept_at = kept_ptr + (seen + ring) % ring * kept_stride + channels
        x = tl.load(new_at, mask=is_new, other=0.0).to(tl.float32)
        x += tl.load(kept_at, mask=is_kept, other=0.0)
        total += x * tl.load(conv_ptr + tap * width + channels, mask=is_channel, other=0.0)
    return total / (1.0 + tl.exp(-total))


@triton.jit
def _factor(
    factors_ptr, kept_ptr, column, row, position, start, factor_stride, kept_stride, ring, width
):
    """A factor at `position`, from the batch or from the ring."""
    new_at = factors_ptr + row.to(tl.int64) * factor_stride + column
    kept_at = kept_ptr + position % ring * kept_stride + width + column
    found = tl.load(new_at, mask=position >= start, other=0.0).to(tl.float32)
    return found + tl.load(kept_at, mask=position < start, other=0.0)


@triton.jit
def _matrices_kernel(
    inputs_ptr,
    factors_ptr,
    conv_ptr,
    conv_bias_ptr,
    decay_ptr,
    bias_ptr,
    skip_ptr,
    requests_ptr,
    saves_ptr,
    kept_ptr,
    matrices_ptr,
    found_ptr,
    input_stride,
    factor_stride,
    kept_stride,
    ring,
    width,
    query_at,
    key_at,
    value_at,
    num_values,
    share,
    key_width,
    value_width,
    shrink,
    most,
    IS_DELTA: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    TAPS: tl.constexpr,
    LENGTH_EPS: tl.constexpr,
    KEYS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """`found`: float32 [padded_tokens, values], before norm and gate; KEYS: a power of two."""
    request, head = tl.program_id(2), tl.program_id(1)
    about = requests_ptr + request * 8
    slot, first_row = tl.load(about), tl.load(about + 1)
    start, end = tl.load(about + 2), tl.load(about + 3)
    stands, settled = tl.load(about + 4), tl.load(about + 5)
    save, last_save = tl.load(about + 6), tl.load(about + 7)
    rows, columns = tl.arange(0, KEYS), tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    is_key, is_value = rows < key_width, columns < value_width
    is_inside = is_key[:, None] & is_value[None, :]
    at = (head * key_width + rows[:, None]) * value_width + columns[None, :]
    of_slot = num_values.to(tl.int64) * key_width * value_width
    own = matrices_ptr + slot * of_slot + at
    matrix = tl.load(own, mask=is_inside & (stands > 0), other=0.0).to(tl.float32)
    kept_ptr += slot * ring * kept_stride
    queries, keys = (
        query_at + head // share * key_width + rows,
        key_at + head // share * key_width + rows,
    )
    values = value_at + head * value_width + columns
    fades, bias = tl.load(decay_ptr + head), tl.load(bias_ptr + head)
    skip = tl.load(skip_ptr + head)
    for position in range(stands, end):
        row = first_row + position - start
        query = _convolved(
            inputs_ptr, kept_ptr, conv_ptr, conv_bias_ptr, queries, is_key, row, position, start,
            input_stride, kept_stride, ring, width, HAS_BIAS, TAPS,
        )  # fmt: skip
        key = _convolved(
            inputs_ptr, kept_ptr, conv_ptr, conv_bias_ptr, keys, is_key, row, position, start,
            input_stride, kept_stride, ring, width, HAS_BIAS, TAPS,
        )  # fmt: skip
        value = _convolved(
            inputs_ptr, kept_ptr, conv_ptr, conv_bias_ptr, values, is_value, row, position, start,
            input_stride, kept_stride, ring, width, HAS_BIAS, TAPS,
        )  # fmt: skip
        last = head + num_values if IS_DELTA else head
        a = bias + _factor(
            factors_ptr, kept_ptr, last, row, position, start, factor_stride, kept_stride, ring,
            width,
        )  # fmt: skip
        grown = tl.maximum(a, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(a)))
        matrix *= tl.exp(fades * grown)
        if IS_DELTA:
            b = _factor(
                factors_ptr, kept_ptr, head, row, position, start, factor_stride, kept_stride,
                ring, width,
            )  # fmt: skip
            query *= shrink * tl.rsqrt(tl.sum(query * query) + LENGTH_EPS)
            key *= tl.rsqrt(tl.sum(key * key) + LENGTH_EPS)
            held = tl.sum(matrix * key[:, None], axis=0)
            delta = most / (1.0 + tl.exp(-b)) * (value - held)
        else:
            delta = grown * value
        matrix += key[:, None] * delta[None, :]
        kept = matrix.to(matrices_ptr.dtype.element_ty)
        matrix = kept.to(tl.float32)
        found = tl.sum(matrix * query[:, None], axis=0)
        if not IS_DELTA:
            found += skip * value
        found_at = found_ptr + (row * num_values + head).to(tl.int64) * value_width + columns
        tl.store(found_at, found, mask=is_value & (position >= start))
        tl.store(own, kept, mask=is_inside & (position + 1 == settled))
        wanted = tl.load(saves_ptr + 2 * save, mask=save < last_save, other=-1)
        if position + 1 == wanted:
            to = tl.load(saves_ptr + 2 * save + 1)
            tl.store(matrices_ptr + to * of_slot + at, kept, mask=is_inside)
            save += 1


@triton.jit
def _finish_kernel(
    found_ptr,
    gate_ptr,
    norm_ptr,
    out_ptr,
    gate_stride,
    all_width,
    norm_width,
    eps,
    IS_DELTA: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A stretch that is normed as one, of a row."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    inside = tl.arange(0, BLOCK)
    is_inside, at = inside < norm_width, part * norm_width + inside
    x = tl.load(found_ptr + row * all_width + at, mask=is_inside, other=0.0)
    gate = tl.load(gate_ptr + row * gate_stride + at, mask=is_inside, other=0.0).to(tl.float32)
    gate = gate / (1.0 + tl.exp(-gate))
    weight_at = norm_ptr + inside if IS_DELTA else norm_ptr + at
    weight = tl.load(weight_at, mask=is_inside, other=0.0)
    if not IS_DELTA:
        x *= gate
    x = x * tl.rsqrt(tl.sum(x * x) / norm_width + eps) * weight
    if IS_DELTA:
        x *= gate
    tl.store(out_ptr + row * all_width + at, x.to(out_ptr.dtype.element_ty), mask=is_inside)


def recurrence(
    rows: RecurrenceRows,
    weights: RecurrenceWeights,
    heads: Heads,
    cache: StateCache,
    states: States,
) -> Tensor:
    """See recurrence_reference. The columns of a row must lie together."""
    assert cache.matrix is not None
    count, ring = len(rows.inputs), cache.rows.shape[-2]
    # Padding rows are written by no request.
    found = torch.zeros(count, heads.values, device=rows.inputs.device)
    out = torch.empty_like(found, dtype=rows.inputs.dtype)
    tables = states.on(found.device)
    strides = rows.inputs.stride(0), rows.factors.stride(0), heads.row_width
    columns = min(COLUMNS, triton.next_power_of_2(heads.value_width))
    grid = (triton.cdiv(heads.value_width, columns), heads.num_values, len(tables.requests))
    _matrices_kernel[grid](
        rows.inputs,
        rows.factors,
        weights.conv,
        present(weights.conv_bias, weights.conv),
        weights.decay,
        weights.bias,
        present(weights.skip, weights.bias),
        tables.requests,
        tables.saves,
        cache.rows,
        cache.matrix,
        found,
        *strides,
        ring,
        heads.conv_width,
        *heads.firsts,
        heads.num_values,
        heads.num_values // heads.num_keys,
        heads.key_width,
        heads.value_width,
        heads.key_width**-0.5,
        weights.most,
        IS_DELTA=heads.is_delta,
        HAS_BIAS=weights.conv_bias is not None,
        TAPS=len(weights.conv),
        LENGTH_EPS=LENGTH_EPS,
        KEYS=triton.next_power_of_2(heads.key_width),
        COLUMNS=columns,
    )
    keep_inputs(rows.inputs, rows.factors, heads.conv_width, cache, tables)
    _finish_kernel[count, heads.values // heads.norm_width](
        found,
        rows.gate,
        weights.norm,
        out,
        rows.gate.stride(0),
        heads.values,
        heads.norm_width,
        weights.eps,
        IS_DELTA=heads.is_delta,
        BLOCK=triton.next_power_of_2(heads.norm_width),
    )
    return out


_DELTA = Heads(16, 32, 128, 128, is_delta=True)
_MAMBA = Heads(1, 64, 128, 64, is_delta=False)


def _example(_: Workspace, heads: Heads, dtype: torch.dtype) -> None:
    bf16, conv_bias = torch.bfloat16, None if heads.is_delta else torch.empty(heads.conv_width)
    values = torch.empty(heads.num_values)
    weights = RecurrenceWeights(
        torch.empty(4, heads.conv_width), conv_bias, values, values, values, values, 1e-6
    )
    rows = RecurrenceRows(
        torch.empty(4, heads.conv_width, dtype=bf16),
        torch.empty(4, heads.values, dtype=bf16),
        torch.empty(4, heads.factors, dtype=bf16),
    )
    matrix = torch.empty(1, heads.num_values, heads.key_width, heads.value_width, dtype=dtype)
    cache = StateCache(torch.empty(1, 8, heads.row_width), 3, matrix)
    recurrence(rows, weights, heads, cache, StateSlots((0,), (0, 4), (0,), (0,), (4,)))


_RULES = ((_DELTA, "delta rule"), (_MAMBA, "Mamba-2"))
AOT_SPECS = [
    *(
        AotSpec(
            _matrices_kernel,
            f"bf16, {rule}, {name} states",
            partial(_example, heads=heads, dtype=dtype),
        )
        for heads, rule in _RULES
        for dtype, name in ((torch.float32, "float32"), (torch.float16, "half"))
    ),
    *(
        AotSpec(
            _finish_kernel,
            f"bf16, {rule}",
            partial(_example, heads=heads, dtype=torch.float32),
        )
        for heads, rule in _RULES
    ),
]
