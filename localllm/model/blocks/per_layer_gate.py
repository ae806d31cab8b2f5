"""A block that lets a token's per-layer input into the residual stream (Gemma 3n and 4):

projection · (gelu(gate · x) ⊙ input)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from localllm.model.blocks.block import (
    Block,
    BlockInputs,
    BlockSpec,
    InputsFrom,
    LinearGroup,
    Parts,
)

if TYPE_CHECKING:
    from torch import Tensor

    from localllm.model.linear import Projection


@dataclass(frozen=True, slots=True)
class PerLayerGateSpec(BlockSpec):
    """The widths of the residual stream and of a per-layer input."""

    hidden_size: int
    width: int

    @property
    def products(self) -> tuple[LinearGroup, ...]:
        gate = (("per_layer_input_gate", self.width),)
        projection = (("per_layer_projection", self.hidden_size),)
        return (
            LinearGroup("per-layer gate", gate, self.hidden_size),
            LinearGroup("per-layer projection", projection, self.width, inputs=InputsFrom.OTHER),
        )

    @property
    def workspace(self) -> int:
        return 4 * self.width

    def launches(self, *, is_fused: bool) -> int:
        """Gate and input side by side, and the gating."""
        return 2

    def describe(self) -> str:
        return f"per-layer inputs of {self.width}"

    def build(self, parts: Parts) -> PerLayerGate:
        gate, projection = self.products
        return PerLayerGate(self, parts.linear(*gate.names), parts.linear(*projection.names))


@dataclass(frozen=True, slots=True)
class PerLayerGate(Block):
    """The block with its weights."""

    spec: PerLayerGateSpec
    gate: Projection
    projection: Projection

    @property
    def products(self) -> tuple[Projection, ...]:
        return self.gate, self.projection

    def inner(self, x: Tensor, inputs: BlockInputs) -> Tensor:
        """The gated inputs, [num_tokens, width]."""
        import torch

        assert inputs.per_layer is not None
        return inputs.ops.gate(torch.cat((self.gate(x), inputs.per_layer), dim=-1), "gelu")
