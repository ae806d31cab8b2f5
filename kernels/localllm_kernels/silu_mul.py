"""The gate of the feed-forward block: `silu(gate) · up`, with `silu(x) = x / (1 + exp(−x))`, or
`gelu(gate) · up`, with the approximation of GELU by tanh:

    gelu(x) = x / 2 · (1 + tanh(√(2/π) · (x + CUBE · x³))) = x / (1 + exp(−SLOPE · (x + CUBE · x³)))

Written out instead of `torch.nn.functional.silu`, whose vector loop and scalar tail differ in the
last bit, so that a row's result would depend on its place in the batch (torch 2.13, CPU).
Sources: Shazeer 2020, section 2; Hendrycks and Gimpel 2016, section 2.
"""

import triton
import triton.language as tl
from torch import Tensor

from localllm_kernels.aot import AotSpec, Work

BLOCK = 1024
SLOPE, CUBE = 1.5957691216057308, 0.044715


@triton.jit
def _silu_mul_kernel(
    gate_up_ptr,
    out_ptr,
    width,
    SLOPE: tl.constexpr,
    CUBE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    at = gate_up_ptr + row * 2 * width + columns
    gate = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(at + width, mask=inside, other=0.0).to(tl.float32)
    steep = gate if CUBE == 0 else SLOPE * (gate + CUBE * gate * gate * gate)
    value = gate / (1.0 + tl.exp(-steep)) * up
    tl.store(out_ptr + row * width + columns, value.to(out_ptr.dtype.element_ty), mask=inside)


def silu_mul(gate_up: Tensor) -> Tensor:
    """See silu_mul_reference."""
    return _launch(gate_up, 1.0, 0.0)


def gelu_mul(gate_up: Tensor) -> Tensor:
    """See gelu_mul_reference."""
    return _launch(gate_up, SLOPE, CUBE)


def _launch(gate_up: Tensor, slope: float, cube: float) -> Tensor:
    gate_up = gate_up.contiguous()
    num_rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(num_rows, width)
    grid = (num_rows, triton.cdiv(width, BLOCK))
    _silu_mul_kernel[grid](gate_up, out, width, SLOPE=slope, CUBE=cube, BLOCK=BLOCK)
    return out


def silu_mul_reference(gate_up: Tensor) -> Tensor:
    """`gate_up`: [num_tokens, 2 · width], gate first; returns [num_tokens, width]."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    activated = gate / (1 + (-gate).exp())
    return (activated * up).to(gate_up.dtype)


def gelu_mul_reference(gate_up: Tensor) -> Tensor:
    """`gate_up`: [num_tokens, 2 · width], gate first; returns [num_tokens, width]."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    steep = SLOPE * (gate + CUBE * gate * gate * gate)
    return (gate / (1 + (-steep).exp()) * up).to(gate_up.dtype)


AOT_SPECS = [
    AotSpec(
        _silu_mul_kernel,
        name,
        {"gate_up_ptr": "*bf16", "out_ptr": "*bf16", "width": "i32"},
        {"SLOPE": slope, "CUBE": cube, "BLOCK": BLOCK},
        work=Work("value", BLOCK, 6),
    )
    for name, slope, cube in (("bf16", 1.0, 0.0), ("bf16, gelu", SLOPE, CUBE))
]
