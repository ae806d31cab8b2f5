"""The gate of the feed-forward block: `silu(gate) · up`, with `silu(x) = x / (1 + exp(−x))`.

Written out instead of `torch.nn.functional.silu`, whose vector loop and scalar tail differ in the
last bit, so that a row's result would depend on its place in the batch (torch 2.13, CPU).
Source: Shazeer 2020, section 2.
"""

from torch import Tensor


def silu_mul_reference(gate_up: Tensor) -> Tensor:
    """`gate_up`: [num_tokens, 2 · width], gate first; returns [num_tokens, width]."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    activated = gate / (1 + (-gate).exp())
    return (activated * up).to(gate_up.dtype)
