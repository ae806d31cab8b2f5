"""The gated delta rule behind a short convolution, from step to step. Of a request's rows, each the
inputs of queries, keys and values and a gate, and b and a for each value head:

    q, k, v = silu(conv(inputs));   q, k normed to length 1, q divided by √key_width
    S ← exp(decay · softplus(a + bias)) · S
    S ← S + k ⊗ (sigmoid(b) · (v − Sᵀk));   out = norm(Sᵀq) · silu(gate)

S is a matrix [key_width, value_width] for each value head; consecutive value heads share a key
head. All of it is in float32, token by token in order, so that a row's result does not depend on
where a step begins.

A step may end in drafted rows, which may be rejected. So it leaves S behind its last settled row,
and the inputs of all its rows in the ring: the next step first goes on over those of them that
were accepted.
Source: Yang, Kautz and Hatamizadeh 2024 (Gated DeltaNet), section 3; the modeling files of
Qwen3-Next and Qwen3.5 in transformers.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from localllm_kernels.state_cache import StateCache, StateSlots

LENGTH_EPS = 1e-6


@dataclass(frozen=True, slots=True)
class DeltaHeads:
    """The heads of a gated delta rule, and their widths."""

    num_keys: int
    num_values: int
    key_width: int
    value_width: int

    @property
    def conv_width(self) -> int:
        """Channels of queries, keys and values."""
        return 2 * self.num_keys * self.key_width + self.num_values * self.value_width

    @property
    def row_width(self) -> int:
        """Those, and b and a: what is kept of a token."""
        return self.conv_width + 2 * self.num_values

    @property
    def matrix(self) -> tuple[int, int, int]:
        """The shape of a request's S of all heads."""
        return self.num_values, self.key_width, self.value_width


@dataclass(frozen=True, slots=True)
class DeltaWeights:
    """`conv`: float32 [taps, conv_width]; `decay`, negative, and `bias`: float32 [num_values];
    `norm`: float32 [value_width], of each head, and its `eps`.
    """

    conv: Tensor
    decay: Tensor
    bias: Tensor
    norm: Tensor
    eps: float


def delta_net_reference(
    mixed: Tensor,
    factors: Tensor,
    weights: DeltaWeights,
    heads: DeltaHeads,
    cache: StateCache,
    states: StateSlots,
) -> Tensor:
    """`mixed`: [padded_tokens, conv_width + num_values · value_width], with the gate; `factors`:
    [padded_tokens, 2 · num_values], b and a -> [padded_tokens, num_values · value_width], in the
    dtype of `mixed`. Padding rows give zeros.
    """
    assert cache.matrix is not None
    taps, width = len(weights.conv), heads.conv_width
    inputs = torch.cat([mixed[:, :width], factors], dim=1).float()
    out = inputs.new_zeros((len(mixed), heads.num_values, heads.value_width))
    for i, slot in enumerate(states.slots):
        first, end, start = states.bounds[i], states.bounds[i + 1], states.starts[i]
        stands = states.stands[i]
        held = cache.rows[slot, cache.between(max(0, stands - taps + 1), start)]
        missing = held.new_zeros((start - stands + taps - 1 - len(held), inputs.shape[1]))
        seen = torch.cat([missing, held, inputs[first:end]])
        q, k, v, beta, decay = _operands(seen, weights, heads)
        matrix = torch.zeros_like(cache.matrix[slot]) if stands == 0 else cache.matrix[slot].clone()
        stops = {each.num_rows + start: each.slot for each in states.saves if each.request == i}
        stops_at = {states.settled[i]: slot}
        for t in range(len(q)):
            matrix = matrix * decay[t, :, None, None]
            delta = beta[t, :, None] * (v[t] - (matrix * k[t, :, :, None]).sum(1))
            matrix = matrix + k[t, :, :, None] * delta[:, None]
            position = stands + t
            if position >= start:
                out[first + position - start] = (matrix * q[t, :, :, None]).sum(1)
            for each in (stops, stops_at):
                if position + 1 in each:
                    cache.matrix[each[position + 1]] = matrix
        for position, target in stops.items():
            count = position - stands + taps - 1
            cache.keep(target, seen[:count], position)
        cache.keep(slot, seen, start + end - first)
    normed = out * torch.rsqrt(out.square().mean(-1, keepdim=True) + weights.eps) * weights.norm
    gate = mixed[:, width:].float()
    return (normed.flatten(1) * (gate / (1 + (-gate).exp()))).to(mixed.dtype)


def _operands(
    seen: Tensor, weights: DeltaWeights, heads: DeltaHeads
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Queries, keys and values [tokens, num_values, width], and the factors on what is written and
    on what was there [tokens, num_values], of all rows but the first, of which a tap is too far.
    """
    taps, width = len(weights.conv), heads.conv_width
    count = len(seen) - taps + 1
    total = seen.new_zeros((count, width))
    for tap in range(taps):
        total = total + seen[tap : tap + count, :width] * weights.conv[tap]
    mixed = total / (1 + (-total).exp())
    keys = heads.num_keys * heads.key_width
    shape = (count, heads.num_keys, heads.key_width)
    share = heads.num_values // heads.num_keys
    q = _unit(mixed[:, :keys].reshape(shape)).repeat_interleave(share, 1)
    k = _unit(mixed[:, keys : 2 * keys].reshape(shape)).repeat_interleave(share, 1)
    v = mixed[:, 2 * keys :].reshape(count, heads.num_values, heads.value_width)
    b, a = seen[taps - 1 :, width:].chunk(2, dim=-1)
    a = a + weights.bias
    # softplus, without its overflow.
    grown = a.clamp(min=0) + torch.log1p((-a.abs()).exp())
    return (
        q * heads.key_width**-0.5,
        k,
        v,
        1 / (1 + (-b).exp()),
        (weights.decay * grown).exp(),
    )


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + LENGTH_EPS)
