"""The gate of a feed-forward: `silu(gate) · up`, with `silu(x) = x / (1 + exp(−x))`; or
`gelu(gate) · up`, with the approximation of GELU by tanh:

    gelu(x) = x / 2 · (1 + tanh(√(2/π) · (x + CUBE · x³))) = x / (1 + exp(−SLOPE · (x + CUBE · x³)))

or gpt-oss's, of values within ±LIMIT, the gate below LIMIT alone:

    gate / (1 + exp(−STEEP · gate)) · (up + 1)

or no gate at all, but max(0, up)² (relu2).

Written out instead of `torch.nn.functional.silu`, whose vector loop and scalar tail differ in the
last bit, so that a row's result would depend on its place in the batch (torch 2.13, CPU).
Sources: Shazeer 2020, section 2; Hendrycks and Gimpel 2016, section 2; gpt-oss' modeling file in
transformers; So et al. 2021 (Primer), section 3.
"""

from functools import partial
from typing import Literal, get_args

import torch
import triton
import triton.language as tl
from torch import Tensor

from localllm_kernels.compiling.aot import AotSpec, Work
from localllm_kernels.compiling.launch import Workspace

GateKind = Literal["silu", "gelu", "clamped", "relu2"]
# A kind's place is its number in operators.h and in the kernel.
GATE_KINDS: tuple[GateKind, ...] = get_args(GateKind)
BLOCK = 1024
SLOPE, CUBE = 1.5957691216057308, 0.044715
STEEP, LIMIT = 1.702, 7.0


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


def gate_reference(gate_up: Tensor, kind: GateKind) -> Tensor:
    """`gate_up`: [num_tokens, 2 · width], or of one part [num_tokens, width] -> the latter."""
    if parts_of(kind) == 1:
        return gate_up.float().clamp(min=0).square().to(gate_up.dtype)
    gate, up = gate_up.float().chunk(2, dim=-1)
    steep = gate
    if kind == "gelu":
        steep = SLOPE * (gate + CUBE * gate * gate * gate)
    if kind == "clamped":
        gate, up = gate.clamp(max=LIMIT), up.clamp(-LIMIT, LIMIT) + 1
        steep = STEEP * gate
    return (gate / (1 + (-steep).exp()) * up).to(gate_up.dtype)


def sigmoid_gate_reference(x: Tensor, gate: Tensor) -> Tensor:
    """x · sigmoid(gate), both [num_tokens, width]. Not torch's sigmoid, whose vector loop and
    scalar tail may differ in the last bit.
    """
    return x / (1 + (-gate).exp())


def parts_of(kind: GateKind) -> int:
    """How many linears of the inner width a feed-forward has before the gate."""
    return 1 if kind == "relu2" else 2


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
