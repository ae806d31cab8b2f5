"""A recurrence with a matrix for each head, between two products: a delta net or Mamba-2."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from localllm.model.blocks.block import Block, BlockInputs

if TYPE_CHECKING:
    from torch import Tensor

    from localllm.model.linear import Projection
    from localllm_kernels.recurrence.recurrence import Heads, RecurrenceWeights


@dataclass(frozen=True, slots=True)
class Recurrence(Block):
    """A recurrence with its weights.

    `inputs_at`, `gate_at`: the first columns of the convolution's inputs and of the gate among the
    outputs of `in_proj`; the factors have a product of their own, or are its last columns.
    """

    in_proj: Projection
    out_proj: Projection
    weights: RecurrenceWeights
    heads: Heads
    inputs_at: int
    gate_at: int
    factors: Projection | None = None

    @property
    def products(self) -> tuple[Projection, ...]:
        first = () if self.factors is None else (self.factors,)
        return *first, self.in_proj, self.out_proj

    def inner(self, x: Tensor, inputs: BlockInputs) -> Tensor:
        """The values of all heads side by side."""
        from localllm_kernels.recurrence.recurrence import RecurrenceRows

        states, cache, heads = inputs.batch.states, inputs.recurrent, self.heads
        assert states is not None
        assert cache is not None
        found = self.in_proj(x)
        rows = RecurrenceRows(
            found[:, self.inputs_at : self.inputs_at + heads.conv_width],
            found[:, self.gate_at : self.gate_at + heads.values],
            found[:, -heads.factors :] if self.factors is None else self.factors(x),
        )
        return inputs.ops.recurrence(rows, self.weights, heads, cache, states)
