"""4-bit weights, and torch's product with them on a CPU."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from localllm.model.packed.weight import MAX_OPERATOR_ROWS, PackedWeight
from localllm_kernels.compiling.traits import CodeKind, WeightLayout, torch_multiplies
from localllm_kernels.linears import CodedWeight, Product

SYMMETRIC_ZERO = 8


def pack_nibbles(codes: Tensor) -> Tensor:
    """`codes`: uint8 [..., 2n] below 16 -> uint8 [..., n]; the even columns in the low halves."""
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpack_nibbles(packed: Tensor) -> Tensor:
    """The inverse of `pack_nibbles`."""
    # Both bytes of a pair at once.
    pairs = packed.to(torch.int16, memory_format=torch.contiguous_format)
    return pairs.bitwise_or_(pairs << 4).bitwise_and_(0x0F0F).view(torch.uint8)


@dataclass(frozen=True, slots=True)
class Int4Weight(PackedWeight):
    """4-bit codes in groups along the input: weight = (code - zero) · scale.

    Column j of the codes belongs to input feature `permutation[j]`, or to j if that is None (only
    act-order checkpoints whose groups follow the permutation have one).
    """

    kind: ClassVar[CodeKind] = "int4"
    in_byte: ClassVar[int] = 2

    codes: Tensor  # uint8 [out, in / 2], see pack_nibbles
    scales: Tensor  # float16, bfloat16 or float32 [out, num_groups]
    zeros: Tensor | None  # uint8 [out, num_groups]; None: 8 everywhere (symmetric)
    permutation: Tensor | None = None  # int64 [in]

    @property
    def group_size(self) -> int:
        """Columns that share a scale."""
        return self.shape[1] // self.scales.shape[1]

    @property
    def layout(self) -> WeightLayout:
        return WeightLayout(self.kind, self.shape[1], self.group_size)

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """The product of code and scale is rounded once, in `dtype`."""
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
        return (
            isinstance(other, Int4Weight)
            and self.group_size == other.group_size
            and self.scales.dtype == other.scales.dtype
            and _are_equal(self.permutation, other.permutation)
        )

    @classmethod
    def stack(cls, parts: Sequence[Self]) -> Self:
        zeros = None
        if any(part.zeros is not None for part in parts):
            zeros = torch.cat([part.explicit_zeros() for part in parts])
        return cls(
            torch.cat([part.codes for part in parts]),
            torch.cat([part.scales for part in parts]),
            zeros,
            parts[0].permutation,
        )

    def take_rows(self, order: Tensor) -> "Int4Weight":
        zeros = None if self.zeros is None else self.zeros[order]
        return Int4Weight(self.codes[order], self.scales[order], zeros, self.permutation)

    def explicit_zeros(self) -> Tensor:
        """uint8 [out, num_groups], even if the weight is symmetric."""
        if self.zeros is not None:
            return self.zeros
        scales = self.scales
        return torch.full_like(scales, SYMMETRIC_ZERO, dtype=torch.uint8)

    def coded(self) -> CodedWeight:
        codes = self.unpacked_codes()
        return CodedWeight("int4", codes, self.scales, self.zeros, self.permutation)

    def torch_product(self, bias: Tensor | None, dtype: torch.dtype) -> Product | None:
        if not torch_multiplies(self.layout, dtype, self.codes.device.type):
            return None
        block_rows = int4_block_rows()
        return None if block_rows is None else CpuInt4Linear.build(self, bias, block_rows)


@dataclass(frozen=True, slots=True)
class CpuInt4Linear:
    """An int4 product with torch's CPU operator, in bfloat16.

    The operator takes scales and zeros in bfloat16, and the codes in a layout of its own: blocks of
    rows whose size depends on the processor. The last block is padded with rows of zeros.
    """

    packed: Tensor  # uint8 [padded_out, in / 2]
    scales_and_offsets: Tensor  # bfloat16 [num_groups, padded_out, 2]; value = (code - 8) · s + o
    permutation: Tensor | None
    width_out: int
    block_rows: int
    bias: Tensor | None = None

    @classmethod
    def build(cls, weight: Int4Weight, bias: Tensor | None, block_rows: int) -> "CpuInt4Linear":
        """Repack `weight`."""
        width_out, _ = weight.shape
        padding = -width_out % block_rows
        codes = F.pad(weight.unpacked_codes(), (0, 0, 0, padding))
        scales = F.pad(weight.scales.float(), (0, 0, 0, padding))
        offsets = torch.zeros_like(scales)
        if weight.zeros is not None:
            zeros = F.pad(weight.zeros, (0, 0, 0, padding)).float()
            offsets = (8 - zeros) * scales
        return cls(
            torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes.int(), 1),
            torch.stack((scales.T, offsets.T), dim=-1).bfloat16().contiguous(),
            weight.permutation,
            width_out,
            block_rows,
            bias,
        )

    def __call__(self, x: Tensor) -> Tensor:
        if self.permutation is not None:
            x = x[:, self.permutation]
        num_groups = self.scales_and_offsets.shape[0]
        if x.shape[0] > MAX_OPERATOR_ROWS:
            return F.linear(x, self._dequantize(), self.bias)
        out: Tensor = torch.ops.aten._weight_int4pack_mm_for_cpu(
            x.contiguous(), self.packed, x.shape[1] // num_groups, self.scales_and_offsets
        )[:, : self.width_out]
        return out if self.bias is None else out + self.bias

    def _dequantize(self) -> Tensor:
        """bfloat16 [out, in], in the order of the permutation."""
        codes = _unpack_blocks(self.packed, self.block_rows)[: self.width_out]
        scales, offsets = self.scales_and_offsets[:, : self.width_out].permute(2, 1, 0)[..., None]
        groups = codes.view(self.width_out, scales.shape[1], -1)
        return torch.addcmul(offsets, groups.bfloat16() - 8, scales).flatten(1)


def _unpack_blocks(packed: Tensor, block_rows: int) -> Tensor:
    """uint8 [rows, in] from the operator's layout.

    There a block of rows is stored column by column; a byte holds row i in its low half and row
    i + block_rows / 2 in its high half.
    """
    num_rows, half = packed.shape
    blocks = packed.view(num_rows // block_rows, 2 * half, block_rows // 2)
    halves = torch.stack((blocks & 15, blocks >> 4), dim=2)
    return halves.flatten(2).transpose(1, 2).reshape(num_rows, 2 * half)


def int4_block_rows() -> int | None:
    """Rows per block in the operator's layout on this processor, None if unknown.

    The layout is undocumented, so it is probed with a small weight.
    """
    generator = torch.Generator().manual_seed(0)
    probe = torch.randint(16, (64, 32), dtype=torch.int32, generator=generator)
    packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(probe, 1)
    for block_rows in (64, 32):
        if torch.equal(_unpack_blocks(packed, block_rows), probe.to(torch.uint8)):
            return block_rows
    return None


def _are_equal(a: Tensor | None, b: Tensor | None) -> bool:
    if a is None or b is None:
        return a is b
    return torch.equal(a, b)
