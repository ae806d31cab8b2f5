"""Experts beside a feed-forward for all rows, each between norms of its own (Gemma 4).

    after_1(mlp(before_1(x))) + after_2(experts(before_2(x)))

The router sees x itself, normed without a weight, times a vector of its own and hidden^-½.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from localllm.model.blocks.block import Block, BlockInputs, BlockSpec, LinearGroup, Parts
from localllm.model.blocks.experts import ExpertsSpec, MixtureOfExperts
from localllm.model.blocks.gated_mlp import GatedMLP, GatedMLPSpec
from localllm.model.norm import Norm, NormSpec

if TYPE_CHECKING:
    from torch import Tensor

    from localllm.model.linear import Projection


@dataclass(frozen=True, slots=True)
class ExpertsBesideSpec(BlockSpec):
    """The sizes of both branches.

    `norms`: before and after the feed-forward, before and after the experts; `router_scale`: the
    name of the router's own vector.
    """

    ends_in_product: ClassVar[bool] = False

    mlp: GatedMLPSpec
    experts: ExpertsSpec
    norms: tuple[NormSpec, NormSpec, NormSpec, NormSpec]
    router_scale: str

    @property
    def products(self) -> tuple[LinearGroup, ...]:
        return *self.mlp.products, *self.experts.products

    @property
    def vectors(self) -> Mapping[str, tuple[int, ...]]:
        width = self.mlp.hidden_size
        norms = {f"{norm.name}.weight": (width,) for norm in self.norms}
        return {**norms, self.router_scale: (width,), **self.experts.vectors}

    @property
    def workspace(self) -> int:
        return self.mlp.workspace + self.experts.workspace + 3 * self.mlp.hidden_size

    def launches(self, *, is_fused: bool) -> int:
        """Five norms, the sum, and both branches."""
        return 6 + self.mlp.launches(is_fused=False) + self.experts.launches(is_fused=False)

    def describe(self) -> str:
        return f"{self.mlp.describe()} beside {self.experts.describe()}"

    def build(self, parts: Parts) -> ExpertsBeside:
        width = self.mlp.hidden_size
        before, after, before_experts, after_experts = (
            norm.with_weight(parts.vector(f"{norm.name}.weight")) for norm in self.norms
        )
        scale = parts.vector(self.router_scale).float() * width**-0.5
        return ExpertsBeside(
            self.mlp.build(parts),
            self.experts.build(parts),
            (before, after),
            (before_experts, after_experts),
            Norm(scale, self.norms[0].eps),
        )


@dataclass(frozen=True, slots=True)
class ExpertsBeside(Block):
    """Both branches with their weights."""

    mlp: GatedMLP
    experts: MixtureOfExperts
    mlp_norms: tuple[Norm, Norm]
    expert_norms: tuple[Norm, Norm]
    router_norm: Norm

    @property
    def products(self) -> tuple[Projection, ...]:
        return *self.mlp.products, *self.experts.products

    def __call__(self, x: Tensor, inputs: BlockInputs) -> Tensor:
        """`x` is the residual stream itself."""
        ops = inputs.ops
        before, after = self.mlp_norms
        dense = after(self.mlp(before(x, ops), inputs), ops)
        before, after = self.expert_norms
        routed = self.experts.routed(before(x, ops), self.router_norm(x, ops), inputs)
        return dense + after(routed, ops)
