"""Keys and values in 4 bits: what becomes of a row before it is rounded, and how it is rounded.

A rotation by a Hadamard matrix H spreads what stands out in a row over all its numbers, so that one
scale for a row serves them all (Ashkboos et al. 2024, "QuaRot"):

    key ≈ Hᵀ (code · scale) / factor + mean        value ≈ Hᵀ (code · scale)

Scores are wrong by q · error, so of keys it matters where queries point. Three figures of a head
say so, which are found once for a model: means of its keys, the nearest of which is subtracted;
factors, which make numbers large where queries are large and keys small; and a triangle by which
the error of each number changes those after it, so that queries see as little of all errors as they
can (as GPTQ does with inputs of weights: Frantar et al. 2022). There are several means, since a
first token's key is far from all others (Xiao et al. 2023, "attention sinks"), and since keys turn
with their positions. Each row is rounded by itself, so a token's keys and values have the same bits
in any batch.

The context is cut into runs of OWN_KEYS keys. A query meets those of its own run, and their values,
as they are: these are kept besides.
"""

import hashlib
from dataclasses import dataclass

import torch
from torch import Tensor

# Codes of 4 bits lie two in a byte, for which torch has no type of its own: that of number i in the
# low half of byte i, that of number i + width / 2 in the high one. They are 8 above -8 to 7.
FOUR_BITS = torch.uint8
MIDDLE = 8
# Means of a head's keys. The two lowest bits of a key's scale say which one was subtracted, and are
# a part of the scale all the same.
NUM_MEANS = 4
# Keys of a run. Those near a query have most of the weight, and in 4 bits would cause four fifths
# of the loss. Where a run begins, a request can be continued from codes alone.
OWN_KEYS = 64
# A row's greatest number in steps, which have a sign: the best of these for the row is taken.
REACHES = (7.5, -7.5, 8.5, -8.5)
# Share of the mean moment of queries that is added to each, of which few may have been seen: from
# 0.0001 to 1 `pocket` loses as much.
_DAMPING = 0.1


@dataclass(frozen=True, slots=True)
class KeyCoding:
    """How the keys of a layer become codes; all float32.

    `means`: [kv_heads, NUM_MEANS, head_dim], all alike where keys are values; `factors`: [kv_heads,
    head_dim]; `feedback`: [kv_heads, head_dim, head_dim], of which only what is above the diagonal
    counts: row i is what the error of number i, times this, takes from the others.
    """

    means: Tensor
    factors: Tensor
    feedback: Tensor

    @classmethod
    def fitted(cls, means: Tensor, spreads: Tensor, queries: Tensor) -> "KeyCoding":
        """For keys with these means and variances about the nearest, [kv_heads, head_dim], and for
        queries with these second moments, [kv_heads, head_dim, head_dim].
        """
        wide, least = queries.double(), torch.finfo(torch.float32).tiny
        factors = key_factors(spreads, queries).double()
        scaled = wide / (factors[:, :, None] * factors[:, None, :])
        seen = rotated(rotated(scaled).transpose(1, 2))
        damping = _DAMPING * seen.diagonal(dim1=1, dim2=2).mean(1) + least
        identity = torch.eye(seen.shape[1], dtype=seen.dtype, device=seen.device)
        inverse = torch.linalg.inv(seen + damping[:, None, None] * identity)
        upper = torch.linalg.cholesky((inverse + inverse.transpose(1, 2)) / 2, upper=True)
        feedback = upper / upper.diagonal(dim1=1, dim2=2)[:, :, None] - identity
        return cls(means.float(), factors.float(), feedback.float().triu(1).contiguous())

    @property
    def digest(self) -> str:
        """What stands for its values."""
        parts = (self.means, self.factors, self.feedback)
        return hashlib.sha256(b"".join(each.cpu().numpy().tobytes() for each in parts)).hexdigest()

    def to(self, device: torch.device) -> "KeyCoding":
        """The same on a device."""
        parts = (self.means, self.factors, self.feedback)
        return KeyCoding(*(part.to(device) for part in parts))

    def layer(self, index: int) -> "KeyCoding":
        """One layer of codings whose tensors have a first dimension of layers."""
        return KeyCoding(self.means[index], self.factors[index], self.feedback[index])

    @classmethod
    def plain(cls, shape: tuple[int, int, int], device: torch.device) -> "KeyCoding":
        """Of layers about which nothing is known; `shape`: (layers, kv_heads, head_dim)."""
        *outer, width = shape
        means = torch.zeros(*outer, NUM_MEANS, width, device=device)
        feedback = torch.zeros(*shape, width, device=device)
        return cls(means, torch.ones(shape, device=device), feedback)


