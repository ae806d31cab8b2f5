"""A keyed draw from softmax(values / T): argmax(values / T + g) with Gumbel noise g from a hash.

Adding Gumbel noise and taking the maximum draws from the softmax (the Gumbel-max trick; Maddison et
al. 2014, section 2).

The noise of a token is a pure function of key and id, so the draw is the same whatever else is
computed with it, and whichever tokens were filtered out before.
"""

import torch
from torch import Tensor

_MASK32 = (1 << 32) - 1


def gumbel_argmax_reference(
    values: Tensor, temperature: float, token_ids: Tensor | None, key: int
) -> int:
    """Index of the winning value.

    `values`: [count]; `token_ids`: int64 [count], or None where they are 0, 1, 2, …; `key`: 64
    bits.
    """
    if token_ids is None:
        token_ids = torch.arange(values.shape[0], device=values.device)
    return int((values / temperature + gumbel_noise(key, token_ids)).argmax())


def gumbel_noise(key: int, token_ids: Tensor) -> Tensor:
    """Standard Gumbel noise for each of `token_ids` (int64, any shape), float32."""
    bits = _mix32(token_ids * 0x9E3779B1 + (key & _MASK32))
    bits = _mix32(bits ^ (key >> 32))
    uniform = (bits.double() + 0.5) * 2.0**-32
    return -torch.log(-torch.log(uniform)).float()


def _mix32(bits: Tensor) -> Tensor:
    """A 32-bit integer hash in int64 arithmetic (two rounds of multiply and shift)."""
    bits = bits & _MASK32
    bits = ((bits ^ (bits >> 16)) * 0x7FEB352D) & _MASK32
    bits = ((bits ^ (bits >> 15)) * 0x846CA68B) & _MASK32
    return bits ^ (bits >> 16)
