"""Grids of whole numbers: for each group a scale and, if asymmetric, a zero.

Scales are rounded to bfloat16 whatever the file's format. Some engines, including ours on a CPU,
compute with scales of that precision; so every engine computes the weights that were measured.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from localllm.model.packed.int4 import SYMMETRIC_ZERO, Int4Weight, pack_nibbles
from localllm.quantize.grid import CLIP_SHARES, Grid, GridKind, RoundColumn

MAX_CODE = 15


@dataclass(frozen=True, slots=True)
class IntegerGrid(Grid):
    """`zeros`: whole numbers from 0 to 15, float32 [out, num_groups].

    A scale may be negative, as in llama.cpp's Q4_0; a weight is still (code - zero) · scale.
    """

    scales: Tensor
    zeros: Tensor
    symmetric: bool

    def turned(self) -> "IntegerGrid":
        """The mirror image of a symmetric grid: from -7 to 8 steps instead of from -8 to 7."""
        return replace(self, scales=-self.scales)

    def round(self, weight: Tensor) -> Tensor:
        steps = torch.round(self.grouped(weight) / self.scales[..., None])
        return (steps + self.zeros[..., None]).clamp_(0, MAX_CODE).view_as(weight)

    def values(self, codes: Tensor) -> Tensor:
        steps = self.grouped(codes) - self.zeros[..., None]
        return (steps * self.scales[..., None]).view_as(codes)

    def by_column(self) -> RoundColumn:
        scales, zeros = self.scales.T.contiguous(), self.zeros.T.contiguous()

        def rounded(group: int, column: Tensor) -> tuple[Tensor, Tensor]:
            scale, zero = scales[group], zeros[group]
            codes = torch.round(column / scale).add_(zero).clamp_(0, MAX_CODE)
            return codes, (codes - zero) * scale

        return rounded

    def weight(self, codes: Tensor) -> Int4Weight:
        return Int4Weight(
            pack_nibbles(codes.to(torch.uint8)),
            self.scales.bfloat16(),
            None if self.symmetric else self.zeros.to(torch.uint8),
        )

    def where(self, condition: Tensor, other: "IntegerGrid") -> "IntegerGrid":
        scales = torch.where(condition, self.scales, other.scales)
        return IntegerGrid(scales, torch.where(condition, self.zeros, other.zeros), self.symmetric)

    @classmethod
    def joined(cls, parts: Sequence["IntegerGrid"]) -> "IntegerGrid":
        scales, zeros = (
            torch.cat([getattr(p, name) for p in parts]) for name in ("scales", "zeros")
        )
        return cls(scales, zeros, parts[0].symmetric)


@dataclass(frozen=True, slots=True)
class IntegerGrids(GridKind):
    """From a group's least value to its greatest; where outputs are known, also over less.

    A symmetric grid reaches one step further on one side; it is mirrored where that helps.
    """

    group_size: int
    symmetric: bool

    def candidates(self, weight: Tensor, *, has_moments: bool) -> Iterator[IntegerGrid]:
        grouped = weight.view(len(weight), -1, self.group_size)
        yield self._over(grouped, 1.0)
        for share in CLIP_SHARES if has_moments else ():
            narrowed = self._over(grouped, share)
            yield narrowed
            if self.symmetric:
                yield narrowed.turned()

    def _over(self, grouped: Tensor, share: float) -> IntegerGrid:
        """The grid that covers `share` of each group's range."""
        low = grouped.amin(-1).clamp(max=0) * share
        high = grouped.amax(-1).clamp(min=0) * share
        covered = 2 * torch.maximum(high, -low) if self.symmetric else high - low
        scales = covered / MAX_CODE
        # A group of zeros needs a scale too; any will do.
        scales = scales.clamp(min=torch.finfo(torch.bfloat16).tiny).bfloat16().float()
        if self.symmetric:
            zeros = torch.full_like(scales, SYMMETRIC_ZERO)
        else:
            zeros = torch.round(-low / scales).clamp(0, MAX_CODE)
        return IntegerGrid(scales, zeros, self.symmetric)
