"""The root-mean-square norm (Zhang and Sennrich 2019), whose operator is in `Ops`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class RMSNorm:
    """A weight of the normed width."""

    weight: Tensor
    eps: float
