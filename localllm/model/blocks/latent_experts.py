"""Experts that work in a narrower space than the layer (Nemotron-H):

    last(experts(first(x)))

The router sees x itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from localllm.model.blocks.block import (
    Block,
    BlockInputs,
    BlockSpec,
    InputsFrom,
    LinearGroup,
    Parts,
)
from localllm.model.blocks.experts import ExpertsSpec, MixtureOfExperts

if TYPE_CHECKING:
    from torch import Tensor

    from localllm.model.linear import Projection


@dataclass(frozen=True, slots=True)
class LatentExpertsSpec(BlockSpec):
    """The sizes of experts in a narrower space, and the linears that lead there and back."""

    # Its last one stays as it is when others are quantized.
    ends_in_product: ClassVar[bool] = False

    hidden_size: int
    experts: ExpertsSpec
    has_bias: bool
    first: str
    last: str

    @property
    def products(self) -> tuple[LinearGroup, ...]:
        """The router's, the way there, both of each expert, and the way back."""
        router, *inner = self.experts.products
        width = self.experts.expert.hidden_size
        first, last = ((self.first, width),), ((self.last, self.hidden_size),)
        return (
            replace(router, width_in=self.hidden_size),
            LinearGroup("to experts", first, self.hidden_size, self.has_bias, is_kept=True),
            *(
                replace(each, inputs=InputsFrom.OTHER) if each.inputs is InputsFrom.BLOCK else each
                for each in inner
            ),
            LinearGroup(
                "from experts", last, width, self.has_bias, inputs=InputsFrom.OTHER, is_kept=True
            ),
        )

    @property
    def vectors(self) -> Mapping[str, tuple[int, ...]]:
        return self.experts.vectors

    @property
    def workspace(self) -> int:
        return self.experts.workspace + 2 * self.experts.expert.hidden_size

    def launches(self, *, is_fused: bool) -> int:
        return self.experts.launches(is_fused=is_fused)

    def describe(self) -> str:
        return f"{self.experts.describe()}, in {self.experts.expert.hidden_size} dimensions"

    def build(self, parts: Parts) -> LatentExperts:
        return LatentExperts(
            parts.linear(self.first), self.experts.build(parts), parts.linear(self.last)
        )


@dataclass(frozen=True, slots=True)
class LatentExperts(Block):
    """The experts and both ways with their weights."""

    first: Projection
    experts: MixtureOfExperts
    last: Projection

    @property
    def products(self) -> tuple[Projection, ...]:
        router, *inner = self.experts.products
        return router, self.first, *inner, self.last

    def __call__(self, x: Tensor, inputs: BlockInputs) -> Tensor:
        return self.last(self.experts.routed(self.first(x), x, inputs))
