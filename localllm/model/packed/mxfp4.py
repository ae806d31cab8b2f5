"""4-bit floats with one power of two for each 32 of them (OCP Microscaling Formats 1.0, MXFP4)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Self

import torch
from torch import Tensor

from localllm.model.packed.int4 import unpack_nibbles
from localllm.model.packed.weight import PackedWeight
from localllm_kernels.compiling.traits import CodeKind, WeightLayout
from localllm_kernels.linears import CodedWeight

GROUP_SIZE = 32
# The values of a code: a sign, two bits of exponent, one of fraction (e2m1).
VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
# An exponent is stored with 127 added (e8m0); 255 is NaN.
BIAS, NAN = 127, 255


@dataclass(frozen=True, slots=True)
class Mxfp4Weight(PackedWeight):
    """4-bit codes in groups of 32 along the input: weight = value(code) · 2^(exponent - 127).

    Columns are packed as by `pack_nibbles`.
    """

    kind: ClassVar[CodeKind] = "mxfp4"
    in_byte: ClassVar[int] = 2

    codes: Tensor  # uint8 [out, in / 2]
    exponents: Tensor  # uint8 [out, in / 32]

    @property
    def layout(self) -> WeightLayout:
        return WeightLayout(self.kind, self.shape[1], GROUP_SIZE)

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """[out, in] in `dtype`, bfloat16 if None; exact in bfloat16 and float32."""
        values = torch.tensor(VALUES, device=self.codes.device)
        codes = unpack_nibbles(self.codes).view(*self.exponents.shape, GROUP_SIZE)
        # In float32, where 2^-127 is exact too, and 6 · 2^127 is not reached by rounding.
        scaled = torch.ldexp(values[codes.int()], self.exponents[:, :, None].int() - BIAS)
        return scaled.flatten(1).to(dtype or torch.bfloat16)

    def fuses_with(self, other: object) -> bool:
        return isinstance(other, Mxfp4Weight)

    @classmethod
    def stack(cls, parts: Sequence[Self]) -> Self:
        return cls(
            torch.cat([part.codes for part in parts]), torch.cat([part.exponents for part in parts])
        )

    def take_rows(self, order: Tensor) -> "Mxfp4Weight":
        return Mxfp4Weight(self.codes[order], self.exponents[order])

    def coded(self) -> CodedWeight:
        return CodedWeight("mxfp4", unpack_nibbles(self.codes), self.exponents)
