"""Grids of 4-bit floats (e2m1), whose scales are powers of two or 8-bit floats."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from localllm.model.packed import mxfp4, nvfp4
from localllm.model.packed.int4 import pack_nibbles
from localllm.model.packed.mxfp4 import BIAS, NAN, VALUES, Mxfp4Weight
from localllm.model.packed.nvfp4 import Nvfp4Weight
from localllm.quantize.grid import CLIP_SHARES, Grid, GridKind, RoundColumn

# The largest values of e2m1 and e4m3, and the largest power of two of e2m1.
_MOST, _MOST_SCALE, _TOP = 6.0, 448.0, 4.0
# A group's largest value becomes 4, between which and 6 there is nothing, where that loses less
# (Cook et al. 2025, "Four Over Six", arXiv 2512.02010).
_FOUR_OVER_SIX = _MOST / _TOP


@dataclass(frozen=True, slots=True)
class FloatGrid(Grid):
    """`divisor`: float32 [], of the scales that an NVFP4 weight stores; None for MXFP4."""

    scales: Tensor
    divisor: Tensor | None

    def round(self, weight: Tensor) -> Tensor:
        return _nearest(self.grouped(weight) / self.scales[..., None]).view_as(weight)

    def values(self, codes: Tensor) -> Tensor:
        return (self.grouped(_values(codes)) * self.scales[..., None]).view_as(codes)

    def by_column(self) -> RoundColumn:
        scales = self.scales.T.contiguous()

        def rounded(group: int, column: Tensor) -> tuple[Tensor, Tensor]:
            codes = _nearest(column / scales[group])
            return codes, _values(codes) * scales[group]

        return rounded

    def weight(self, codes: Tensor) -> Mxfp4Weight | Nvfp4Weight:
        packed = pack_nibbles(codes.to(torch.uint8))
        if self.divisor is None:
            return Mxfp4Weight(packed, (self.scales.log2().round() + BIAS).to(torch.uint8))
        stored = (self.scales * self.divisor).to(torch.float8_e4m3fn)
        return Nvfp4Weight(packed, stored, self.divisor.repeat(len(codes)))

    def where(self, condition: Tensor, other: "FloatGrid") -> "FloatGrid":
        return FloatGrid(torch.where(condition, self.scales, other.scales), self.divisor)

    @classmethod
    def joined(cls, parts: Sequence["FloatGrid"]) -> "FloatGrid":
        return cls(torch.cat([part.scales for part in parts]), parts[0].divisor)


@dataclass(frozen=True, slots=True)
class PowerGrids(GridKind):
    """MXFP4: of the two powers of two around what holds a group's largest value."""

    group_size: int = mxfp4.GROUP_SIZE

    def candidates(self, weight: Tensor, *, has_moments: bool) -> Iterator[FloatGrid]:
        most = weight.view(len(weight), -1, self.group_size).abs().amax(2)
        whole = (most.clamp(min=torch.finfo(torch.float32).tiny) / _TOP).log2().floor()
        for exponent in (whole, whole + 1):
            yield FloatGrid(exponent.clamp(-BIAS, NAN - 1 - BIAS).exp2(), None)


@dataclass(frozen=True, slots=True)
class ScaledGrids(GridKind):
    """NVFP4: a group's largest value becomes the largest one of e2m1, another, or is clipped."""

    group_size: int = nvfp4.GROUP_SIZE
    divisor: Tensor | None = None

    def of_whole(self, weight: Tensor) -> "ScaledGrids":
        """With the divisor that uses all of e4m3."""
        most = weight.abs().max().clamp(min=torch.finfo(torch.float32).tiny)
        return ScaledGrids(divisor=(_MOST * _MOST_SCALE / most).clamp(max=1e30))

    def candidates(self, weight: Tensor, *, has_moments: bool) -> Iterator[FloatGrid]:
        assert self.divisor is not None
        most = weight.view(len(weight), -1, self.group_size).abs().amax(2)
        for share in (*CLIP_SHARES, _FOUR_OVER_SIX):
            stored = most * share / _MOST * self.divisor
            # The least scale, for a group of zeros too.
            stored = stored.clamp(2**-9, _MOST_SCALE).to(torch.float8_e4m3fn).float()
            yield FloatGrid(stored / self.divisor, self.divisor)


def _nearest(values: Tensor) -> Tensor:
    """The e2m1 code of each value, as float32; of two as near, the one whose last bit is 0."""
    own = torch.tensor(VALUES[:8], device=values.device)
    between = (own[1:] + own[:-1]) / 2
    size = values.abs()
    # An odd code below a border gives way to the even one above it.
    up = torch.bucketize(size, between, right=True)
    down = torch.bucketize(size, between)
    code = torch.where(up % 2 == 0, up, down)
    return torch.where(values < 0, code + 8, code).float()


def _values(codes: Tensor) -> Tensor:
    return torch.tensor(VALUES, device=codes.device)[codes.int()]
