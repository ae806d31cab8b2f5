"""What every packed weight is: [out, in] in fewer bits, in one layout, whatever file it came from.

Rows of several weights of a type can be put together, which is how the linears of a layer become
one product.
"""

from collections.abc import Sequence
from typing import ClassVar, Protocol, Self

import torch
from torch import Tensor

from localllm_kernels.linears import Linears, Product
from localllm_kernels.traits import WeightLayout

# The time of torch's integer operators grows with the rows; from here on it is faster to dequantize
# the weight once and use the plain product.
MAX_OPERATOR_ROWS = 4


class PackedWeight(Protocol):
    """A weight in fewer bits."""

    kind: ClassVar[str]

    @property
    def codes(self) -> Tensor:
        """Its values, packed."""

    @property
    def shape(self) -> tuple[int, int]:
        """(out, in)."""

    @property
    def layout(self) -> WeightLayout:
        """What kernels are chosen by."""

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """[out, in] in the order of the input features, in `dtype` (the scales' if None)."""

    def fuses_with(self, other: object) -> bool:
        """Whether the rows of both can stand in one weight."""

    @classmethod
    def stack(cls, parts: Sequence[Self]) -> Self:
        """The rows of all parts, which must fuse with each other."""

    def product(self, linears: Linears, bias: Tensor | None, dtype: torch.dtype) -> Product | None:
        """The product of a library, in a model of `dtype`; None where it has no kernel for it."""

    def torch_product(self, bias: Tensor | None, dtype: torch.dtype) -> Product | None:
        """The product by an operator of torch's; None where it has none."""
