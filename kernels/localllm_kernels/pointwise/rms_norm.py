"""Root-mean-square norm, alone and with the residual addition before it.

    y = x / sqrt(mean(x²) + eps) · weight

Statistics are in float32; the normed value is rounded to the input's dtype before the weight is
applied, unless that is in float32 (Gemma), as the checkpoints were trained. Source: Zhang and
Sennrich 2019, section 3.
"""

import torch
from torch import Tensor


def rms_norm_reference(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Norm over the last dimension. `x`: [..., width]; `weight`: [width]; a new tensor."""
    wide = x.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    if weight.dtype == torch.float32:
        return (weight * normed).to(x.dtype)
    return weight * normed.to(x.dtype)


def add_rms_norm_reference(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """`residual + x`, normed and plain. All [num_tokens, width]; neither input is changed."""
    total = residual + x
    return rms_norm_reference(total, weight, eps), total
