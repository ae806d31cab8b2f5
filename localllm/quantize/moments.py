"""Statistics of a linear's inputs for quantization: second moments and magnitudes."""

import torch
from torch import Tensor

# Share of the mean input energy that keeps a retargeted weight near the original one.
_RIDGE = 0.01


class Moments:
    """Running sums over inputs, in float32, which suffices for the token counts in use."""

    def __init__(self, width: int, device: torch.device) -> None:
        self._products = torch.zeros(width, width, device=device)
        self._crossed = torch.zeros(width, width, device=device)
        self._magnitudes = torch.zeros(width, device=device)
        self._num_rows = 0

    def add(self, x: Tensor, whole: Tensor) -> None:
        """Add the rows of `x`, [num_tokens, width]; `whole`: the unquantized model's inputs."""
        x, whole = x.float(), whole.float()
        self._products.addmm_(x.T, x)
        self._crossed.addmm_(whole.T, x)
        self._magnitudes += x.abs().sum(0)
        self._num_rows += len(x)

    @property
    def hessian(self) -> Tensor:
        """Mean of x·xᵀ, [width, width]."""
        return self._products / self._num_rows

    @property
    def magnitudes(self) -> Tensor:
        """Mean of |x|, [width]."""
        return self._magnitudes / self._num_rows

    def retarget(self, weight: Tensor) -> Tensor:
        """The weight [out, width] whose outputs on x are nearest to `weight`'s on `whole`.

        Least squares, with a pull towards `weight`.
        """
        hessian = self.hessian
        pull = _RIDGE * hessian.diagonal().mean()
        damped = hessian + pull * torch.eye(len(hessian), device=hessian.device)
        difference = weight @ (self._crossed / self._num_rows - hessian)
        correction: Tensor = torch.linalg.solve(damped, difference.T)
        return weight + correction.T
