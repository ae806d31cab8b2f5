"""The grids that weights are rounded to: for each group a scale and, if asymmetric, a zero.

Scales are rounded to bfloat16 whatever the file's format. Some engines, including ours on a CPU,
compute with scales of that precision; so every engine computes the weights that were measured.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from localllm.model.packed.int4 import SYMMETRIC_ZERO, Int4Weight, pack_nibbles

MAX_CODE = 15
# Values of a weight for which grids are fitted at a time on a CPU: so many stay in its caches.
_CACHED_VALUES = 1 << 18
# Shares of a group's range that are tried when outliers may be clipped.
_CLIP_SHARES = tuple(1 - 0.04 * step for step in range(13))


@dataclass(frozen=True, slots=True)
class Grid:
    """Scales and zeros, float32 [out, num_groups] each; zeros are whole numbers from 0 to 15.

    A scale may be negative, as in llama.cpp's Q4_0; a weight is still (code - zero) · scale.
    """

    scales: Tensor
    zeros: Tensor
    symmetric: bool

    def turned(self) -> "Grid":
        """The mirror image of a symmetric grid: from -7 to 8 steps instead of from -8 to 7."""
        return replace(self, scales=-self.scales)

    def round(self, weight: Tensor) -> Tensor:
        """Nearest codes, float32 [out, in], of `weight` [out, in]."""
        grouped = weight.view(*self.scales.shape, -1)
        codes = torch.round(grouped / self.scales[..., None]) + self.zeros[..., None]
        return codes.clamp_(0, MAX_CODE).view_as(weight)

    def values(self, codes: Tensor) -> Tensor:
        """The values of `codes` [out, in]."""
        grouped = codes.view(*self.scales.shape, -1)
        return ((grouped - self.zeros[..., None]) * self.scales[..., None]).view_as(codes)

    def weight(self, codes: Tensor) -> Int4Weight:
        """`codes` [out, in] as a weight, scales in bfloat16."""
        return Int4Weight(
            pack_nibbles(codes.to(torch.uint8)),
            self.scales.bfloat16(),
            None if self.symmetric else self.zeros.to(torch.uint8),
        )


def fit_grid(
    weight: Tensor, group_size: int, *, symmetric: bool, hessian: Tensor | None = None
) -> Grid:
    """The grid of each group of `weight` [out, in].

    Without `hessian` it covers the group from its least to its greatest value. With `hessian`
    ([in, in], second moments of the inputs) the range is narrowed where that reduces the group's
    part of the output error (the AWQ authors' code makes the same search; here the error is taken
    from the second moments, not from samples). A symmetric grid reaches one step further on one
    side; it is mirrored where that helps, and its scale is then negative.
    """
    num_rows = len(weight) if weight.is_cuda else max(1, _CACHED_VALUES // weight.shape[1])
    parts = [
        _fit_rows(rows, group_size, symmetric, hessian) for rows in torch.split(weight, num_rows)
    ]
    scales, zeros = (torch.cat([getattr(p, name) for p in parts]) for name in ("scales", "zeros"))
    return Grid(scales, zeros, symmetric)


def _fit_rows(weight: Tensor, group_size: int, symmetric: bool, hessian: Tensor | None) -> Grid:
    grouped = weight.view(weight.shape[0], -1, group_size)
    whole = _grid_over(grouped, 1.0, symmetric)
    if hessian is None:
        return whole
    num_groups = grouped.shape[1]
    index = torch.arange(num_groups, device=weight.device)
    blocks = hessian.view(num_groups, group_size, num_groups, group_size)[index, :, index, :]
    best, least = whole, _group_errors(whole, weight, blocks)
    for share in _CLIP_SHARES:
        narrowed = _grid_over(grouped, share, symmetric)
        for grid in (narrowed, narrowed.turned()) if symmetric else (narrowed,):
            errors = _group_errors(grid, weight, blocks)
            better = errors < least
            best = Grid(
                torch.where(better, grid.scales, best.scales),
                torch.where(better, grid.zeros, best.zeros),
                symmetric,
            )
            least = torch.where(better, errors, least)
    return best


def _grid_over(grouped: Tensor, share: float, symmetric: bool) -> Grid:
    """The grid that covers `share` of each group's range."""
    low = grouped.amin(-1).clamp(max=0) * share
    high = grouped.amax(-1).clamp(min=0) * share
    covered = 2 * torch.maximum(high, -low) if symmetric else high - low
    scales = covered / MAX_CODE
    # A group of zeros needs a scale too; any will do.
    scales = scales.clamp(min=torch.finfo(torch.bfloat16).tiny).bfloat16().float()
    if symmetric:
        zeros = torch.full_like(scales, SYMMETRIC_ZERO)
    else:
        zeros = torch.round(-low / scales).clamp(0, MAX_CODE)
    return Grid(scales, zeros, symmetric)


def _group_errors(grid: Grid, weight: Tensor, blocks: Tensor) -> Tensor:
    """Output error [out, num_groups] of each group by itself; `blocks`: [num_groups, g, g]."""
    error = (weight - grid.values(grid.round(weight))).view(*grid.scales.shape, -1)
    by_group = error.transpose(0, 1)  # [num_groups, out, g]
    return ((by_group @ blocks) * by_group).sum(-1).T


def relative_error(values: Tensor, weight: Tensor) -> float:
    """The squared difference over the squares of `weight`."""
    return float((values - weight).square().sum() / weight.square().sum().clamp(min=1e-30))
