"""Products of calibration: as exact as their use needs, and as fast as the device has them.

What calibration adds up are means over thousands of tokens, each of which differs from the
unquantized model's by some percent. Rounding the numbers to bfloat16 changes them by a thousandth.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from localllm.operators.cpu_products import multiplies_bfloat16
from localllm_kernels.linears import Linears

# Tokens and outputs of a product for which its numbers stay in a processor's caches.
_TOKENS, _OUTPUTS = 1024, 2432


def product_dtype(device: torch.device) -> torch.dtype:
    """The dtype of the numbers that are multiplied: bfloat16 where that is faster, else float32."""
    has_bfloat16 = (
        torch.cuda.is_bf16_supported(including_emulation=False)
        if device.type == "cuda"
        else multiplies_bfloat16()
    )
    return torch.bfloat16 if has_bfloat16 else torch.float32


@dataclass(frozen=True, slots=True)
class RoundedLinear:
    """`x · weightᵀ + bias` in float32, of numbers rounded to the dtype of `weight`, [out, in]."""

    weight: Tensor
    bias: Tensor | None

    def __call__(self, x: Tensor) -> Tensor:
        y = F.linear(x.to(self.weight.dtype), self.weight).float()
        return y if self.bias is None else y + self.bias


def add_products(total: Tensor, left: Tensor, right: Tensor, linears: Linears | None) -> None:
    """Add leftᵀ · right to `total`, float32 [n, m]; [num_tokens, n] and [num_tokens, m].

    Sums are float32 in any case: `Moments` takes the difference of two that are nearly equal.
    """
    if linears is None or left.dtype == torch.float32 or left.is_cuda:
        total.addmm_(left.T.float(), right.float())
        return
    for a, b in zip(torch.split(left, _TOKENS), torch.split(right, _TOKENS), strict=True):
        rows = a.T.float().contiguous()
        for at in range(0, b.shape[1], _OUTPUTS):
            columns = b.T[at : at + _OUTPUTS].contiguous()
            total[:, at : at + _OUTPUTS] += linears.plain(columns, None)(rows)
