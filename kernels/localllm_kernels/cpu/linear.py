"""Products with weights in the C library: float32 or bfloat16, int8, int4, mxfp4.

All take and return float32 rows. Inputs of bfloat16 products are rounded to bfloat16, those of the
integer products to int8 with one scale per group; see the sources for the formulas.
"""

import ctypes
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from localllm_kernels.compiling.traits import WeightLayout
from localllm_kernels.cpu.experts import CExperts
from localllm_kernels.cpu.product import CProduct, CpuProduct, PermutedProduct
from localllm_kernels.cpu.structs import FloatWeight, IntegerWeight, ProductKind, ScaleKind
from localllm_kernels.cpu.team import Team
from localllm_kernels.cpu.traits import c_multiplies
from localllm_kernels.linears import ExpertsProduct, Product
from localllm_kernels.pointwise.gate import GateKind

_INT8_GROUPS = (128, 64, 32, 16)


def num_lanes(library: ctypes.CDLL) -> int:
    """Floats in a vector of the library."""
    return ctypes.c_int64.in_dll(library, "lanes").value


class CpuLinears:
    """Makes products from weights; each packs its weight once."""

    def __init__(self, library: ctypes.CDLL, team: Team) -> None:
        self.library, self.team = library, team
        # Outputs side by side in a block of packed weights.
        self._lanes = num_lanes(library)
        self._run = {
            ProductKind.FLOAT32: library.float32_linear,
            ProductKind.BFLOAT16: library.bfloat16_linear,
            ProductKind.INTEGER: library.integer_linear,
        }
        for function in self._run.values():
            function.argtypes = [*3 * [ctypes.c_void_p], *2 * [ctypes.c_int64]]

    @property
    def of_experts(self) -> "CpuLinears":
        """See Linears."""
        return self

    def plain(self, weight: Tensor, bias: Tensor | None) -> CpuProduct:
        """`weight`: float32 or bfloat16 [out, in]; `bias`: float32.

        A float32 weight that bfloat16 holds exactly, as when a bfloat16 checkpoint is computed in
        float32, is kept in bfloat16: half the bytes to read, and the same products.
        """
        kind = ProductKind.FLOAT32
        if weight.dtype == torch.bfloat16:
            kind = ProductKind.BFLOAT16
        elif torch.equal((half := weight.bfloat16()).float(), weight):
            weight = half
        struct = FloatWeight(
            weight.data_ptr(), _pointer(bias), *weight.shape, weight.dtype == torch.bfloat16
        )
        return self._product(kind, struct, (weight, bias))

    def int4(
        self,
        codes: Tensor,
        scales: Tensor,
        zeros: Tensor | None,
        permutation: Tensor | None,
        bias: Tensor | None,
        dtype: torch.dtype,
    ) -> CpuProduct | None:
        """See Linears."""
        width_out, width_in = codes.shape
        group_size = width_in // scales.shape[1]
        if not c_multiplies(WeightLayout("int4", width_in, group_size), dtype, "cpu"):
            return None
        packed = _pack_codes(codes, self._lanes)
        rounded = scales.bfloat16()
        is_exact = bool((rounded.float() == scales.float()).all())
        kept_scales = _by_block(rounded if is_exact else scales.float(), self._lanes)
        kept_zeros = None if zeros is None else _by_block(zeros, self._lanes)
        struct = IntegerWeight(
            packed.data_ptr(),
            kept_scales.data_ptr(),
            _pointer(kept_zeros),
            _pointer(bias),
            4,
            ScaleKind.BFLOAT16 if is_exact else ScaleKind.FLOAT32,
            width_out,
            width_in,
            group_size,
        )
        kept = (packed, kept_scales, kept_zeros, bias)
        product = self._product(ProductKind.INTEGER, struct, kept)
        return product if permutation is None else PermutedProduct(product, permutation)

    def int8(
        self, codes: Tensor, scales: Tensor, bias: Tensor | None, dtype: torch.dtype
    ) -> CpuProduct | None:
        """See Linears."""
        width_out, width_in = codes.shape
        if not c_multiplies(WeightLayout("int8", width_in, width_in), dtype, "cpu"):
            return None
        padding = -width_out % self._lanes
        raised = F.pad(codes.view(torch.uint8) ^ 128, (0, 0, 0, padding))
        packed = raised.view(-1, self._lanes, width_in // 4, 4).transpose(1, 2).contiguous()
        kept_scales = F.pad(scales.float(), (0, padding))
        struct = IntegerWeight(
            packed.data_ptr(),
            kept_scales.data_ptr(),
            None,
            _pointer(bias),
            8,
            ScaleKind.OUTPUT,
            width_out,
            width_in,
            next(size for size in _INT8_GROUPS if width_in % size == 0),
        )
        return self._product(ProductKind.INTEGER, struct, (packed, kept_scales, bias))

    def mxfp4(
        self, codes: Tensor, exponents: Tensor, bias: Tensor | None, dtype: torch.dtype
    ) -> CpuProduct | None:
        """See Linears."""
        width_out, width_in = codes.shape
        group_size = width_in // exponents.shape[1]
        if not c_multiplies(WeightLayout("mxfp4", width_in, group_size), dtype, "cpu"):
            return None
        packed = _pack_codes(codes, self._lanes)
        kept = _by_block(exponents, self._lanes)
        struct = IntegerWeight(
            packed.data_ptr(),
            kept.data_ptr(),
            None,
            _pointer(bias),
            4,
            ScaleKind.E8M0,
            width_out,
            width_in,
            group_size,
        )
        return self._product(ProductKind.INTEGER, struct, (packed, kept, bias))

    def fp8(
        self,
        codes: Tensor,
        scales: Tensor,
        block: tuple[int, int],
        bias: Tensor | None,
        dtype: torch.dtype,
    ) -> None:
        """There is no kernel for it."""
        return

    def experts(
        self, gate_up: Sequence[Product], down: Sequence[Product], kind: GateKind
    ) -> ExpertsProduct | None:
        """See Linears."""
        first = [each for each in gate_up if isinstance(each, CProduct)]
        last = [each for each in down if isinstance(each, CProduct)]
        if len(first) + len(last) < 2 * len(gate_up):
            return None
        return CExperts(self.library, self.team, first, last, kind)

    def _product(
        self,
        kind: ProductKind,
        weight: IntegerWeight | FloatWeight,
        kept: tuple[Tensor | None, ...],
    ) -> CProduct:
        return CProduct(self.team, kind, self._run[kind], weight, kept)


def _pointer(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _pack_codes(codes: Tensor, lanes: int) -> Tensor:
    """uint8 [out, in] below 16 as the library stores them; see operators.h."""
    width_out, width_in = codes.shape
    padded = F.pad(codes, (0, 0, 0, -width_out % lanes))
    low, high = padded.view(-1, lanes, width_in // 8, 2, 4).permute(3, 0, 2, 1, 4)
    packed: Tensor = (low | (high << 4)).contiguous()
    return packed


def _by_block(values: Tensor, lanes: int) -> Tensor:
    """[out, num_groups] -> [blocks, num_groups, lanes]."""
    padded = F.pad(values, (0, 0, 0, -len(values) % lanes))
    return padded.view(-1, lanes, values.shape[1]).transpose(1, 2).contiguous()
