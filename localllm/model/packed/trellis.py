"""Rotated weights of 3 bits on a trellis."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Self

import torch
from torch import Tensor

from localllm.model.packed.weight import PackedWeight
from localllm_kernels.compiling.traits import CodeKind, WeightLayout
from localllm_kernels.linears import CodedWeight
from localllm_kernels.trellis import BYTES, IN_BYTES, TABLE, signs, turned_back, unpack_windows


@dataclass(frozen=True, slots=True)
class TrellisWeight(PackedWeight):
    """Rows of bits whose windows stand for steps, with one scale per row; see trellis.py of the
    kernels: rotated weight = table[window] · scale.
    """

    kind: ClassVar[CodeKind] = "trellis3"

    codes: Tensor  # uint8 [out, 3 · in / 8], see `pack_windows`
    scales: Tensor  # float32 [out]

    @property
    def shape(self) -> tuple[int, int]:
        return self.codes.shape[0], self.codes.shape[1] // BYTES * IN_BYTES

    @property
    def layout(self) -> WeightLayout:
        return WeightLayout(self.kind, self.shape[1], self.shape[1])

    def steps(self) -> Tensor:
        """What the windows stand for, float32 [out, in], in the rotated order."""
        table = torch.tensor(TABLE, dtype=torch.float32, device=self.codes.device)
        return table[unpack_windows(self.codes).int()]

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """Turned back in float32, and rounded once to `dtype`, bfloat16 if None."""
        by = signs(self.shape[1]).to(self.codes.device)
        turned = turned_back(self.steps() * self.scales[:, None], by)
        return turned.to(dtype or torch.bfloat16)

    def fuses_with(self, other: object) -> bool:
        return isinstance(other, TrellisWeight)

    @classmethod
    def stack(cls, parts: Sequence[Self]) -> Self:
        return cls(
            torch.cat([part.codes for part in parts]), torch.cat([part.scales for part in parts])
        )

    def take_rows(self, order: Tensor) -> "TrellisWeight":
        return TrellisWeight(self.codes[order], self.scales[order])

    def coded(self) -> CodedWeight:
        return CodedWeight(self.kind, self.codes, self.scales[:, None])
