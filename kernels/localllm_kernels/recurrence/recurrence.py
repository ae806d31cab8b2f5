"""Recurrences with a matrix for each head behind a short convolution, from step to step: the gated
delta rule, and Mamba-2. Of a request's rows, each the inputs of queries, keys and values, a gate,
and factors for each value head:

    q, k, v = silu(bias + conv(inputs)),   grown = softplus(factor + bias)

Delta rule: q, k normed to length 1, q divided by √key_width; a second factor b
    S ← exp(decay · grown) · S
    S ← S + k ⊗ (most · sigmoid(b) · (v − Sᵀk));   out = norm(Sᵀq) · silu(gate)

Mamba-2, which calls them C, B and x
    S ← exp(decay · grown) · S + k ⊗ (grown · v);   out = norm((Sᵀq + skip · v) · silu(gate))

S is a matrix [key_width, value_width] for each value head; consecutive value heads share a key
head. The delta rule norms each head by itself, Mamba-2 all heads of a key head as one. All of it is
in float32, token by token in order, so that a row's result does not depend on where a step begins.
Where S is kept in float16, each token's is rounded, before anything is read from it.

A step may end in drafted rows, which may be rejected. So it leaves S behind its last settled row,
and the inputs of all its rows in the ring: the next step first goes on over those of them that
were accepted.
Source: Yang, Kautz and Hatamizadeh 2024 (Gated DeltaNet), section 3; Dao and Gu 2024 (Mamba-2),
section 3.4 in its recurrent form; the modeling files of Qwen3.5 and Granite 4 in transformers.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from localllm_kernels.recurrence.state_cache import StateCache, States

LENGTH_EPS = 1e-6


@dataclass(frozen=True, slots=True)
class Heads:
    """The heads of a recurrence, and their widths; `is_delta`: the delta rule, else Mamba-2."""

    num_keys: int
    num_values: int
    key_width: int
    value_width: int
    is_delta: bool

    @property
    def keys(self) -> int:
        """Values in all keys of a token."""
        return self.num_keys * self.key_width

    @property
    def values(self) -> int:
        """Values in all values of a token."""
        return self.num_values * self.value_width

    @property
    def conv_width(self) -> int:
        """Channels of queries, keys and values."""
        return 2 * self.keys + self.values

    @property
    def factors(self) -> int:
        """Factors of a token: b before the others of all heads, if there is a b."""
        return (2 if self.is_delta else 1) * self.num_values

    @property
    def row_width(self) -> int:
        """The channels and factors: what is kept of a token."""
        return self.conv_width + self.factors

    @property
    def firsts(self) -> tuple[int, int, int]:
        """The first channel of queries, of keys and of values."""
        if self.is_delta:
            return 0, self.keys, 2 * self.keys
        return self.values + self.keys, self.values, 0

    @property
    def norm_width(self) -> int:
        """Values that are normed as one."""
        return self.value_width if self.is_delta else self.values // self.num_keys

    @property
    def matrix(self) -> tuple[int, int, int]:
        """The shape of a request's S of all heads."""
        return self.num_values, self.key_width, self.value_width


@dataclass(frozen=True, slots=True)
class RecurrenceWeights:
    """All in float32. `conv`: [taps, conv_width], `conv_bias`: [conv_width] or None; `decay`,
    negative, and `bias`: [num_values]; `skip`: [num_values], of Mamba-2; `norm`: [value_width] of
    the delta rule, [values] of Mamba-2, and its `eps`; `most`: how much of a correction is written
    at most, of the delta rule.
    """

    conv: Tensor
    conv_bias: Tensor | None
    decay: Tensor
    bias: Tensor
    skip: Tensor | None
    norm: Tensor
    eps: float
    most: float = 1.0


@dataclass(frozen=True, slots=True)
class RecurrenceRows:
    """`inputs`: [padded_tokens, conv_width]; `gate`: [padded_tokens, values]; `factors`:
    [padded_tokens, factors]. They may be columns of wider tensors.
    """

    inputs: Tensor
    gate: Tensor
    factors: Tensor


