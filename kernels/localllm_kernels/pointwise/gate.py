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

from typing import Literal, get_args

from torch import Tensor

GateKind = Literal["silu", "gelu", "clamped", "relu2"]
# A kind's place is its number in operators.h and in the kernel.
GATE_KINDS: tuple[GateKind, ...] = get_args(GateKind)
SLOPE, CUBE = 1.5957691216057308, 0.044715
STEEP, LIMIT = 1.702, 7.0


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
