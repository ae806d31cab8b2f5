"""Weights in fewer bits, in one layout each, whatever file format they came from.

A weight is [out, in]. Rows of several weights of a kind can be put together, which is how the
projections of a layer are fused.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

SYMMETRIC_ZERO = 8


def pack_nibbles(codes: Tensor) -> Tensor:
    """`codes`: uint8 [..., 2n] below 16 -> uint8 [..., n]; the even columns in the low halves."""
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpack_nibbles(packed: Tensor) -> Tensor:
    """The inverse of `pack_nibbles`."""
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)


@dataclass(frozen=True, slots=True)
class Int4Weight:
    """4-bit codes in groups along the input: weight = (code - zero) · scale.

    Column j of the codes belongs to input feature `permutation[j]`, to j itself where that is
    None (only act-order checkpoints with groups in the order of the permutation have one).
    """

    codes: Tensor  # uint8 [out, in / 2], see pack_nibbles
    scales: Tensor  # float16, bfloat16 or float32 [out, num_groups]
    zeros: Tensor | None  # uint8 [out, num_groups]; None: 8 everywhere (symmetric)
    permutation: Tensor | None = None  # int64 [in]

    @property
    def shape(self) -> tuple[int, int]:
        """(out, in)."""
        return self.codes.shape[0], 2 * self.codes.shape[1]

    @property
    def group_size(self) -> int:
        """Columns that share a scale."""
        return self.shape[1] // self.scales.shape[1]

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """[out, in] in the order of the input features, in `dtype` (the scales' if None).

        The product of code and scale is rounded once, in `dtype`.
        """
        scales = self.scales if dtype is None else self.scales.to(dtype)
        codes = self.unpacked_codes().view(*self.scales.shape, -1)
        zeros = SYMMETRIC_ZERO if self.zeros is None else self.zeros.to(scales.dtype)[:, :, None]
        values = ((codes.to(scales.dtype) - zeros) * scales[:, :, None]).flatten(1)
        if self.permutation is None:
            return values
        ordered = torch.empty_like(values)
        ordered[:, self.permutation] = values
        return ordered

    def unpacked_codes(self) -> Tensor:
        """uint8 [out, in], in the order of the permutation."""
        return unpack_nibbles(self.codes)

    def fuses_with(self, other: object) -> bool:
        """Whether the rows of both can stand in one weight."""
        return (
            isinstance(other, Int4Weight)
            and self.group_size == other.group_size
            and self.scales.dtype == other.scales.dtype
            and _are_equal(self.permutation, other.permutation)
        )

    @classmethod
    def stack(cls, parts: Sequence["Int4Weight"]) -> "Int4Weight":
        """The rows of all parts, which must fuse with each other."""
        zeros = None
        if any(part.zeros is not None for part in parts):
            zeros = torch.cat([part.explicit_zeros() for part in parts])
        return cls(
            torch.cat([part.codes for part in parts]),
            torch.cat([part.scales for part in parts]),
            zeros,
            parts[0].permutation,
        )

    def explicit_zeros(self) -> Tensor:
        """uint8 [out, num_groups], also where the weight is symmetric."""
        if self.zeros is not None:
            return self.zeros
        scales = self.scales
        return torch.full_like(scales, SYMMETRIC_ZERO, dtype=torch.uint8)


@dataclass(frozen=True, slots=True)
class Int8Weight:
    """Signed 8-bit codes with a scale for each row: weight = code · scale."""

    codes: Tensor  # int8 [out, in]
    scales: Tensor  # float16, bfloat16 or float32 [out]

    @property
    def shape(self) -> tuple[int, int]:
        """(out, in)."""
        return self.codes.shape[0], self.codes.shape[1]

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """[out, in] in `dtype` (the scales' if None)."""
        scales = self.scales if dtype is None else self.scales.to(dtype)
        return self.codes.to(scales.dtype) * scales[:, None]

    def fuses_with(self, other: object) -> bool:
        """Whether the rows of both can stand in one weight."""
        return isinstance(other, Int8Weight) and self.scales.dtype == other.scales.dtype

    @classmethod
    def stack(cls, parts: Sequence["Int8Weight"]) -> "Int8Weight":
        """The rows of all parts."""
        return cls(
            torch.cat([part.codes for part in parts]), torch.cat([part.scales for part in parts])
        )


@dataclass(frozen=True, slots=True)
class Fp8Weight:
    """e4m3 codes with a scale for each block of `block` rows and columns: code · scale.

    A scale for each row is a block of (1, in).
    """

    codes: Tensor  # float8_e4m3fn [out, in]
    scales: Tensor  # float32 or bfloat16 [ceil(out / block[0]), ceil(in / block[1])]
    block: tuple[int, int]

    @property
    def shape(self) -> tuple[int, int]:
        """(out, in)."""
        return self.codes.shape[0], self.codes.shape[1]

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """[out, in] in `dtype` (the scales' if None); the product is rounded once, in `dtype`."""
        width_out, width_in = self.shape
        rows = self.scales.repeat_interleave(self.block[0], 0)[:width_out]
        if self.block[1] < width_in:
            rows = rows.repeat_interleave(self.block[1], 1)[:, :width_in]
        dtype = dtype or self.scales.dtype
        return (self.codes.float() * rows.float()).to(dtype)

    def fuses_with(self, other: object) -> bool:
        """Whether the rows of both can stand in one weight: blocks may not straddle the seam."""
        return (
            isinstance(other, Fp8Weight)
            and self.block == other.block
            and self.scales.dtype == other.scales.dtype
            and self.shape[0] % self.block[0] == 0
        )

    @classmethod
    def stack(cls, parts: Sequence["Fp8Weight"]) -> "Fp8Weight":
        """The rows of all parts, which must fuse with each other."""
        # Most CPU operators do not know float8; bytes are bytes.
        codes = torch.cat([part.codes.view(torch.uint8) for part in parts])
        scales = torch.cat([part.scales for part in parts])
        return cls(codes.view(torch.float8_e4m3fn), scales, parts[0].block)


QuantizedWeight = Int4Weight | Int8Weight | Fp8Weight


def _are_equal(a: Tensor | None, b: Tensor | None) -> bool:
    if a is None or b is None:
        return a is b
    return torch.equal(a, b)
