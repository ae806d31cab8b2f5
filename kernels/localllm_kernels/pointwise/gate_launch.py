"""The gate of a feed-forward on a GPU; `gate.py` has the formulas."""

from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from localllm_kernels.compiling.aot import AotSpec, Work
from localllm_kernels.compiling.launch import Workspace
from localllm_kernels.pointwise.gate import (
    CUBE,
    GATE_KINDS,
    LIMIT,
    SLOPE,
    STEEP,
    GateKind,
    parts_of,
)

BLOCK = 1024


@triton.jit
def gated(
    gate,
    up,
    KIND: tl.constexpr,
    SLOPE: tl.constexpr,
    CUBE: tl.constexpr,
    STEEP: tl.constexpr,
    LIMIT: tl.constexpr,
):
    """The gate in a kernel, of values in float32; kind 3 reads the first alone."""
    if KIND == 3:
        positive = tl.where(gate < 0.0, 0.0, gate)
        return positive * positive
    steep = gate
    if KIND == 1:
        steep = SLOPE * (gate + CUBE * gate * gate * gate)
    if KIND == 2:
        # Comparisons with NaN are false, so that it passes, as in the reference.
        gate = tl.where(gate > LIMIT, LIMIT, gate)
        up = tl.where(up > LIMIT, LIMIT, tl.where(up < -LIMIT, -LIMIT, up)) + 1.0
        steep = STEEP * gate
    return gate / (1.0 + tl.exp(-steep)) * up


@triton.jit
def _gate_kernel(
    gate_up_ptr,
    out_ptr,
    width,
    KIND: tl.constexpr,
    SLOPE: tl.constexpr,
    CUBE: tl.constexpr,
    STEEP: tl.constexpr,
    LIMIT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    at = gate_up_ptr + row * (1 if KIND == 3 else 2) * width + columns
    gate = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    up = gate
    if KIND != 3:
        up = tl.load(at + width, mask=inside, other=0.0).to(tl.float32)
    value = gated(gate, up, KIND, SLOPE, CUBE, STEEP, LIMIT)
    tl.store(out_ptr + row * width + columns, value.to(out_ptr.dtype.element_ty), mask=inside)


def gate(gate_up: Tensor, kind: GateKind) -> Tensor:
    """See gate_reference."""
    gate_up = gate_up.contiguous()
    num_rows, width = gate_up.shape[0], gate_up.shape[1] // parts_of(kind)
    out = gate_up.new_empty(num_rows, width)
    grid = (num_rows, triton.cdiv(width, BLOCK))
    _gate_kernel[grid](gate_up, out, width, **gate_constants(kind), BLOCK=BLOCK)
    return out


def gate_constants(kind: GateKind) -> dict[str, float]:
    """The constants of `gated`."""
    return {
        "KIND": GATE_KINDS.index(kind),
        "SLOPE": SLOPE,
        "CUBE": CUBE,
        "STEEP": STEEP,
        "LIMIT": LIMIT,
    }


def _example(_: Workspace, kind: GateKind) -> None:
    gate(torch.empty(1, 8192, dtype=torch.bfloat16), kind)


AOT_SPECS = [
    AotSpec(
        _gate_kernel,
        f"bf16, {kind}",
        partial(_example, kind=kind),
        work=Work("value", BLOCK, 6),
    )
    for kind in GATE_KINDS
]
