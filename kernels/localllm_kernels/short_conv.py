"""A causal convolution of few taps over each channel by itself, from step to step.

    y[p] = bias + Σ_j weight[:, j] · x[p − taps + 1 + j],   x = 0 before position 0

The sum is over the taps in order, in float32, and rounded once, so that a row's result does not
depend on the rows computed beside it.
Source: Poli et al. 2023 (Hyena), section 3; the form is that of LFM2's and Mamba's blocks.
"""

import torch
from torch import Tensor

from localllm_kernels.state_cache import StateCache, StateSlots


def short_conv_reference(
    x: Tensor, weight: Tensor, bias: Tensor | None, cache: StateCache, states: StateSlots
) -> Tensor:
    """`x`: [padded_tokens, width], the rows of all requests one after another; `weight`: float32
    [width, taps]; `bias`: float32 [width] -> the shape and dtype of `x`.

    Reads the inputs before each request's first row from its slot, and writes the new ones there
    and to the slots of the copies.
    """
    out = torch.zeros_like(x)
    taps = weight.shape[1]
    for i, slot in enumerate(states.slots):
        first, end, start = states.bounds[i], states.bounds[i + 1], states.starts[i]
        held = cache.rows[slot, cache.places(start)]
        missing = held.new_zeros((taps - 1 - len(held), x.shape[1]))
        seen, count = torch.cat([missing, held, x[first:end].float()]), end - first
        total = torch.zeros_like(seen[:count]) if bias is None else bias.expand(count, -1)
        for tap in range(taps):
            total = total + seen[tap : tap + count] * weight[:, tap]
        out[first:end] = total.to(x.dtype)
        for save in states.saves:
            if save.request == i:
                _keep(cache.rows[save.slot], seen[: taps - 1 + save.num_rows], start, taps)
        _keep(cache.rows[slot], seen, start, taps)
    return out


def _keep(ring: Tensor, seen: Tensor, start: int, taps: int) -> None:
    """Write the last of `seen`, whose first row is that of position `start - taps + 1`."""
    end = start - taps + 1 + len(seen)
    count = min(end, len(seen), ring.shape[0])
    places = torch.arange(end - count, end, device=ring.device) % ring.shape[0]
    ring[places] = seen[len(seen) - count :]
