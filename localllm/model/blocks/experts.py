"""A mixture of experts: each row is computed by a few of many feed-forwards."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, ClassVar

from localllm.model.blocks.block import Block, BlockInputs, BlockSpec, LinearGroup, Parts
from localllm.model.blocks.gated_mlp import GatedMLPSpec
from localllm.model.blocks.router import RouterSpec

if TYPE_CHECKING:
    from torch import Tensor

    from localllm.model.linear import Projection
    from localllm_kernels import Ops
    from localllm_kernels.experts.route import Routing
    from localllm_kernels.linears import ExpertsProduct


@dataclass(frozen=True, slots=True)
class StackedNames:
    """The tensors in which files may hold the weights of all experts, [experts, out, in], without
    the endings of their names.

    `is_interleaved`: the rows of gate and up take turns, else those of the gate are first;
    `is_transposed`: plain weights are [experts, in, out].
    """

    gate_up: str
    down: str
    is_interleaved: bool = False
    is_transposed: bool = False


@lru_cache(maxsize=8)  # the layers of a model are alike, and each has hundreds
def _products(spec: ExpertsSpec) -> tuple[LinearGroup, ...]:
    router, width = spec.router, spec.expert.hidden_size
    share = router.top_k / router.num_experts
    logits = ((router.linear, router.num_experts),)
    experts = (
        replace(group, kind=f"expert {group.kind}", share=share, copy=number)
        for number in range(router.num_experts)
        for group in spec.expert_at(number).products
    )
    return LinearGroup("router", logits, width, router.has_bias, is_kept=True), *experts


@dataclass(frozen=True, slots=True)
class ExpertsSpec(BlockSpec):
    """The sizes of a mixture of experts.

    `expert`: one of them, with `{}` in place of its number in the names of gate, up and down;
    `stacked`: None if files hold experts one by one only.
    """

    ends_in_product: ClassVar[bool] = False

    expert: GatedMLPSpec
    router: RouterSpec
    stacked: StackedNames | None = None

    def expert_at(self, number: int) -> GatedMLPSpec:
        """One expert."""
        return self.expert.renamed(lambda name: name.format(number))

    @property
    def products(self) -> tuple[LinearGroup, ...]:
        """The router's, then both of each expert."""
        return _products(self)

    @property
    def vectors(self) -> Mapping[str, tuple[int, ...]]:
        names = (self.router.correction, self.router.scales)
        return {name: (self.router.num_experts,) for name in names if name is not None}

    @property
    def workspace(self) -> int:
        """The values of each of a row's experts, with their inputs and outputs."""
        each = self.expert.workspace + 2 * self.expert.hidden_size
        return self.router.top_k * each + 3 * self.router.num_experts

    def launches(self, *, is_fused: bool) -> int:
        """The choice, the tasks, and the sum."""
        return 3

    def describe(self) -> str:
        scores = "sigmoids" if self.router.is_sigmoid else "a softmax"
        return (
            f"{self.router.top_k} of {self.router.num_experts} experts by {scores}, "
            f"each {self.expert.describe()}"
        )

    def build(self, parts: Parts) -> MixtureOfExperts:
        groups = [self.expert_at(i).products for i in range(self.router.num_experts)]
        gate_up = [first.names for first, _ in groups]
        down = [last.names for _, last in groups]

        def vector(name: str | None) -> Tensor | None:
            # Corrections may lie around 7 and differ by hundredths, which bfloat16 has not.
            return None if name is None else parts.exact_vector(name)

        return MixtureOfExperts(
            self,
            parts.linear(self.router.linear),
            parts.experts(gate_up, down, self.expert.gate),
            self.router.routing(vector(self.router.correction), vector(self.router.scales)),
        )


@dataclass(frozen=True, slots=True)
class MixtureOfExperts(Block):
    """With its weights; `router`: the logits of experts; `experts`: all of them as one product."""

    spec: ExpertsSpec
    router: Projection
    experts: ExpertsProduct
    routing: Routing

    @property
    def products(self) -> tuple[Projection, ...]:
        """Those of the experts only where each has its own."""
        return self.router, *self.experts.each

    def __call__(self, x: Tensor, inputs: BlockInputs) -> Tensor:
        return self.routed(x, x, inputs)

    def choose(self, seen: Tensor, ops: Ops) -> tuple[Tensor, Tensor]:
        """See route_reference; `seen`: what the router reads, [num_tokens, hidden]."""
        return ops.route(self.router(seen), self.routing)

    def routed(self, x: Tensor, seen: Tensor, inputs: BlockInputs) -> Tensor:
        """The experts' outputs for the rows of `x`; the router decides by those of `seen`."""
        chosen, factors = self.choose(seen, inputs.ops)
        kind = self.spec.expert.gate
        return self.experts(x, chosen, factors, lambda rows: inputs.ops.gate(rows, kind))
