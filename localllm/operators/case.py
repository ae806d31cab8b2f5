"""One operator on one set of inputs: the row of the table that the self-check and the benches read.

The rows are made in `pointwise_cases.py`, `attention_cases.py`, `recurrence_cases.py` and
`product_cases.py`, each operator once.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from localllm.model.architecture import Architecture
from localllm_kernels import TORCH_OPS, Ops
from localllm_kernels.attention.kv_cache import KVCache, plain_rows
from localllm_kernels.compiling.choice import Piece
from localllm_kernels.compiling.traits import Arithmetic

# How many rounding units a value may be off, relative to its own size plus its row's root mean
# square: about twice the worst error among a million sums of rounded terms.
TOLERANCE = 10.0
# Covers float32 sums in another order; a product of inputs rounded to fewer bits is far outside.
_FLOAT32_UNIT = 2e-6


@dataclass(frozen=True, slots=True)
class Cost:
    """The bytes that an operator has to move at least, and the operations that it computes."""

    num_bytes: int
    operations: int
    arithmetic: Arithmetic = "fp32"


@dataclass(frozen=True, slots=True)
class OperatorCase:
    """One operator on one set of inputs.

    `piece`: what is left to torch if it fails; `rows`: rows of its inputs; `own`, `plain`: the
    operator and its alternative, to be timed; `distance`: computes it, and returns its distance
    from the exact result as a multiple of the tolerance.
    """

    piece: Piece | None
    name: str
    rows: int
    own: Callable[[], object]
    plain: Callable[[], object]
    distance: Callable[[], float]
    cost: Cost


@dataclass(frozen=True, slots=True)
class Sizes:
    """What determines the shapes of a model's operators, and the dtypes that it computes in."""

    architecture: Architecture
    dtype: torch.dtype
    kv_dtype: torch.dtype
    block_size: int


# Computes an operator of the table on inputs.
Call = Callable[..., Tensor | tuple[Tensor, ...]]


@dataclass(frozen=True, slots=True)
class Setting:
    """Where operators are tried: a model's sizes, a device, and two tables of operators, that to
    be checked and its alternative.
    """

    sizes: Sizes
    device: torch.device
    own: Ops
    rival: Ops = TORCH_OPS

    @property
    def unit(self) -> float:
        """See `unit_of`."""
        return unit_of(self.sizes.dtype)

    def values(self, *shape: int) -> Tensor:
        """Random rows, as the operators of `own` take them."""
        dtype = torch.float32 if self.own.traits.wide_rows else self.sizes.dtype
        return torch.randn(shape, device=self.device).to(dtype)

    def norm_weight(self, width: int, *, is_wide: bool) -> Tensor:
        """A random weight of a norm; `is_wide`: see NormSpec."""
        weight = 1 + 0.1 * self.values(width)
        return weight.float() if is_wide else weight

    def case(
        self, piece: Piece, name: str, call: Call, inputs: tuple[Any, ...], cost: Cost
    ) -> OperatorCase:
        """An operator whose exact result is torch's in float32; the first input has the rows."""

        def away() -> float:
            found, exact = call(self.own, *inputs), call(TORCH_OPS, *map(widened, inputs))
            pairs = zip(_several(found), _several(exact), strict=True)
            return max(distance(*pair, self.unit) for pair in pairs)

        return OperatorCase(
            piece,
            name,
            len(inputs[0]),
            lambda: call(self.own, *inputs),
            lambda: call(self.rival, *inputs),
            away,
            cost,
        )


def widened(given: Any) -> Any:
    """A tensor or a cache in float32, with the values that its codes stand for."""
    match given:
        case KVCache(key_scales=Tensor() as key_scales, value_scales=Tensor() as value_scales):
            key = value = plain_rows(given.key, key_scales, given.coding, are_keys=True)
            if not given.values_are_keys:
                value = plain_rows(given.value, value_scales, given.coding, are_keys=False)
            uncoded = None if given.uncoded is None else widened(given.uncoded)
            return KVCache(key, value, uncoded=uncoded)
        case KVCache():
            key = given.key.float()
            return KVCache(key, key if given.values_are_keys else given.value.float())
    return given.float()


def _several(found: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return found if isinstance(found, tuple) else (found,)


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
