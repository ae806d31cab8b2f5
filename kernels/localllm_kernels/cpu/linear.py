"""Products with weights in the C library: plain ones and all kinds of packed ones.

All take and return float32 rows. Inputs of bfloat16 and fp8 products are rounded to bfloat16, those
of the integer products to int8 with one scale per group; see the sources for the formulas.
"""

import ctypes
from collections.abc import Callable, Sequence
from ctypes import Structure

import torch
import torch.nn.functional as F
from torch import Tensor

from localllm_kernels.cpu.experts import CExperts
from localllm_kernels.cpu.product import CProduct, CpuProduct, PermutedProduct
from localllm_kernels.cpu.structs import (
    BlockRows,
    BlockWeight,
    FloatWeight,
    IntegerWeight,
    pointer,
    value,
)
from localllm_kernels.cpu.team import Team
from localllm_kernels.cpu.traits import C_BLOCKS, c_multiplies
from localllm_kernels.linears import BlocksWeight, CodedWeight, ExpertsProduct, Linears, Product
from localllm_kernels.pointwise.gate import GateKind
from localllm_kernels.trellis import TABLE, signs

_INPUT_GROUPS = (128, 64, 32, 16)
# Of four bytes.
_SIGNS = 0x80808080 - (1 << 32)
_PART_BYTES = 1 << 18
# As in trellis.h.
_STEP_MIDDLE = 64
_VALUES = {
    torch.float32: value("VALUES_FLOAT32"),
    torch.bfloat16: value("VALUES_BFLOAT16"),
    torch.float16: value("VALUES_FLOAT16"),
}


def num_lanes(library: ctypes.CDLL) -> int:
    """Floats in a vector of the library."""
    return ctypes.c_int64.in_dll(library, "lanes").value


def multiplies_in_tiles(library: ctypes.CDLL) -> bool:
    """Whether products of many rows, and all of bfloat16, are multiplied in AMX's tiles. The order
    of their sums is then another one.
    """
    return bool(library.tiles_are_allowed())


class CpuLinears(Linears):
    """Makes products from weights; each packs its weight once."""

    def __init__(self, library: ctypes.CDLL, team: Team) -> None:
        self.library, self.team = library, team
        # Outputs side by side in a block of packed weights.
        self._lanes = num_lanes(library)

    def plain(self, weight: Tensor, bias: Tensor | None) -> CpuProduct:
        """`weight`: float32, bfloat16 or float16 [out, in], of which only bfloat16 is multiplied as
        such, the others in float32; `bias`: float32.

        A float32 weight that bfloat16 holds exactly, as when a bfloat16 checkpoint is computed in
        float32, is kept in bfloat16: half the bytes to read, and the same products.
        """
        kind = "FLOAT32"
        if weight.dtype == torch.bfloat16:
            kind = "BFLOAT16"
        elif weight.dtype == torch.float32:
            half = weight.bfloat16()
            weight = half if torch.equal(half.float(), weight) else weight
        struct = FloatWeight(weight.data_ptr(), pointer(bias), *weight.shape, _VALUES[weight.dtype])
        return self._product(kind, struct, (weight, bias))

    def packed(
        self, weight: CodedWeight | BlocksWeight, bias: Tensor | None, dtype: torch.dtype
    ) -> CpuProduct | None:
        if isinstance(weight, BlocksWeight):
            return self._blocks(weight, bias, dtype)
        layout, zeros = weight.layout, weight.zeros
        if not c_multiplies(layout, dtype, "cpu"):
            return None
        if layout.kind == "fp8":
            return self._fp8(weight, bias)
        bits, group, is_in_rows = 4, layout.group, False
        if layout.kind == "int8":
            bits, group = 8, _input_group(layout.width_in)
            is_in_rows = weight.is_in_place and layout.width_in % (4 * self._lanes) == 0
            codes = weight.codes if is_in_rows else _pack(weight.codes, self._lanes, _raised_words)
        elif layout.kind == "trellis3":
            bits, group = 3, _input_group(layout.width_in)
            codes = _pack_chunks(weight.codes, self._lanes)
        else:
            codes = _pack(weight.codes, self._lanes, _halved_words)
        scales, scale_kind, factors = _scales_in_c(weight)
        scales, factors, zeros = (
            None if each is None else _by_block(each, self._lanes)
            for each in (scales, factors, zeros)
        )
        table = by = None
        if layout.kind == "trellis3":
            table = torch.tensor(TABLE, dtype=torch.int8).view(torch.uint8) + _STEP_MIDDLE
            by = signs(layout.width_in)
        kept = (codes, scales, factors, zeros, bias, table, by)
        widths = len(weight.codes), layout.width_in
        struct = IntegerWeight(
            *map(pointer, kept), bits, value(scale_kind), *widths, group, is_in_rows
        )
        product = self._product("INTEGER", struct, kept)
        order = weight.permutation
        return product if order is None else PermutedProduct(product, order)

    def _fp8(self, weight: CodedWeight, bias: Tensor | None) -> CProduct:
        """The product with codes where they lie."""
        assert weight.block is not None
        scales = weight.scales.float().contiguous()
        struct = FloatWeight(
            weight.codes.data_ptr(),
            pointer(bias),
            *weight.codes.shape,
            value("VALUES_FP8"),
            pointer(scales),
            *weight.block,
        )
        return self._product("BFLOAT16", struct, (weight.codes, scales, bias))

    def _blocks(
        self, weight: BlocksWeight, bias: Tensor | None, dtype: torch.dtype
    ) -> CProduct | None:
        """The product with blocks where they lie."""
        if dtype != torch.bfloat16 or any(each.type not in C_BLOCKS for each in weight.parts):
            return None
        parts = (BlockRows * len(weight.parts))(
            *(
                BlockRows(
                    each.codes.data_ptr(),
                    value(f"BLOCK_{each.type}"),
                    len(each.codes),
                    each.codes.stride(0),
                )
                for each in weight.parts
            )
        )
        places = None
        if weight.order is not None:
            places = torch.empty(len(weight.order), dtype=torch.int32)
            places[weight.order] = torch.arange(len(places), dtype=torch.int32)
        width_out = sum(len(each.codes) for each in weight.parts)
        struct = BlockWeight(
            parts, pointer(places), pointer(bias), len(parts), width_out, weight.width_in
        )
        kept = (*(each.codes for each in weight.parts), places, bias)
        return self._product("BLOCKS", struct, kept)

    def experts(
        self, gate_up: Sequence[Product], down: Sequence[Product], kind: GateKind
    ) -> ExpertsProduct | None:
        first = [each for each in gate_up if isinstance(each, CProduct)]
        last = [each for each in down if isinstance(each, CProduct)]
        if len(first) + len(last) < 2 * len(gate_up):
            return None
        return CExperts(self.library, self.team, first, last, kind)

    def _product(self, kind: str, weight: Structure, kept: tuple[Tensor | None, ...]) -> CProduct:
        return CProduct(self.library, self.team, value(kind), weight, kept)


