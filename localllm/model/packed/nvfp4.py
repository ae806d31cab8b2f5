"""4-bit floats with an 8-bit float for each 16 of them, and one factor for all (NVIDIA's NVFP4)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Self

import torch
from torch import Tensor

from localllm.model.packed.int4 import unpack_nibbles
from localllm.model.packed.mxfp4 import VALUES
from localllm.model.packed.weight import PackedWeight, widest
from localllm_kernels.compiling.traits import CodeKind, WeightLayout
from localllm_kernels.linears import CodedWeight

GROUP_SIZE = 16


@dataclass(frozen=True, slots=True)
class Nvfp4Weight(PackedWeight):
    """4-bit codes in groups of 16 along the input: weight = value(code) · (scale / divisor).

    Columns are packed as by `pack_nibbles`. The divisor of a tensor brings its scales into the
    range of e4m3; rows of several tensors can lie one below the other.
    """

    kind: ClassVar[CodeKind] = "nvfp4"
    in_byte: ClassVar[int] = 2

    codes: Tensor  # uint8 [out, in / 2]
    scales: Tensor  # float8_e4m3fn [out, in / 16]
    divisors: Tensor  # float32 [out]
    # Of the scales of inputs, where a checkpoint wants these in NVFP4 too.
    input_scale: Tensor | None = None  # float32 []

    @property
    def layout(self) -> WeightLayout:
        return WeightLayout(self.kind, self.shape[1], GROUP_SIZE)

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """[out, in] in `dtype`, bfloat16 if None; rounded in float32, then once to `dtype`."""
        values = torch.tensor(VALUES, device=self.codes.device)
        codes = unpack_nibbles(self.codes).view(*self.scales.shape, GROUP_SIZE)
        scales = self.scales.float() / self.divisors[:, None]
        return (values[codes.int()] * scales[:, :, None]).flatten(1).to(dtype or torch.bfloat16)

    def fuses_with(self, other: object) -> bool:
        return isinstance(other, Nvfp4Weight)

    @classmethod
    def stack(cls, parts: Sequence[Self]) -> Self:
        # Most CPU operators do not support float8, so the bytes are concatenated.
        scales = torch.cat([part.scales.view(torch.uint8) for part in parts])
        return cls(
            torch.cat([part.codes for part in parts]),
            scales.view(torch.float8_e4m3fn),
            torch.cat([part.divisors for part in parts]),
            widest([part.input_scale for part in parts]),
        )

    def take_rows(self, order: Tensor) -> "Nvfp4Weight":
        scales = self.scales.view(torch.uint8)[order].view(torch.float8_e4m3fn)
        return Nvfp4Weight(self.codes[order], scales, self.divisors[order], self.input_scale)

    def coded(self) -> CodedWeight:
        return CodedWeight(
            self.kind,
            unpack_nibbles(self.codes),
            self.scales,
            factors=1 / self.divisors,
            input_scale=self.input_scale,
        )
