"""LFM2's short convolution: a gated causal convolution of few taps in place of attention."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from localllm.model.blocks.block import (
    Block,
    BlockInputs,
    BlockSpec,
    InputRows,
    LinearGroup,
    Parts,
    RecurrentState,
    RowBytes,
    Work,
)

if TYPE_CHECKING:
    from torch import Tensor

    from localllm.model.linear import Projection

_CONV, _BEFORE, _AFTER = "conv.conv", "conv.in_proj", "conv.out_proj"


@dataclass(frozen=True, slots=True)
class ShortConvSpec(BlockSpec):
    """The sizes of a short convolution of `taps` positions over `hidden_size` channels.

    With b, c and x from the first product: the second one's inputs are c · conv(b · x).
    Source: LFM2's modeling file in transformers.
    """

    hidden_size: int
    taps: int
    has_bias: bool = False

    @property
    def products(self) -> tuple[LinearGroup, ...]:
        width = self.hidden_size
        before, after = ((_BEFORE, 3 * width),), ((_AFTER, width),)
        # c, the second third, is a factor of the last product's inputs.
        rows = InputRows(_BEFORE, 1, 1, width, first=width)
        return (
            LinearGroup("gates and input", before, width, self.has_bias),
            LinearGroup("output", after, width, self.has_bias, inputs=rows),
        )

    @property
    def vectors(self) -> Mapping[str, tuple[int, ...]]:
        shapes: dict[str, tuple[int, ...]] = {f"{_CONV}.weight": (self.hidden_size, 1, self.taps)}
        return {**shapes, f"{_CONV}.bias": (self.hidden_size,)} if self.has_bias else shapes

    @property
    def recurrence(self) -> RecurrentState:
        return RecurrentState(self.taps - 1, self.hidden_size)

    @property
    def workspace(self) -> int:
        return 5 * self.hidden_size

    def work(self, context: int, row_bytes: RowBytes) -> Work:
        # It reads the inputs of earlier tokens, and writes its own.
        return Work(self.recurrence.num_bytes(more_rows=1), 2 * self.taps * self.hidden_size)

    def launches(self, *, is_fused: bool) -> int:
        """The convolution with its gates, and what rings keep."""
        return 2

    def describe(self) -> str:
        return f"a convolution of {self.taps} taps over {self.hidden_size} channels"

    def build(self, parts: Parts) -> ShortConv:
        before, after = self.products
        bias = parts.vector(f"{_CONV}.bias").float() if self.has_bias else None
        return ShortConv(
            parts.linear(*before.names),
            parts.linear(*after.names),
            parts.vector(f"{_CONV}.weight").float().flatten(1).T.contiguous(),
            bias,
        )


@dataclass(frozen=True, slots=True)
class ShortConv(Block):
    """A short convolution with its weights."""

    in_proj: Projection
    out_proj: Projection
    weight: Tensor  # float32 [taps, hidden_size]
    bias: Tensor | None  # float32 [hidden_size]

    @property
    def products(self) -> tuple[Projection, ...]:
        return self.in_proj, self.out_proj

    def inner(self, x: Tensor, inputs: BlockInputs) -> Tensor:
        states, cache = inputs.batch.states, inputs.recurrent
        assert states is not None
        assert cache is not None
        return inputs.ops.short_conv(self.in_proj(x), self.weight, self.bias, cache, states)
