"""Rotary position embedding in the half-split layout of the Llama checkpoints.

Element i of a head is paired with element i + head_dim/2, and the pair is rotated by the angle
`position · inv_freq[i]`:

    first'  = first · cos − second · sin
    second' = second · cos + first · sin

Source: Su et al. 2021 (RoFormer), section 3.4.2; the pairing is that of the checkpoints, not the
paper's neighbouring elements.
"""

import torch
from torch import Tensor


def apply_rotary_reference(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate every head. `x`: [num_tokens, heads, head_dim]; `cos`, `sin`: float32
    [num_tokens, head_dim / 2], the rows of each token's position. A new tensor of x's dtype.
    """
    first, second = x.float().chunk(2, dim=-1)
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return turned.to(x.dtype)
