"""What an operator is held against: the right result, and the time of what would take its place."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from localllm.model.architecture import Architecture
from localllm_kernels.choice import Piece

# Units of rounding that a value may be off by, of its own size and of what its row has on average:
# about twice what the worst of a million sums of rounded terms shows.
TOLERANCE = 10.0
# Float32 sums in another order; a product of inputs that are rounded to fewer bits is far outside.
_FLOAT32_UNIT = 2e-6


@dataclass(frozen=True, slots=True)
class OperatorCase:
    """One operator on one set of inputs.

    `distance`: computes it, and tells how far from the right result it is, in what is allowed;
    `own`, `plain`: it and what would take its place, to be timed; `rows`: of its inputs.
    """

    piece: Piece
    name: str
    rows: int
    distance: Callable[[], float]
    own: Callable[[], object]
    plain: Callable[[], object]


@dataclass(frozen=True, slots=True)
class Sizes:
    """What the shapes of a model's operators follow from, and the types that it computes in."""

    architecture: Architecture
    dtype: torch.dtype
    kv_dtype: torch.dtype
    block_size: int


def distance(found: Tensor, exact: Tensor, unit: float) -> float:
    """How far the worst value is from where it should be, in what is allowed; infinite where it is
    no number, or the shapes differ. `unit`: see `unit_of`.
    """
    if found.shape != exact.shape:
        return float("inf")
    wide = exact.double()
    typical = wide.square().mean(-1, keepdim=True).sqrt()
    allowed = TOLERANCE * unit * (wide.abs() + typical) + 1e-30
    worst = ((found.double() - wide).abs() / allowed).max().item() if found.numel() else 0.0
    return worst if worst == worst else float("inf")


def unit_of(dtype: torch.dtype) -> float:
    """Half the distance between neighbours, as a share of the smaller one."""
    return max(torch.finfo(dtype).eps / 2, _FLOAT32_UNIT if dtype == torch.float32 else 0.0)