def _scales_in_c(weight: CodedWeight) -> tuple[Tensor | None, str, Tensor | None]:
    """The scales of groups as they are kept, the name of their kind in operators.h, and those of
    outputs.
    """
    if weight.kind == "mxfp4":
        return weight.scales, "SCALE_E8M0", None
    if weight.kind == "nvfp4":
        assert weight.factors is not None
        return weight.scales.view(torch.uint8), "SCALE_E4M3", weight.factors[:, None]
    scales = weight.scales.float()
    if weight.kind in ("int8", "trellis3"):
        return None, "SCALE_NONE", scales
    rounded = weight.scales.bfloat16()
    if bool((rounded.float() == scales).all()):
        return rounded, "SCALE_BFLOAT16", None
    return scales, "SCALE_FLOAT32", None


def _raised_words(codes: Tensor) -> Tensor:
    """int8 [out, in] -> int32 [out, in / 4], 128 above the codes."""
    return codes.view(torch.int32) ^ _SIGNS


def _halved_words(codes: Tensor) -> Tensor:
    """uint8 [out, in] below 16 -> int32 [out, in / 8], the second four in the upper halves."""
    eight = codes.view(torch.int64)
    return (eight | (eight >> 28)).to(torch.int32)


def _pack(codes: Tensor, lanes: int, as_words: Callable[[Tensor], Tensor]) -> Tensor:
    """[out, in] -> uint8 [blocks, words, lanes, 4], as the library stores them, see operators.h; a
    part at a time, which caches hold.
    """
    width_out, num_words = len(codes), as_words(codes[:1]).shape[1]
    num_whole = width_out // lanes
    packed = torch.empty(-(-width_out // lanes), num_words, lanes, dtype=torch.int32)
    step = max(1, _PART_BYTES // (lanes * codes.shape[1]))
    for first in range(0, num_whole, step):
        part = packed[first : min(first + step, num_whole)]
        words = as_words(codes[first * lanes : (first + len(part)) * lanes])
        part.copy_(words.view(len(part), lanes, num_words).transpose(1, 2))
    if num_whole < len(packed):
        rest = as_words(codes[num_whole * lanes :])
        packed[-1] = 0
        packed[-1, :, : len(rest)] = rest.T
    return packed.view(torch.uint8).view(*packed.shape, 4)


def _pack_chunks(codes: Tensor, lanes: int) -> Tensor:
    """uint8 [out, 3 · in / 8] -> [blocks, lanes · (1 + 3 · in / 8)], see trellis.h."""
    blocks = F.pad(codes, (1, 0, 0, -len(codes) % lanes)).view(-1, lanes, 1 + codes.shape[1])
    return blocks.transpose(1, 2).flatten(1)


def _input_group(width_in: int) -> int:
    """Inputs that share a scale where weights have one for each row."""
    return next(size for size in _INPUT_GROUPS if width_in % size == 0)


def _by_block(values: Tensor, lanes: int) -> Tensor:
    """[out, num_groups] -> [blocks, num_groups, lanes]."""
    padded = F.pad(values, (0, 0, 0, -len(values) % lanes))
    return padded.view(-1, lanes, values.shape[1]).transpose(1, 2).contiguous()
