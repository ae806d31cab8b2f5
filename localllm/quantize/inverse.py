"""The inverse of a linear's second moments, in the form that GPTQ and its targets use."""

from dataclasses import dataclass

import torch
from torch import Tensor

# Share of the mean input energy that is added to the moments' diagonal: it keeps a weight near the
# original one in directions that the calibration text says little about.
DAMPING = 0.1
# Triangles up to this size are inverted directly.
_SMALL = 512


@dataclass(frozen=True, slots=True)
class DampedInverse:
    """The inverse of the damped moments of inputs, in order of decreasing energy or their own.

    `order`: int64 [in], the inputs; `factor`: float32 [in, in], the upper triangle U with
    Uᵀ·U = inverse, in that order.
    """

    order: Tensor
    factor: Tensor

    @classmethod
    def of(cls, hessian: Tensor, *, is_ordered: bool = False) -> "DampedInverse":
        """Of `hessian`, float32 [in, in], the mean of x·xᵀ; `is_ordered`: its own order stays.

        Raises: ValueError if it has none.
        """
        order = torch.argsort(hessian.diagonal(), descending=True)
        if is_ordered:
            order = torch.arange(len(hessian), device=hessian.device)
        # Turned around: with L·Lᵀ = turned moments, U is the inverse of L, turned back.
        turned = hessian[order.flip(0)][:, order.flip(0)]
        diagonal = turned.diagonal()
        # An input that is always zero: any weight is right for it, and the matrix would be
        # singular.
        diagonal[diagonal == 0] = diagonal.mean() if diagonal.any() else 1.0
        damping = DAMPING * diagonal.mean()
        for _ in range(8):
            diagonal += damping
            lower, info = torch.linalg.cholesky_ex(turned)
            if info == 0:
                return cls(order, _inverted(lower).flip(0, 1))
            damping = damping * 4
        raise ValueError("the inputs' second moments cannot be inverted")

    def times(self, rows: Tensor) -> Tensor:
        """`rows` [num_rows, in] · inverse, both with the inputs in their own order."""
        ordered = rows[:, self.order] @ self.factor.T @ self.factor
        result: Tensor = torch.empty_like(rows).index_copy_(1, self.order, ordered)
        return result


def _inverted(lower: Tensor) -> Tensor:
    """The inverse of a lower triangle, by halves: nearly all of it are large products."""
    size = len(lower)
    if size <= _SMALL:
        whole = torch.eye(size, device=lower.device)
        result: Tensor = torch.linalg.solve_triangular(lower, whole, upper=False)
        return result
    half = size // 2
    result = torch.zeros_like(lower)
    result[:half, :half] = _inverted(lower[:half, :half])
    result[half:, half:] = _inverted(lower[half:, half:])
    result[half:, :half] = -(result[half:, half:] @ lower[half:, :half]) @ result[:half, :half]
    return result
