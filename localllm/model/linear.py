"""Matrix products with weights."""

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Linear:
    """`x · weightᵀ + bias`; weight: [out, in]."""

    weight: Tensor
    bias: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        """`x`: [num_tokens, in] -> [num_tokens, out]."""
        return F.linear(x, self.weight, self.bias)
