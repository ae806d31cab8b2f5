"""The interface of quantized weights: [out, in], in one layout whatever file they came from.

Rows of several weights of one type can be stacked, which is how the linears of a layer become one
product.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, Self

import torch
from torch import Tensor

from localllm_kernels.compiling.traits import CodeKind, WeightLayout
from localllm_kernels.linears import BlocksWeight, CodedWeight, Product

# The time of torch's integer operators grows with the rows; for more rows than this it is faster to
# dequantize the weight once and use the plain product.
MAX_OPERATOR_ROWS = 4


def input_scale(stored: Tensor | None) -> Tensor | None:
    """The scale of inputs that a file holds, float32 []; None if there is none, or one that cannot
    be: of an expert, say, that no text of the calibration reached.
    """
    if stored is None:
        return None
    scale = stored.float().reshape(())
    least = torch.finfo(torch.float32).tiny
    return scale if bool(torch.isfinite(scale) & (scale >= least)) else None


def widest(input_scales: Sequence[Tensor | None]) -> Tensor | None:
    """Of weights that share their inputs, the scale of these that clips least; None if a weight
    has none.
    """
    known = [each for each in input_scales if each is not None]
    return torch.stack(known).amax() if len(known) == len(input_scales) else None


@dataclass(frozen=True, slots=True)
class PackedWeight(ABC):
    """A quantized weight. `in_byte`: how many of its values are in a byte of `codes`."""

    kind: ClassVar[CodeKind | Literal["blocks"]]
    in_byte: ClassVar[int] = 1

    codes: Tensor

    @property
    def shape(self) -> tuple[int, int]:
        """(out, in)."""
        return self.codes.shape[0], self.in_byte * self.codes.shape[1]

    @property
    @abstractmethod
    def layout(self) -> WeightLayout:
        """The layout, which decides the kernels."""

    @abstractmethod
    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """[out, in] in the order of the input features, in `dtype` (the scales' if None)."""

    @abstractmethod
    def fuses_with(self, other: object) -> bool:
        """Whether the rows of both can share a weight."""

    @classmethod
    @abstractmethod
    def stack(cls, parts: Sequence[Self]) -> Self:
        """One weight with the rows of all parts, which must fuse with each other."""

    @abstractmethod
    def take_rows(self, order: Tensor) -> Self:
        """The weight with these rows; `order`: int64 [out]."""

    def rows(self, ids: Tensor) -> Tensor:
        """Some of the rows, float32 [..., in]; `ids`: int64 [...]."""
        return self.take_rows(ids.flatten()).dequantize(torch.float32).view(*ids.shape, -1)

    @abstractmethod
    def coded(self) -> CodedWeight | BlocksWeight:
        """It as the libraries of kernels take it."""

    def torch_product(self, bias: Tensor | None, dtype: torch.dtype) -> Product | None:
        """The product by one of torch's operators; None if it has none."""
        return None
