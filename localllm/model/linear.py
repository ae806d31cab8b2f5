"""Matrix products with weights, plain and in fewer bits."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from localllm.model.quantized import Int4Weight, Int8Weight, QuantizedWeight
from localllm_kernels.linears import Linears

# `x`: [num_tokens, in] -> [num_tokens, out].
Projection = Callable[[Tensor], Tensor]

# The integer operators' time grows with the rows; from here on it is faster to dequantize the
# weight once and use the plain product.
MAX_OPERATOR_ROWS = 4
# Few enough to be fed by memory still, on a GPU.
FIXED_ROWS = 64


@dataclass(frozen=True, slots=True)
class Linear:
    """`x · weightᵀ + bias`; weight: [out, in]."""

    weight: Tensor
    bias: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        """See Projection."""
        return F.linear(x, self.weight, self.bias)


@dataclass(frozen=True, slots=True)
class DequantizedLinear:
    """A product that dequantizes its weight each time: for where there is no operator for it."""

    weight: QuantizedWeight
    bias: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        """See Projection."""
        return F.linear(x, self.weight.dequantize(x.dtype), self.bias)


@dataclass(frozen=True, slots=True)
class CpuInt4Linear:
    """An int4 product by torch's CPU operator, in bfloat16.

    The operator reads scales and zeros in bfloat16, and its own layout of the codes, in blocks of
    rows that depend on the processor; the blocks are padded with rows of zeros.
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
        """See Projection."""
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


@dataclass(frozen=True, slots=True)
class CpuInt8Linear:
    """An int8 product by torch's CPU operator, in bfloat16."""

    codes: Tensor  # int8 [out, in]
    scales: Tensor  # bfloat16 [out]
    bias: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        """See Projection."""
        if x.shape[0] > MAX_OPERATOR_ROWS:
            return F.linear(x, self.codes.bfloat16() * self.scales[:, None], self.bias)
        out: Tensor = torch.ops.aten._weight_int8pack_mm(x.contiguous(), self.codes, self.scales)
        return out if self.bias is None else out + self.bias


@dataclass(frozen=True, slots=True)
class FixedRows:
    """A product that is always given as many rows, padded or a part after the other, so that what
    becomes of a row cannot depend on how many there are.
    """

    product: Projection

    def __call__(self, x: Tensor) -> Tensor:
        """See Projection."""
        num_rows = x.shape[0]
        padded = F.pad(x, (0, 0, 0, -num_rows % FIXED_ROWS))
        parts = torch.split(padded, FIXED_ROWS)
        return torch.cat([self.product(part) for part in parts])[:num_rows]


@dataclass(frozen=True, slots=True)
class SplitLinear:
    """Products of the same input that do not fuse, side by side."""

    parts: tuple[Projection, ...]

    def __call__(self, x: Tensor) -> Tensor:
        """See Projection."""
        return torch.cat([part(x) for part in self.parts], dim=-1)


def quantized_linear(
    weight: QuantizedWeight,
    bias: Tensor | None,
    dtype: torch.dtype,
    linears: Linears | None = None,
) -> Projection:
    """The fastest product for `weight`, which is on its device, in a model of `dtype`.

    It is that of `linears` where they are given, else torch's. In float32 the weight is
    dequantized and nothing else rounded.
    """
    if linears is not None:
        return _own_linear(weight, bias, dtype, linears)
    on_cpu = weight.codes.device.type == "cpu"
    if on_cpu and dtype == torch.bfloat16 and isinstance(weight, Int8Weight):
        return CpuInt8Linear(weight.codes, weight.scales.bfloat16(), bias)
    if on_cpu and dtype == torch.bfloat16 and isinstance(weight, Int4Weight):
        block_rows = int4_block_rows()
        if block_rows is not None and weight.group_size in (32, 64, 128, 256):
            return CpuInt4Linear.build(weight, bias, block_rows)
    return DequantizedLinear(weight, bias)


def _own_linear(
    weight: QuantizedWeight, bias: Tensor | None, dtype: torch.dtype, linears: Linears
) -> Projection:
    product = None
    if isinstance(weight, Int4Weight):
        product = linears.int4(
            weight.unpacked_codes(), weight.scales, weight.zeros, weight.permutation, bias, dtype
        )
    elif isinstance(weight, Int8Weight):
        product = linears.int8(weight.codes, weight.scales, bias, dtype)
    else:
        product = linears.fp8(weight.codes, weight.scales, weight.block, bias, dtype)
    if product is not None:
        return product
    return lambda x: linears.plain(weight.dequantize(dtype), bias)(x)


def fuse(parts: Sequence[QuantizedWeight]) -> QuantizedWeight | None:
    """One weight with the rows of all parts, None where they do not fuse."""
    for part, following in pairwise(parts):
        if not part.fuses_with(following):
            return None
    return parts[0] if len(parts) == 1 else type(parts[0]).stack(parts)  # type: ignore[arg-type]


def _unpack_blocks(packed: Tensor, block_rows: int) -> Tensor:
    """uint8 [rows, in] from the operator's layout.

    In it a block of rows stands column by column; a byte holds row i in its low half and row
    i + block_rows / 2 in its high one.
    """
    num_rows, half = packed.shape
    blocks = packed.view(num_rows // block_rows, 2 * half, block_rows // 2)
    halves = torch.stack((blocks & 15, blocks >> 4), dim=2)
    return halves.flatten(2).transpose(1, 2).reshape(num_rows, 2 * half)


def int4_block_rows() -> int | None:
    """Rows of a block in the operator's layout on this processor, None where it is unknown.

    The layout is not documented, so it is tried on a small weight.
    """
    generator = torch.Generator().manual_seed(0)
    probe = torch.randint(16, (64, 32), dtype=torch.int32, generator=generator)
    packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(probe, 1)
    for block_rows in (64, 32):
        if torch.equal(_unpack_blocks(packed, block_rows), probe.to(torch.uint8)):
            return block_rows
    return None
