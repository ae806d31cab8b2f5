"""Products on a GPU: quantized weights by kernels, plain ones by the library."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from localllm_kernels.coded_blocks import BLOCK_TYPES, as_coded
from localllm_kernels.compiling.choice import ALL_OWN, Choice, Piece
from localllm_kernels.compiling.launch import Workspace
from localllm_kernels.experts.gpu_experts import ExpertLinears
from localllm_kernels.linears import BlocksWeight, CodedWeight, Linears, Product
from localllm_kernels.pointwise.gate import GateKind
from localllm_kernels.products.block_matmul import block_matmul
from localllm_kernels.products.block_weight import PackedBlocks
from localllm_kernels.products.fp8_matmul import fp8_matmul
from localllm_kernels.products.int4_matmul import int4_matmul
from localllm_kernels.products.int4_weight import NOTHING, Around, PackedInt4
from localllm_kernels.products.int8_matmul import int8_matmul
from localllm_kernels.products.nvfp4_matmul import PackedNvfp4, multiplies_nvfp4, nvfp4_matmul
from localllm_kernels.products.traits import triton_multiplies
from localllm_kernels.products.trellis_matmul import PackedTrellis, trellis_matmul


@dataclass(frozen=True, slots=True)
class Int4Product:
    """A product with a 4-bit weight, which can include the operations around it."""

    weight: PackedInt4
    workspace: Workspace

    def __call__(self, x: Tensor, around: Around = NOTHING) -> Tensor:
        """`x`: [rows, in] -> [rows, out]; see int4_matmul."""
        return int4_matmul(x, self.weight, self.workspace, around)


@dataclass(frozen=True, slots=True)
class BlockProduct:
    """A product with a weight in GGUF's blocks."""

    weight: PackedBlocks
    workspace: Workspace

    def __call__(self, x: Tensor) -> Tensor:
        """`x`: [rows, in] -> [rows, out]."""
        return block_matmul(x, self.weight, self.workspace)


class GpuLinears(Linears):
    """Makes products, all in one workspace; none of the kinds that `choice` leaves to torch."""

    def __init__(self, workspace: Workspace, choice: Choice = ALL_OWN) -> None:
        self.workspace, self._to_torch = workspace, choice.to_torch

    @property
    def of_experts(self) -> Linears:
        return self if Piece.EXPERTS in self._to_torch else ExpertLinears()

    def experts(self, gate_up: Sequence[Product], down: Sequence[Product], kind: GateKind) -> None:
        """See Linears: only the products of `of_experts` can be one."""

    def plain(self, weight: Tensor, bias: Tensor | None) -> Product:
        return lambda x: F.linear(x, weight, bias)

    def packed(
        self, weight: CodedWeight | BlocksWeight, bias: Tensor | None, dtype: torch.dtype
    ) -> Product | None:
        if isinstance(weight, BlocksWeight):
            return self._blocks(weight, bias, dtype)
        kind, workspace = weight.kind, self.workspace
        is_torchs = Piece[kind.upper()] in self._to_torch
        if is_torchs or not triton_multiplies(weight.layout, dtype, "cuda"):
            return None
        codes, scales, block = weight.codes, weight.scales, weight.block
        if kind == "int4":
            return Int4Product(PackedInt4.pack(weight, bias), workspace)
        if kind == "int8":
            of_rows = scales.flatten()
            return lambda x: int8_matmul(x, codes, of_rows, bias, workspace)
        if kind == "nvfp4" and weight.input_scale is not None and multiplies_nvfp4(workspace):
            own = PackedNvfp4.pack(weight, bias)
            return lambda x: nvfp4_matmul(x, own, workspace)
        if kind == "trellis3":
            packed = PackedTrellis.pack(weight, bias, dtype)
            return lambda x: trellis_matmul(x, packed, workspace)
        if block is not None:
            of_inputs = weight.input_scale
            return lambda x: fp8_matmul(x, codes, scales, block, bias, workspace, of_inputs)
        return ExpertLinears().packed(weight, bias, dtype)

    def _blocks(
        self, weight: BlocksWeight, bias: Tensor | None, dtype: torch.dtype
    ) -> Product | None:
        """By another kernel if all of it is of a type that this has, which is laid out anew."""
        if any(part.type not in BLOCK_TYPES for part in weight.parts):
            return None
        coded = as_coded(weight)
        own = None if coded is None else self.packed(coded, bias, dtype)
        if own is not None or Piece.BLOCKS in self._to_torch:
            return own
        return BlockProduct(PackedBlocks.pack(weight, bias), self.workspace)
