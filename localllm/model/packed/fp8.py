"""Weights in e4m3, the 8-bit floats with 4 exponent bits and 3 fraction bits."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Self

import torch
from torch import Tensor

from localllm.model.packed.weight import PackedWeight, widest
from localllm_kernels.compiling.traits import CodeKind, WeightLayout
from localllm_kernels.linears import CodedWeight


@dataclass(frozen=True, slots=True)
class Fp8Weight(PackedWeight):
    """e4m3 codes with one scale per block of (rows, columns): weight = code · scale.

    One scale per row is a block of (1, in).
    """

    kind: ClassVar[CodeKind] = "fp8"

    codes: Tensor  # float8_e4m3fn [out, in]
    scales: Tensor  # float32 or bfloat16 [ceil(out / block[0]), ceil(in / block[1])]
    block: tuple[int, int]
    # Of the codes of inputs, where a checkpoint wants these in e4m3 with a scale of its own.
    input_scale: Tensor | None = None  # float32 []

    @property
    def layout(self) -> WeightLayout:
        return WeightLayout(self.kind, self.shape[1], self.block[1])

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """[out, in] in `dtype` (the scales' if None); the product is rounded once, in `dtype`."""
        width_out, width_in = self.shape
        rows = self.scales.repeat_interleave(self.block[0], 0)[:width_out]
        if self.block[1] < width_in:
            rows = rows.repeat_interleave(self.block[1], 1)[:, :width_in]
        dtype = dtype or self.scales.dtype
        return (self.codes.float() * rows.float()).to(dtype)

    def fuses_with(self, other: object) -> bool:
        """Whether the rows of both can share a weight: no block may straddle the seam."""
        return (
            isinstance(other, Fp8Weight)
            and self.block == other.block
            and self.scales.dtype == other.scales.dtype
            and self.shape[0] % self.block[0] == 0
        )

    @classmethod
    def stack(cls, parts: Sequence[Self]) -> Self:
        # Most CPU operators do not support float8, so the bytes are concatenated.
        codes = torch.cat([part.codes.view(torch.uint8) for part in parts])
        scales = torch.cat([part.scales for part in parts])
        of_inputs = widest([part.input_scale for part in parts])
        return cls(codes.view(torch.float8_e4m3fn), scales, parts[0].block, of_inputs)

    def take_rows(self, order: Tensor) -> "Fp8Weight":
        """Rows that leave their block get scales of their own."""
        codes = self.codes.view(torch.uint8)[order].view(torch.float8_e4m3fn)
        height = self.block[0]
        blocks = torch.arange(len(order), device=order.device) // height
        if torch.equal(order // height, blocks):
            return replace(self, codes=codes)
        scales = self.scales[order // height]
        return replace(self, codes=codes, scales=scales, block=(1, self.block[1]))

    def coded(self) -> CodedWeight:
        return CodedWeight(
            "fp8", self.codes, self.scales, block=self.block, input_scale=self.input_scale
        )
