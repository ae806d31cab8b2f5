"""What rings keep of a step's tokens, for the kernels of recurrences and short convolutions; the
reference is `StateCache.keep`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from localllm_kernels.compiling.aot import AotSpec
from localllm_kernels.recurrence.state_cache import StateCache, StateSlots, StateTables

CHANNELS = 512


@triton.jit
def _new_values(
    inputs_ptr,
    factors_ptr,
    row,
    columns,
    is_input,
    is_factor,
    input_stride,
    factor_stride,
    width,
    IS_GATED: tl.constexpr,
):
    """What is kept of a row of the batch. IS_GATED: the inputs are a product of the first and the
    third columns of `width`, rounded to their type.
    """
    at = inputs_ptr + row * input_stride + columns
    x = tl.load(at, mask=is_input, other=0.0)
    if IS_GATED:
        x = x.to(tl.float32) * tl.load(at + 2 * width, mask=is_input, other=0.0).to(tl.float32)
        x = x.to(inputs_ptr.dtype.element_ty)
    factor_at = factors_ptr + row * factor_stride + columns - width
    return x.to(tl.float32) + tl.load(factor_at, mask=is_factor, other=0.0).to(tl.float32)


@triton.jit
def _keep_kernel(
    inputs_ptr,
    factors_ptr,
    requests_ptr,
    saves_ptr,
    kept_ptr,
    input_stride,
    factor_stride,
    kept_stride,
    ring,
    width,
    num_needed,
    IS_GATED: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """Some columns of what is kept of a request's tokens: first for the copies, then its own."""
    about = requests_ptr + tl.program_id(1) * 8
    slot, first_row = tl.load(about), tl.load(about + 1)
    start, end = tl.load(about + 2), tl.load(about + 3)
    columns = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    is_input, is_factor = columns < width, (columns >= width) & (columns < kept_stride)
    own = kept_ptr + slot * ring * kept_stride + columns
    for save in range(tl.load(about + 6), tl.load(about + 7)):
        position, to = tl.load(saves_ptr + 2 * save), tl.load(saves_ptr + 2 * save + 1)
        target = kept_ptr + to * ring * kept_stride + columns
        for seen in range(tl.maximum(position - num_needed, 0), position):
            row = (first_row + seen - start).to(tl.int64)
            is_new = seen >= start
            new = _new_values(
                inputs_ptr, factors_ptr, row, columns, is_input & is_new, is_factor & is_new,
                input_stride, factor_stride, width, IS_GATED,
            )  # fmt: skip
            place = seen % ring * kept_stride
            is_kept = (is_input | is_factor) & (seen < start)
            held = tl.load(own + place, mask=is_kept, other=0.0)
            tl.store(target + place, new + held, mask=is_input | is_factor)
    for seen in range(tl.maximum(start, end - ring), end):
        row = (first_row + seen - start).to(tl.int64)
        new = _new_values(
            inputs_ptr, factors_ptr, row, columns, is_input, is_factor, input_stride,
            factor_stride, width, IS_GATED,
        )  # fmt: skip
        tl.store(own + seen % ring * kept_stride, new, mask=is_input | is_factor)


def keep_inputs(
    inputs: Tensor,
    factors: Tensor | None,
    width: int,
    cache: StateCache,
    tables: StateTables,
    *,
    is_gated: bool = False,
) -> None:
    """Write the inputs of each request's rows to its ring, and what a copy needs to that of the
    copy. `inputs`: [padded_tokens, width], or with `is_gated` [padded_tokens, 3 · width], of which
    the first and the last third are multiplied; `factors`: what is kept beside them.
    """
    kept = cache.rows.shape[-1]
    _keep_kernel[triton.cdiv(kept, CHANNELS), len(tables.requests)](
        inputs,
        inputs if factors is None else factors,
        tables.requests,
        tables.saves,
        cache.rows,
        inputs.stride(0),
        0 if factors is None else factors.stride(0),
        kept,
        cache.rows.shape[-2],
        width,
        cache.num_rows,
        IS_GATED=is_gated,
        CHANNELS=CHANNELS,
    )


def _example(*, is_gated: bool) -> None:
    inputs = torch.empty(4, 3 * 1024, dtype=torch.bfloat16)
    tables = StateSlots((0,), (0, 4), (0,), (0,), (4,)).on(inputs.device)
    cache = StateCache(torch.empty(1, 8, 1024), 2, None)
    keep_inputs(inputs, inputs, 1024, cache, tables, is_gated=is_gated)


AOT_SPECS = [
    AotSpec(_keep_kernel, "bf16", lambda _: _example(is_gated=False)),
    AotSpec(_keep_kernel, "bf16, gated", lambda _: _example(is_gated=True)),
]
