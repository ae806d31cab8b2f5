"""The short convolution on a GPU: a program computes some channels of some rows of a request."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from localllm_kernels.compiling.aot import AotSpec
from localllm_kernels.compiling.launch import present
from localllm_kernels.recurrence.state_cache import StateCache, States, StateSlots
from localllm_kernels.recurrence.state_rings import keep_inputs

ROWS, CHANNELS = 8, 128


@triton.jit
def _conv_kernel(
    rows_ptr,
    weight_ptr,
    bias_ptr,
    requests_ptr,
    kept_ptr,
    out_ptr,
    width,
    ring,
    HAS_BIAS: tl.constexpr,
    TAPS: tl.constexpr,
    ROWS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    about = requests_ptr + tl.program_id(2) * 8
    slot, first_row = tl.load(about), tl.load(about + 1)
    start, end = tl.load(about + 2), tl.load(about + 3)
    positions = start + tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    channels = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    is_channel = (channels < width)[None, :]
    dtype = rows_ptr.dtype.element_ty
    total = tl.zeros([ROWS, CHANNELS], tl.float32)
    if HAS_BIAS:
        total += tl.load(bias_ptr + channels[None, :], mask=is_channel, other=0.0)
    for tap in tl.static_range(TAPS):
        seen = (positions - TAPS + 1 + tap)[:, None]
        is_new = is_channel & (seen >= start) & (seen < end)
        at = rows_ptr + (first_row + seen - start) * 3 * width + channels[None, :]
        before = tl.load(at, mask=is_new, other=0.0).to(tl.float32)
        x = before * tl.load(at + 2 * width, mask=is_new, other=0.0).to(tl.float32)
        kept_at = kept_ptr + (slot * ring + (seen + ring) % ring) * width + channels[None, :]
        is_kept = is_channel & (seen >= 0) & (seen < start)
        x = x.to(dtype).to(tl.float32) + tl.load(kept_at, mask=is_kept, other=0.0)
        weight_at = weight_ptr + tap * width + channels[None, :]
        total += x * tl.load(weight_at, mask=is_channel, other=0.0)
    is_row = is_channel & (positions < end)[:, None]
    row = first_row + positions[:, None] - start
    after_at = rows_ptr + row * 3 * width + width + channels[None, :]
    after = tl.load(after_at, mask=is_row, other=0.0).to(tl.float32)
    value = after * total.to(dtype).to(tl.float32)
    tl.store(out_ptr + row * width + channels[None, :], value.to(dtype), mask=is_row)


def short_conv(
    rows: Tensor, weight: Tensor, bias: Tensor | None, cache: StateCache, states: States
) -> Tensor:
    """See short_conv_reference."""
    rows, (taps, width) = rows.contiguous(), weight.shape
    # Padding rows are written by no request.
    out = torch.zeros(len(rows), width, dtype=rows.dtype, device=rows.device)
    tables = states.on(rows.device)
    blocks = triton.cdiv(width, CHANNELS), triton.cdiv(tables.longest, ROWS)
    grid = (*blocks, len(tables.requests))
    _conv_kernel[grid](
        rows,
        weight,
        present(bias, weight),
        tables.requests,
        cache.rows,
        out,
        width,
        cache.rows.shape[-2],
        HAS_BIAS=bias is not None,
        TAPS=taps,
        ROWS=ROWS,
        CHANNELS=CHANNELS,
    )
    # Behind the rows of requests side by side, which read the rings.
    keep_inputs(rows, None, width, cache, tables, is_gated=True)
    return out


def _example() -> None:
    states = StateSlots((0,), (0, 4), (0,), (0,), (4,))
    rows, weight = torch.empty(4, 3 * 1024, dtype=torch.bfloat16), torch.empty(3, 1024)
    cache = StateCache(torch.empty(1, 8, 1024), 2, None)
    short_conv(rows, weight, torch.empty(1024), cache, states)


AOT_SPECS = [AotSpec(_conv_kernel, "bf16", lambda _: _example())]