def key_factors(spreads: Tensor, queries: Tensor) -> Tensor:
    """float32 [..., head_dim], of keys with these variances, and of queries with these second
    moments, [..., head_dim, head_dim].

    Where queries are large and keys small, a fourth of what would make both alike: more would take
    from the feedback what it gains.
    """
    least = torch.finfo(torch.float32).tiny
    sizes = queries.double().diagonal(dim1=-1, dim2=-2)
    return (((sizes + least) / (spreads.double() + least)) ** 0.125).float()


def nearest_means(rows: Tensor, means: Tensor, factors: Tensor) -> Tensor:
    """Which mean each row is nearest to where factors are applied: int64 [..., kv_heads].

    `rows`: [..., kv_heads, head_dim]; `means`: [..., kv_heads, NUM_MEANS, head_dim]; `factors`:
    [..., kv_heads, head_dim].
    """
    away = (rows[..., None, :] - means) * factors[..., None, :]
    return away.square().sum(-1).argmin(-1)


def rotation_size(width: int) -> int:
    """Neighbouring numbers that are rotated together: the greatest power of two that divides."""
    return width & -width


def rotated(rows: Tensor) -> Tensor:
    """`rows`: [..., width], each times H, which is its own inverse."""
    size, shape = rotation_size(rows.shape[-1]), rows.shape
    rows = rows.reshape(-1, size)
    half = 1
    while half < size:
        pairs = rows.view(-1, size // (2 * half), 2, half)
        first, second = pairs[:, :, 0], pairs[:, :, 1]
        rows = torch.stack((first + second, first - second), dim=2).view(-1, size)
        half *= 2
    return rows.view(shape).mul(size**-0.5)


def quantize_keys(rows: Tensor, coding: KeyCoding) -> tuple[Tensor, Tensor]:
    """`rows`: [tokens, kv_heads, head_dim] -> bytes [tokens, kv_heads, head_dim / 2], and bfloat16
    scales [tokens, kv_heads].
    """
    rows = rows.float()
    places = nearest_means(rows, coding.means, coding.factors)
    heads = torch.arange(rows.shape[1], device=rows.device)
    left = rotated((rows - coding.means[heads, places]) * coding.factors)
    scales, inverse = _scales(left, places)
    steps, codes = scales.float(), torch.empty_like(left)
    for i in range(left.shape[-1]):
        codes[..., i] = _nearest(left[..., i] * inverse)
        error = left[..., i] - codes[..., i] * steps
        left[..., i + 1 :] -= error[..., None] * coding.feedback[:, i, i + 1 :]
    return _bytes(codes), scales


def quantize_values(rows: Tensor) -> tuple[Tensor, Tensor]:
    """The same of values, without feedback."""
    values = rotated(rows.float())
    scales, inverse = _scales(values)
    return _bytes(_nearest(values * inverse[..., None])), scales


def dequantize_values(codes: Tensor, scales: Tensor) -> Tensor:
    """`codes`: [..., head_dim / 2]; `scales`: [...] -> float32 [..., head_dim]."""
    numbers = torch.cat((codes & 15, codes >> 4), dim=-1).float() - MIDDLE
    return rotated(numbers * scales.float()[..., None])


def dequantize_keys(codes: Tensor, scales: Tensor, coding: KeyCoding) -> Tensor:
    """`codes`: [..., kv_heads, block_size, head_dim / 2]."""
    values = dequantize_values(codes, scales)
    places = scales.view(torch.int16).long() & (NUM_MEANS - 1)
    heads = torch.arange(len(coding.means), device=codes.device)[:, None]
    return values / coding.factors[:, None] + coding.means[heads, places]


def _scales(rows: Tensor, places: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The scales of rows, and what numbers are multiplied by to become codes. `places`: which of
    the means the scales shall tell.
    """
    # A number that is not finite makes the scale so.
    most = rows.abs().amax(-1) + (rows - rows).sum(-1)
    scales, least = most.bfloat16(), torch.full_like(most, torch.inf)
    for reach in REACHES:
        tried = (most / reach).bfloat16()
        if places is not None:
            tried = (tried.view(torch.int16) & -NUM_MEANS | places.short()).view(torch.bfloat16)
        away = _nearest(rows * _inverse(tried)[..., None]) * tried.float()[..., None] - rows
        error = away.square().sum(-1)
        scales = torch.where(error < least, tried, scales)
        least = torch.minimum(error, least)
    return scales, _inverse(scales)


def _inverse(scales: Tensor) -> Tensor:
    steps = scales.float()
    return torch.where(steps.abs() >= torch.finfo(torch.float32).tiny, 1 / steps, 0.0)


def _nearest(steps: Tensor) -> Tensor:
    return steps.round().clamp(-MIDDLE, MIDDLE - 1)


def _bytes(codes: Tensor) -> Tensor:
    return pack_halves((codes.nan_to_num() + MIDDLE).to(torch.uint8))


def pack_halves(codes: Tensor) -> Tensor:
    """`codes`: uint8 below 16 [..., width] -> [..., width / 2]."""
    low, high = codes.chunk(2, dim=-1)
    return low | high << 4
