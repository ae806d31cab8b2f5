"""What an operator is compared with: the exact result, and the time of its alternative."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from localllm.model.architecture import Architecture
from localllm_kernels.compiling.choice import Piece

# How many rounding units a value may be off, relative to its own size plus its row's root mean
# square: about twice the worst error among a million sums of rounded terms.
TOLERANCE = 10.0
# Covers float32 sums in another order; a product of inputs rounded to fewer bits is far outside.
_FLOAT32_UNIT = 2e-6


@dataclass(frozen=True, slots=True)
class OperatorCase:
    """One operator on one set of inputs.

    `distance`: computes it, and returns its distance from the exact result as a multiple of the
    tolerance; `own`, `plain`: the operator and its alternative, to be timed; `rows`: rows of its
    inputs.
    """

    piece: Piece
    name: str
    rows: int
    distance: Callable[[], float]
    own: Callable[[], object]
    plain: Callable[[], object]


@dataclass(frozen=True, slots=True)
class Sizes:
    """What determines the shapes of a model's operators, and the dtypes that it computes in."""

    architecture: Architecture
    dtype: torch.dtype
    kv_dtype: torch.dtype
    block_size: int


def distance(found: Tensor, exact: Tensor, unit: float) -> float:
    """The largest error of a value as a multiple of the tolerance; infinite if a value is NaN or
    the shapes differ. `unit`: see `unit_of`.
    """
    if found.shape != exact.shape:
        return float("inf")
    wide = exact.double()
    typical = wide.square().mean(-1, keepdim=True).sqrt()
    allowed = TOLERANCE * unit * (wide.abs() + typical) + 1e-30
    worst = ((found.double() - wide).abs() / allowed).max().item() if found.numel() else 0.0
    return worst if worst == worst else float("inf")


def unit_of(dtype: torch.dtype) -> float:
    """The rounding unit of a dtype: half the distance between neighbours, relative to the smaller
    one. For float32, at least the error of a sum in another order.
    """
    return max(torch.finfo(dtype).eps / 2, _FLOAT32_UNIT if dtype == torch.float32 else 0.0)
