"""The grids that weights are rounded to: each group of inputs has a scale for its few codes."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Self

import torch
from torch import Tensor

from localllm.model.packed.weight import PackedWeight

# Values of a weight for which grids are fitted at a time on a CPU: so many stay in its caches.
_CACHED_VALUES = 1 << 18
# Shares of a group's range that are tried when outliers may be clipped.
CLIP_SHARES = tuple(1 - 0.04 * step for step in range(13))

# Rounds values [out] of an input in a group: their codes, and what these stand for.
RoundColumn = Callable[[int, Tensor], tuple[Tensor, Tensor]]


class Grid(ABC):
    """What the values of a weight [out, in] can be. `scales`: float32 [out, num_groups]."""

    scales: Tensor

    @abstractmethod
    def round(self, weight: Tensor) -> Tensor:
        """Nearest codes, float32 [out, in], of `weight` [out, in]."""

    @abstractmethod
    def values(self, codes: Tensor) -> Tensor:
        """The values of `codes` [out, in]."""

    @abstractmethod
    def by_column(self) -> RoundColumn:
        """Rounds one input after another, as `round` does."""

    @abstractmethod
    def weight(self, codes: Tensor) -> PackedWeight:
        """`codes` [out, in] as a weight."""

    @abstractmethod
    def where(self, condition: Tensor, other: Self) -> Self:
        """The groups of this grid where `condition`, bool [out, num_groups], holds; else others."""

    @classmethod
    @abstractmethod
    def joined(cls, parts: Sequence[Self]) -> Self:
        """The grids of neighbouring outputs as one."""

    def grouped(self, weight: Tensor) -> Tensor:
        """A weight or its codes, [out, in], as [out, num_groups, inputs of a group]."""
        return weight.view(*self.scales.shape, -1)


class GridKind(ABC):
    """A way to make grids. `group_size`: inputs that share a scale."""

    group_size: int

    def of_whole(self, weight: Tensor) -> Self:
        """The same, of a weight that is fitted in parts."""
        return self

    @abstractmethod
    def candidates(self, weight: Tensor, *, has_moments: bool) -> Iterator[Grid]:
        """Grids of some outputs of that weight, of which each group takes the best one; the first
        of two as good. `has_moments`: the errors are those of outputs, not of weights.
        """


def fit_grid(weight: Tensor, kind: GridKind, hessian: Tensor | None = None) -> Grid:
    """The grid of each group of `weight` [out, in].

    Of the candidates it is the one with the least error: of the group's weights, or with `hessian`
    ([in, in], second moments of the inputs) of its part of the outputs (the AWQ authors' code makes
    the same search; here the error is taken from the second moments, not from samples).
    """
    kind = kind.of_whole(weight)
    num_rows = len(weight) if weight.is_cuda else max(1, _CACHED_VALUES // weight.shape[1])
    parts = [_fit_rows(rows, kind, hessian) for rows in torch.split(weight, num_rows)]
    return type(parts[0]).joined(parts)


def _fit_rows(weight: Tensor, kind: GridKind, hessian: Tensor | None) -> Grid:
    candidates = kind.candidates(weight, has_moments=hessian is not None)
    best, blocks, least = next(candidates), None, None
    if hessian is not None:
        size, num_groups = kind.group_size, weight.shape[1] // kind.group_size
        index = torch.arange(num_groups, device=weight.device)
        blocks = hessian.view(num_groups, size, num_groups, size)[index, :, index, :]
    for grid in candidates:
        least = _group_errors(best, weight, blocks) if least is None else least
        errors = _group_errors(grid, weight, blocks)
        best, least = grid.where(errors < least, best), torch.minimum(errors, least)
    return best


def _group_errors(grid: Grid, weight: Tensor, blocks: Tensor | None) -> Tensor:
    """The error [out, num_groups] of each group by itself; `blocks`: [num_groups, g, g]."""
    error = grid.grouped(weight - grid.values(grid.round(weight)))
    if blocks is None:
        return error.square().sum(-1)
    by_group = error.transpose(0, 1)  # [num_groups, out, g]
    return ((by_group @ blocks) * by_group).sum(-1).T


def relative_error(values: Tensor, weight: Tensor) -> float:
    """The squared difference over the squares of `weight`."""
    return float((values - weight).square().sum() / weight.square().sum().clamp(min=1e-30))
