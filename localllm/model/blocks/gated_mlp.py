"""A feed-forward with a gate, where gate and up are one product, or with relu² in its place."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from localllm.model.blocks.block import (
    Block,
    BlockInputs,
    BlockSpec,
    InputRows,
    InputsFrom,
    LinearGroup,
    Parts,
)

if TYPE_CHECKING:
    from torch import Tensor

    from localllm.model.linear import Projection
    from localllm_kernels.pointwise.gate import GateKind

SPLIT = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
WHOLE = ("mlp.gate_up_proj", "mlp.down_proj")


@dataclass(frozen=True, slots=True)
class GatedMLPSpec(BlockSpec):
    """The sizes of a feed-forward.

    `names`: the linears of gate, up and down in the checkpoint, or of gate and up in one, and down;
    with relu2, which has no gate, of up and down. `gate`: its function, see kernels' gate.py;
    `row_gate`: the linear whose sigmoid is a factor on each row's output.
    """

    hidden_size: int
    inner_size: int
    has_bias: bool = False
    names: tuple[str, str, str] | tuple[str, str] = SPLIT
    gate: GateKind = "silu"
    row_gate: str | None = None

    def renamed(self, rename: Callable[[str], str]) -> GatedMLPSpec:
        """The same with other names."""
        return replace(self, names=tuple(map(rename, self.names)))  # type: ignore[arg-type]

    @property
    def products(self) -> tuple[LinearGroup, ...]:
        *before, last = self.names
        is_gated = self.gate != "relu2"
        width = (2 if is_gated else 1) * self.inner_size // len(before)
        gate_up = tuple((name, width) for name in before)
        down = ((last, self.hidden_size),)
        rows: InputRows | InputsFrom = InputsFrom.OTHER
        if self.gate in ("silu", "gelu"):  # the others are not linear in up
            rows = InputRows(before[-1], 1, 1, self.inner_size, width - self.inner_size)
        products = (
            LinearGroup(
                "gate and up" if is_gated else "up",
                gate_up,
                self.hidden_size,
                self.has_bias,
                is_gated=is_gated,
            ),
            LinearGroup("down", down, self.inner_size, self.has_bias, inputs=rows),
        )
        if self.row_gate is None:
            return products
        own = LinearGroup("row gate", ((self.row_gate, 1),), self.hidden_size, is_kept=True)
        return (own, *products)

    @property
    def workspace(self) -> int:
        return 3 * self.inner_size

    def launches(self, *, is_fused: bool) -> int:
        """The gate, unless it is fused into the product."""
        return 0 if is_fused else 1

    def describe(self) -> str:
        return f"{self.inner_size} inside{'' if self.gate == 'silu' else f' with {self.gate}'}"

    def build(self, parts: Parts) -> GatedMLP:
        *_, gate_up, down = self.products
        row_gate = None if self.row_gate is None else parts.linear(self.row_gate)
        return GatedMLP(self, parts.linear(*gate_up.names), parts.linear(*down.names), row_gate)


@dataclass(frozen=True, slots=True)
class GatedMLP(Block):
    """A feed-forward with its weights."""

    spec: GatedMLPSpec
    gate_up_proj: Projection
    down_proj: Projection
    row_gate: Projection | None = None

    @property
    def products(self) -> tuple[Projection, ...]:
        first = () if self.row_gate is None else (self.row_gate,)
        return *first, self.gate_up_proj, self.down_proj

    def inner(self, x: Tensor, inputs: BlockInputs) -> Tensor:
        """The gated values, [num_tokens, inner_size]."""
        inner = inputs.ops.gate(self.gate_up_proj(x), self.spec.gate)
        # Not torch's sigmoid, whose vector loop and scalar tail may differ in the last bit.
        return inner if self.row_gate is None else inner / (1 + (-self.row_gate(x)).exp())