def recurrence_reference(
    rows: RecurrenceRows,
    weights: RecurrenceWeights,
    heads: Heads,
    cache: StateCache,
    states: States,
) -> Tensor:
    """[padded_tokens, values], in the dtype of the inputs. Padding rows give zeros."""
    assert cache.matrix is not None
    states = states.on_host
    taps, inputs = len(weights.conv), torch.cat([rows.inputs, rows.factors], dim=1).float()
    out = inputs.new_zeros((len(inputs), heads.num_values, heads.value_width))
    for i, slot in enumerate(states.slots):
        first, end, start = states.bounds[i], states.bounds[i + 1], states.starts[i]
        stands = states.stands[i]
        held = cache.rows[slot, cache.between(max(0, stands - taps + 1), start)]
        missing = held.new_zeros((start - stands + taps - 1 - len(held), inputs.shape[1]))
        seen = torch.cat([missing, held, inputs[first:end]])
        q, k, v, decay, beta = _operands(seen, weights, heads)
        kept = cache.matrix[slot]
        matrix = torch.zeros_like(kept).float() if stands == 0 else kept.float().clone()
        stops = {each.num_rows + start: each.slot for each in states.saves if each.request == i}
        stops_at = {states.settled[i]: slot}
        for t in range(len(q)):
            matrix = matrix * decay[t, :, None, None]
            delta = v[t]
            if heads.is_delta:
                delta = delta - (matrix * k[t, :, :, None]).sum(1)
            matrix = matrix + k[t, :, :, None] * (beta[t, :, None] * delta)[:, None]
            matrix = matrix.to(kept.dtype).float()
            position = stands + t
            if position >= start:
                found = (matrix * q[t, :, :, None]).sum(1)
                if weights.skip is not None:
                    found = found + weights.skip[:, None] * v[t]
                out[first + position - start] = found
            for each in (stops, stops_at):
                if position + 1 in each:
                    cache.matrix[each[position + 1]] = matrix
        for position, target in stops.items():
            count = position - stands + taps - 1
            cache.keep(target, seen[:count], position)
        cache.keep(slot, seen, start + end - first)
    return _gated(out.flatten(1), rows.gate.float(), weights, heads).to(rows.inputs.dtype)


def _operands(
    seen: Tensor, weights: RecurrenceWeights, heads: Heads
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Queries, keys and values [tokens, num_values, width], and the factors on what was there and
    on what is written [tokens, num_values], of all rows but the first, of which a tap is too far.
    """
    taps, width = len(weights.conv), heads.conv_width
    count = len(seen) - taps + 1
    total = seen.new_zeros((count, width))
    if weights.conv_bias is not None:
        total = total + weights.conv_bias
    for tap in range(taps):
        total = total + seen[tap : tap + count, :width] * weights.conv[tap]
    mixed, share = _silu(total), heads.num_values // heads.num_keys
    of_query, of_key, of_value = heads.firsts
    q, k = (
        mixed[:, each : each + heads.keys].reshape(count, heads.num_keys, heads.key_width)
        for each in (of_query, of_key)
    )
    v = mixed[:, of_value : of_value + heads.values]
    a = seen[taps - 1 :, heads.row_width - heads.num_values :] + weights.bias
    # softplus, without its overflow.
    grown = beta = a.clamp(min=0) + torch.log1p((-a.abs()).exp())
    if heads.is_delta:
        q, k = _unit(q) * heads.key_width**-0.5, _unit(k)
        beta = weights.most / (1 + (-seen[taps - 1 :, width : width + heads.num_values]).exp())
    return (
        q.repeat_interleave(share, 1),
        k.repeat_interleave(share, 1),
        v.reshape(count, heads.num_values, heads.value_width),
        (weights.decay * grown).exp(),
        beta,
    )


def _gated(out: Tensor, gate: Tensor, weights: RecurrenceWeights, heads: Heads) -> Tensor:
    if not heads.is_delta:
        out = out * _silu(gate)
    stretches = out.view(len(out), -1, heads.norm_width)
    factors = torch.rsqrt(stretches.square().mean(-1, keepdim=True) + weights.eps)
    normed = stretches * factors * weights.norm.view(-1, heads.norm_width)
    return normed.flatten(1) * (_silu(gate) if heads.is_delta else 1)


def _silu(x: Tensor) -> Tensor:
    return x / (1 + (-x).exp())


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + LENGTH_EPS)
