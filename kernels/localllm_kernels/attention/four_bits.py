"""Keys and values in 4 bits: what becomes of a row before it is rounded, and how it is rounded.

A rotation by a Hadamard matrix H spreads what stands out in a row over all its numbers, so that one
scale for a row serves them all (Ashkboos et al. 2024, "QuaRot"):

    key ≈ Hᵀ (code · scale) / factor + mean        value ≈ Hᵀ (code · scale)

Scores are wrong by q · error, so of keys it matters where queries point. Three figures of a head
say so, which are found once for a model: the mean of its keys, which is subtracted; factors, which
make numbers large where queries are large and keys small; and a triangle by which the error of each
number changes those after it, so that queries see as little of all errors as they can (as GPTQ does
with inputs of weights: Frantar et al. 2022). Each row is rounded by itself, so a token's keys and
values have the same bits in any batch.
"""

import hashlib
from dataclasses import dataclass

import torch
from torch import Tensor

# Codes of 4 bits lie two in a byte, for which torch has no type of its own: that of number i in the
# low half of byte i, that of number i + width / 2 in the high one. They are 8 above -8 to 7.
FOUR_BITS = torch.uint8
MIDDLE = 8
# Of a row's greatest number in steps: between the codes on both sides.
_REACH = 7.5
# Share of the mean moment of queries that is added to each: what is known of them is never all.
_DAMPING = 0.1


@dataclass(frozen=True, slots=True)
class KeyCoding:
    """How the keys of a layer become codes; all float32.

    `means`, `factors`: [kv_heads, head_dim]; `feedback`: [kv_heads, head_dim, head_dim], of which
    only what is above the diagonal counts: row i is what the error of number i, times this, takes
    from the others.
    """

    means: Tensor
    factors: Tensor
    feedback: Tensor

    @classmethod
    def fitted(cls, means: Tensor, spreads: Tensor, queries: Tensor) -> "KeyCoding":
        """For keys with these means and variances, [kv_heads, head_dim] each, and for queries with
        these second moments, [kv_heads, head_dim, head_dim].

        Where queries are large and keys small, a fourth of what would make both alike: more would
        take from the feedback what it gains.
        """
        wide, least = queries.double(), torch.finfo(torch.float32).tiny
        sizes = wide.diagonal(dim1=1, dim2=2)
        factors = ((sizes + least) / (spreads.double() + least)) ** 0.125
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

    def layer(self, index: int) -> "KeyCoding":
        """One layer of codings whose tensors have a first dimension of layers."""
        return KeyCoding(self.means[index], self.factors[index], self.feedback[index])

    @classmethod
    def plain(cls, shape: tuple[int, int, int], device: torch.device) -> "KeyCoding":
        """Of layers about which nothing is known; `shape`: (layers, kv_heads, head_dim)."""
        means, factors = torch.zeros(shape, device=device), torch.ones(shape, device=device)
        return cls(means, factors, torch.zeros(*shape, shape[-1], device=device))


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
    left = rotated((rows.float() - coding.means) * coding.factors)
    scales, inverse = _scales(left)
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
    return values / coding.factors[:, None] + coding.means[:, None]


def _scales(rows: Tensor) -> tuple[Tensor, Tensor]:
    """The scales of rows, and what numbers are multiplied by to become codes."""
    # A number that is not finite makes the scale so.
    most = rows.abs().amax(-1) + (rows - rows).sum(-1)
    scales = (most / _REACH).bfloat16()
    steps = scales.float()
    return scales, torch.where(steps > 0, 1 / steps, 0.0)


def _nearest(steps: Tensor) -> Tensor:
    return steps.round().clamp(-MIDDLE, MIDDLE - 1)


def _bytes(codes: Tensor) -> Tensor:
    return pack_halves((codes.nan_to_num() + MIDDLE).to(torch.uint8))


def pack_halves(codes: Tensor) -> Tensor:
    """`codes`: uint8 below 16 [..., width] -> [..., width / 2]."""
    low, high = codes.chunk(2, dim=-1)
    return low | high << 4
