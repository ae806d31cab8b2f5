"""Statistics of a linear's inputs for quantization: second moments and magnitudes."""

import torch
import torch.nn.functional as F
from torch import Tensor

from localllm.quantize.products import add_products
from localllm_kernels.linears import Linears

# Share of the mean input energy that keeps a retargeted weight near the original one.
_RIDGE = 0.01


# Parts of the inputs: of the products of two different parts only one half is computed.
_PARTS = 4


class Moments:
    """Running sums over the inputs of a linear, in float32, which suffices for the token counts in
    use.
    """

    def __init__(
        self, weight: Tensor, dtype: torch.dtype, linears: Linears | None, *, retargets: bool
    ) -> None:
        """`weight`: [out, width]; `dtype`: see `product_dtype`; `linears`: of the device;
        `retargets`: whether `retarget` will be asked for.
        """
        num_outputs, width = weight.shape
        self._weight, self._dtype, self._linears = weight, dtype, linears
        self._products = weight.new_zeros(width, width)
        self._magnitudes = weight.new_zeros(width)
        # The unquantized model's outputs, or where there are many its inputs, with the inputs.
        self._by_outputs = 2 * num_outputs < width
        self._rounded = weight.to(dtype) if self._by_outputs else None
        num_crossed = num_outputs if self._by_outputs else width
        self._crossed = weight.new_zeros(num_crossed, width) if retargets else None
        self._num_rows = 0

    def add(self, x: Tensor, whole: Tensor) -> None:
        """Add the rows of `x`, [num_tokens, width]; `whole`: the unquantized model's inputs."""
        self._magnitudes += x.float().abs().sum(0)
        self._num_rows += len(x)
        x = x.to(self._dtype)
        size = -(-x.shape[1] // _PARTS)
        for at in range(0, x.shape[1], size):
            part = x[:, at : at + size]
            add_products(self._products[at:, at : at + size], x[:, at:], part, self._linears)
        if self._crossed is not None:
            whole = whole.to(self._dtype)
            if self._rounded is not None:
                whole = F.linear(whole, self._rounded)
            add_products(self._crossed, whole, x, self._linears)

    @property
    def hessian(self) -> Tensor:
        """Mean of x·xᵀ, [width, width]."""
        lower = self._products.tril() / self._num_rows
        return lower + lower.tril(-1).T

    @property
    def magnitudes(self) -> Tensor:
        """Mean of |x|, [width]."""
        return self._magnitudes / self._num_rows

    def retarget(self) -> Tensor:
        """The weight whose outputs on x are nearest to those of the original one on `whole`.

        Least squares, with a pull towards the original.
        """
        assert self._crossed is not None
        hessian, crossed = self.hessian, self._crossed / self._num_rows
        wanted = crossed if self._by_outputs else self._weight @ crossed
        difference = wanted - self._weight @ hessian
        hessian.diagonal().add_(_RIDGE * hessian.diagonal().mean())
        correction: Tensor = torch.linalg.solve(hessian, difference.T)
        return self._weight + correction.T
