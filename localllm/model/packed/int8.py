"""8-bit weights with one scale per row, and torch's product with them on a CPU."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from localllm.model.packed.weight import MAX_OPERATOR_ROWS, PackedWeight
from localllm_kernels.compiling.traits import CodeKind, WeightLayout, torch_multiplies
from localllm_kernels.linears import CodedWeight, Product


@dataclass(frozen=True, slots=True)
class Int8Weight(PackedWeight):
    """Signed 8-bit codes with one scale per row: weight = code · scale."""

    kind: ClassVar[CodeKind] = "int8"

    codes: Tensor  # int8 [out, in]
    scales: Tensor  # float16, bfloat16 or float32 [out]

    @property
    def layout(self) -> WeightLayout:
        return WeightLayout(self.kind, self.shape[1], self.shape[1])

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        scales = self.scales if dtype is None else self.scales.to(dtype)
        return self.codes.to(scales.dtype) * scales[:, None]

    def fuses_with(self, other: object) -> bool:
        return isinstance(other, Int8Weight) and self.scales.dtype == other.scales.dtype

    @classmethod
    def rounded(cls, weight: Tensor) -> "Int8Weight":
        """From a float32 weight: one scale per row, in bfloat16; codes from -127 to 127."""
        least = torch.finfo(torch.bfloat16).tiny
        scales = (weight.abs().amax(1) / 127).clamp(min=least).bfloat16()
        codes = torch.round(weight / scales.float()[:, None]).clamp(-127, 127)
        return cls(codes.to(torch.int8), scales)

    @classmethod
    def stack(cls, parts: Sequence[Self]) -> Self:
        return cls(
            torch.cat([part.codes for part in parts]), torch.cat([part.scales for part in parts])
        )

    def take_rows(self, order: Tensor) -> "Int8Weight":
        return Int8Weight(self.codes[order], self.scales[order])

    def coded(self) -> CodedWeight:
        return CodedWeight("int8", self.codes, self.scales[:, None])

    def torch_product(self, bias: Tensor | None, dtype: torch.dtype) -> Product | None:
        if not torch_multiplies(self.layout, dtype, self.codes.device.type):
            return None
        return CpuInt8Linear(self.codes, self.scales.bfloat16(), bias)


@dataclass(frozen=True, slots=True)
class CpuInt8Linear:
    """An int8 product with torch's CPU operator, in bfloat16."""

    codes: Tensor  # int8 [out, in]
    scales: Tensor  # bfloat16 [out]
    bias: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        if x.shape[0] > MAX_OPERATOR_ROWS:
            return F.linear(x, self.codes.bfloat16() * self.scales[:, None], self.bias)
        out: Tensor = torch.ops.aten._weight_int8pack_mm(x.contiguous(), self.codes, self.scales)
        return out if self.bias is None else out + self.bias
