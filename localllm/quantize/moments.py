"""Statistics of a linear's inputs for quantization: second moments and magnitudes."""

import torch.nn.functional as F
from torch import Tensor

from localllm.quantize.inverse import DampedInverse

# Parts of the inputs: of the products of two different parts only one half is computed.
_PARTS = 8


class Moments:
    """Running sums over the inputs of a linear, in float32, which suffices for the token counts in
    use.
    """

    def __init__(self, weight: Tensor, *, retargets: bool) -> None:
        """`weight`: [out, width]; `retargets`: whether `retarget` will be asked for."""
        num_outputs, width = weight.shape
        self._weight = weight
        self._products = weight.new_zeros(width, width)
        self._magnitudes = weight.new_zeros(width)
        # With the inputs: what the quantized layers before have changed of the outputs, or where
        # there are many, of the inputs.
        self._by_outputs = 2 * num_outputs < width
        num_crossed = num_outputs if self._by_outputs else width
        self._crossed = weight.new_zeros(num_crossed, width) if retargets else None
        self._num_rows = 0

    def add(self, x: Tensor, whole: Tensor) -> None:
        """Add the rows of `x`, [num_tokens, width]; `whole`: the unquantized model's inputs."""
        x, whole = x.float(), whole.float()
        self._magnitudes += x.abs().sum(0)
        self._num_rows += len(x)
        size = -(-x.shape[1] // _PARTS)
        for at in range(0, x.shape[1], size):
            self._products[at:, at : at + size].addmm_(x[:, at:].T, x[:, at : at + size])
        if self._crossed is not None:
            missing = whole - x
            if self._by_outputs:
                missing = F.linear(missing, self._weight)
            self._crossed.addmm_(missing.T, x)

    @property
    def hessian(self) -> Tensor:
        """Mean of x·xᵀ, [width, width]."""
        lower = self._products.tril() / self._num_rows
        return lower + lower.tril(-1).T

    @property
    def magnitudes(self) -> Tensor:
        """Mean of |x|, [width]."""
        return self._magnitudes / self._num_rows

    def retarget(self, inverse: DampedInverse) -> Tensor:
        """The weight whose outputs on x are nearest to those of the original one on `whole`.

        Least squares, with a pull towards the original; `inverse`: of the hessian above.
        """
        assert self._crossed is not None
        crossed = self._crossed / self._num_rows
        missing = crossed if self._by_outputs else self._weight @ crossed
        return self._weight + inverse.times(missing)
