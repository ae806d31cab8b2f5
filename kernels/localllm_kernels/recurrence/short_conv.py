"""A causal convolution of few taps over each channel by itself, between two gates, from step to
step. Of the gates b and c and the values v of position p:

    x[p] = b[p] · v[p],   x = 0 before position 0
    y[p] = c[p] · (bias + Σ_j weight[j] · x[p − taps + 1 + j])

The sum is over the taps in order, in float32, and rounded once, so that a row's result does not
depend on the rows computed beside it.
Source: LFM2's modeling file in transformers; Poli et al. 2023 (Hyena), section 3.
"""

import torch
from torch import Tensor

from localllm_kernels.recurrence.state_cache import StateCache, States


def short_conv_reference(
    rows: Tensor, weight: Tensor, bias: Tensor | None, cache: StateCache, states: States
) -> Tensor:
    """`rows`: [padded_tokens, 3 · width], b, c and v of all requests, one after another; `weight`:
    float32 [taps, width]; `bias`: float32 [width] -> [padded_tokens, width] in the dtype of rows.

    Reads the x before each request's first row from its slot, and writes the new ones there and to
    the slots of the copies. Padding rows give zeros.
    """
    before, after, values = rows.chunk(3, dim=-1)
    x, taps = (before * values).float(), len(weight)
    out = torch.zeros_like(before)
    states = states.on_host
    for i, slot in enumerate(states.slots):
        first, end, start = states.bounds[i], states.bounds[i + 1], states.starts[i]
        held = cache.rows[slot, cache.places(start)]
        missing = held.new_zeros((taps - 1 - len(held), x.shape[1]))
        seen, count = torch.cat([missing, held, x[first:end]]), end - first
        total = torch.zeros_like(seen[:count]) if bias is None else bias.expand(count, -1)
        for tap in range(taps):
            total = total + seen[tap : tap + count] * weight[tap]
        out[first:end] = total.to(out.dtype)
        for save in states.saves:
            if save.request == i:
                cache.keep(save.slot, seen[: taps - 1 + save.num_rows], start + save.num_rows)
        cache.keep(slot, seen, start + count)
    return after * out
