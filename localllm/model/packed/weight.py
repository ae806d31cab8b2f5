"""The interface of quantized weights: [out, in], in one layout whatever file they came from.

Rows of several weights of one type can be stacked, which is how the linears of a layer become one
product.
"""

from collections.abc import Sequence
from typing import ClassVar, Protocol, Self

import torch
from torch import Tensor

from localllm_kernels.compiling.traits import WeightLayout
from localllm_kernels.linears import CodedWeight, Product

# The time of torch's integer operators grows with the rows; for more rows than this it is faster to
# dequantize the weight once and use the plain product.
MAX_OPERATOR_ROWS = 4


class PackedWeight(Protocol):
    """A quantized weight."""

    kind: ClassVar[str]

    @property
    def codes(self) -> Tensor:
        """Its values, packed."""

    @property
    def shape(self) -> tuple[int, int]:
        """(out, in)."""

    @property
    def layout(self) -> WeightLayout:
        """The layout, which decides the kernels."""

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """[out, in] in the order of the input features, in `dtype` (the scales' if None)."""

    def fuses_with(self, other: object) -> bool:
        """Whether the rows of both can share a weight."""

    @classmethod
    def stack(cls, parts: Sequence[Self]) -> Self:
        """One weight with the rows of all parts, which must fuse with each other."""

    def take_rows(self, order: Tensor) -> Self:
        """The weight with its rows in another order; `order`: int64 [out]."""

    def coded(self) -> CodedWeight:
        """It as the libraries of kernels take it."""

    def torch_product(self, bias: Tensor | None, dtype: torch.dtype) -> Product | None:
        """The product by one of torch's operators; None if it has none."""
