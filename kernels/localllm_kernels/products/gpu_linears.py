"""Products on a GPU: quantized weights by kernels, plain ones by the library."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from localllm_kernels.compiling.choice import ALL_OWN, Choice, Piece
from localllm_kernels.compiling.launch import Workspace
from localllm_kernels.compiling.traits import WeightLayout
from localllm_kernels.experts.gpu_experts import ExpertLinears
from localllm_kernels.linears import Linears, Product
from localllm_kernels.pointwise.gate import GateKind
from localllm_kernels.products.fp8_matmul import fp8_matmul
from localllm_kernels.products.int4_matmul import int4_matmul
from localllm_kernels.products.int4_weight import NOTHING, Around, PackedInt4
from localllm_kernels.products.int8_matmul import int8_matmul
from localllm_kernels.products.traits import triton_multiplies


@dataclass(frozen=True, slots=True)
class Int4Product:
    """A product with a 4-bit weight, which can include the operations around it."""

    weight: PackedInt4
    workspace: Workspace

    def __call__(self, x: Tensor, around: Around = NOTHING) -> Tensor:
        """`x`: [rows, in] -> [rows, out]; see int4_matmul."""
        return int4_matmul(x, self.weight, self.workspace, around)


class GpuLinears:
    """Makes products, all in one workspace; none of the kinds that `choice` leaves to torch."""

    def __init__(self, workspace: Workspace, choice: Choice = ALL_OWN) -> None:
        self.workspace, self._to_torch = workspace, choice.to_torch

    @property
    def of_experts(self) -> Linears:
        """See Linears."""
        return self if Piece.EXPERTS in self._to_torch else ExpertLinears()

    def experts(self, gate_up: Sequence[Product], down: Sequence[Product], kind: GateKind) -> None:
        """See Linears: only the products of `of_experts` can be one."""

    def mxfp4(
        self, codes: Tensor, exponents: Tensor, bias: Tensor | None, dtype: torch.dtype
    ) -> Product | None:
        """See Linears."""
        if Piece.MXFP4 in self._to_torch:
            return None
        return ExpertLinears().mxfp4(codes, exponents, bias, dtype)

    def plain(self, weight: Tensor, bias: Tensor | None) -> Product:
        """See Linears."""
        return lambda x: F.linear(x, weight, bias)

    def int4(
        self,
        codes: Tensor,
        scales: Tensor,
        zeros: Tensor | None,
        permutation: Tensor | None,
        bias: Tensor | None,
        dtype: torch.dtype,
    ) -> Product | None:
        """See Linears."""
        width_in = codes.shape[1]
        layout = WeightLayout("int4", width_in, width_in // scales.shape[1])
        if Piece.INT4 in self._to_torch or not triton_multiplies(layout, dtype, "cuda"):
            return None
        packed = PackedInt4.pack(codes, scales, zeros, permutation, bias)
        return Int4Product(packed, self.workspace)

    def int8(
        self, codes: Tensor, scales: Tensor, bias: Tensor | None, dtype: torch.dtype
    ) -> Product | None:
        """See Linears."""
        if Piece.INT8 in self._to_torch:
            return None
        return lambda x: int8_matmul(x, codes, scales, bias, self.workspace)

    def fp8(
        self,
        codes: Tensor,
        scales: Tensor,
        block: tuple[int, int],
        bias: Tensor | None,
        dtype: torch.dtype,
    ) -> Product | None:
        """See Linears."""
        layout = WeightLayout("fp8", codes.shape[1], block[1])
        if Piece.FP8 in self._to_torch or not triton_multiplies(layout, dtype, "cuda"):
            return None
        return lambda x: fp8_matmul(x, codes, scales, block, bias, self.workspace)
