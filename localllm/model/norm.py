"""Norms of rows: root-mean-square (Zhang and Sennrich 2019), and with the mean taken out (Ba et al.
2016), whose operator is the same after the subtraction.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from localllm_kernels import Ops


@dataclass(frozen=True, slots=True)
class NormSpec:
    """A norm without its weight, whose tensor in the layer is `name` + ".weight".

    `offset` is added to the stored weight (Gemma's are 1 too small); `is_centred`: the mean is
    subtracted first; `rounds_last`: rows are rounded after the weight, not before it.
    """

    name: str
    eps: float
    offset: float = 0.0
    is_centred: bool = False
    rounds_last: bool = False

    @property
    def is_wide(self) -> bool:
        """Whether its weight is kept in float32."""
        return self.rounds_last or self.offset != 0

    def with_weight(self, stored: Tensor) -> Norm:
        """The norm with its weight, `stored` as in the checkpoint."""
        # 1 + w has fewer bits for w than w had.
        weight = stored.float() + self.offset if self.is_wide else stored
        return Norm(weight, self.eps, self.is_centred)


@dataclass(frozen=True, slots=True)
class Norm:
    """A norm of rows; `weight`: [width]. A weight in float32 is applied before rows are rounded."""

    weight: Tensor
    eps: float
    is_centred: bool = False

    def __call__(self, x: Tensor, ops: Ops) -> Tensor:
        """`x`: [num_tokens, width], normed; a new tensor."""
        if not self.is_centred:
            return ops.rms_norm(x, self.weight, self.eps)
        wide = x.float()
        centred = wide - wide.mean(-1, keepdim=True)
        return ops.rms_norm(centred, self.weight.float(), self.eps).to(x.dtype)

    def after_sum(self, x: Tensor, residual: Tensor, ops: Ops) -> tuple[Tensor, Tensor]:
        """`residual + x`, normed and plain; all [num_tokens, width]."""
        if not self.is_centred:
            return ops.add_rms_norm(x, residual, self.weight, self.eps)
        total = residual + x
        return self(total, ops), total
