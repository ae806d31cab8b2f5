"""Mamba-2: a matrix for each head that fades and that each token adds to, in place of attention."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from localllm.model.blocks.block import (
    BlockSpec,
    InputsFrom,
    LinearGroup,
    Parts,
    RecurrentState,
    RowBytes,
    Work,
)
from localllm.model.blocks.recurrence import Recurrence
from localllm.model.dtypes import StateDType

if TYPE_CHECKING:
    from torch import Tensor

    from localllm_kernels.recurrence.recurrence import Heads


@dataclass(frozen=True, slots=True)
class MambaSpec(BlockSpec):
    """The sizes of a Mamba-2 block: heads of `head_width`, the width of B and C, of which each
    group of consecutive heads has its own, and the taps of the convolution before it; see
    recurrence.py of the kernels.

    `name`: of the block within the layer.
    """

    hidden_size: int
    num_heads: int
    head_width: int
    num_groups: int
    state_width: int
    taps: int
    eps: float
    has_bias: bool = False
    has_conv_bias: bool = True
    name: str = "mamba"
    state_dtype: StateDType = "float32"

    @property
    def heads(self) -> Heads:
        """As the kernels take them."""
        from localllm_kernels.recurrence.recurrence import Heads

        sizes = self.num_groups, self.num_heads, self.state_width, self.head_width
        return Heads(*sizes, is_delta=False)

    @property
    def _values(self) -> int:
        return self.num_heads * self.head_width

    @property
    def _conv_width(self) -> int:
        return self._values + 2 * self.num_groups * self.state_width

    @property
    def products(self) -> tuple[LinearGroup, ...]:
        # The gate, the convolution's inputs, and the factors.
        before = (self._named("in_proj"), self._values + self._conv_width + self.num_heads)
        after = (self._named("out_proj"), self.hidden_size)
        return (
            LinearGroup("gate and inputs", (before,), self.hidden_size, self.has_bias),
            LinearGroup("output", (after,), self._values, self.has_bias, inputs=InputsFrom.OTHER),
        )

    @property
    def vectors(self) -> Mapping[str, tuple[int, ...]]:
        shapes: dict[str, tuple[int, ...]] = {
            "conv1d.weight": (self._conv_width, 1, self.taps),
            "A_log": (self.num_heads,),
            "dt_bias": (self.num_heads,),
            "D": (self.num_heads,),
            "norm.weight": (self._values,),
        }
        if self.has_conv_bias:
            shapes["conv1d.bias"] = (self._conv_width,)
        return {self._named(name): shape for name, shape in shapes.items()}

    @property
    def recurrence(self) -> RecurrentState:
        matrix = (self.num_heads, self.state_width, self.head_width)
        width = self._conv_width + self.num_heads
        return RecurrentState(self.taps - 1, width, matrix, self.state_dtype)

    @property
    def workspace(self) -> int:
        return 3 * self._conv_width + 4 * self._values

    def work(self, context: int, row_bytes: RowBytes) -> Work:
        values = self._values * self.state_width
        # The state is read and written.
        return Work(2 * self.recurrence.num_bytes(), 6 * values + 2 * self.taps * self._conv_width)

    def launches(self, *, is_fused: bool) -> int:
        """The matrices, what rings keep, and the norm with its gate."""
        return 3

    def describe(self) -> str:
        return (
            f"Mamba-2 of {self.num_heads} heads of {self.state_width} by {self.head_width} "
            f"in {self.num_groups} groups"
        )

    def build(self, parts: Parts) -> Recurrence:
        from localllm_kernels.recurrence.recurrence import RecurrenceWeights

        def vector(name: str) -> Tensor:
            return parts.vector(self._named(name)).float()

        before, after = self.products
        weights = RecurrenceWeights(
            vector("conv1d.weight").flatten(1).T.contiguous(),
            vector("conv1d.bias") if self.has_conv_bias else None,
            -vector("A_log").exp(),
            vector("dt_bias"),
            vector("D"),
            vector("norm.weight"),
            self.eps,
        )
        return Recurrence(
            parts.linear(*before.names),
            parts.linear(*after.names),
            weights,
            self.heads,
            inputs_at=self._values,
            gate_at=0,
        )

    def _named(self, name: str) -> str:
        return f"{self.name}.{name}"
