"""The gate of the feed-forward block: `silu(gate) · up`, with `silu(x) = x / (1 + exp(−x))`.

Written out instead of `torch.nn.functional.silu`, whose vector loop and scalar tail differ in the
last bit, so that a row's result would depend on its place in the batch (torch 2.13, CPU).
Source: Shazeer 2020, section 2.
"""

import triton
import triton.language as tl
from torch import Tensor

from localllm_kernels.aot import AotSpec, Work

BLOCK = 1024


@triton.jit
def _silu_mul_kernel(gate_up_ptr, out_ptr, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    at = gate_up_ptr + row * 2 * width + columns
    gate = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(at + width, mask=inside, other=0.0).to(tl.float32)
    value = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out_ptr + row * width + columns, value.to(out_ptr.dtype.element_ty), mask=inside)


def silu_mul(gate_up: Tensor) -> Tensor:
    """See silu_mul_reference."""
    gate_up = gate_up.contiguous()
    num_rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(num_rows, width)
    _silu_mul_kernel[(num_rows, triton.cdiv(width, BLOCK))](gate_up, out, width, BLOCK=BLOCK)
    return out


def silu_mul_reference(gate_up: Tensor) -> Tensor:
    """`gate_up`: [num_tokens, 2 · width], gate first; returns [num_tokens, width]."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    activated = gate / (1 + (-gate).exp())
    return (activated * up).to(gate_up.dtype)


AOT_SPECS = [
    AotSpec(
        _silu_mul_kernel,
        "bf16",
        {"gate_up_ptr": "*bf16", "out_ptr": "*bf16", "width": "i32"},
        {"BLOCK": BLOCK},
        work=Work("value", BLOCK, 6),
    )
]
