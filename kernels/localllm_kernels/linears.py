"""The interface of products with weights, whatever the library and the device."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from localllm_kernels.compiling.traits import CodeKind, WeightLayout
from localllm_kernels.pointwise.gate import GateKind
from localllm_kernels.trellis import BYTES, IN_BYTES

Product = Callable[[Tensor], Tensor]


class ExpertsProduct(Protocol):
    """Both products of all experts, with the gate between them."""

    @property
    def each(self) -> Sequence[Product]:
        """The products of the experts; none if they have no products of their own."""
        return ()

    def __call__(
        self, x: Tensor, chosen: Tensor, factors: Tensor, gate: Callable[[Tensor], Tensor]
    ) -> Tensor:
        """Rows, the experts chosen for each, int32 [rows, top_k], the factors on their outputs,
        float32, and the gate -> [rows, hidden].
        """


@dataclass(frozen=True, slots=True)
class CodedWeight:
    """A quantized weight as every library takes it, to pack it in its own way.

    `codes`: [out, in], of int4, mxfp4 and nvfp4 (e2m1) uint8 below 16, of int8 int8, of fp8
    float8_e4m3fn, of trellis3 uint8 [out, 3 · in / 8], see trellis.py; `scales`: [out, num_groups],
    one for a row of int8 and trellis3, of mxfp4 exponents in uint8 (e8m0), of nvfp4 float8_e4m3fn;
    with a `block` (outputs, inputs) one for each; `factors`: of nvfp4 float32 [out], by which the
    scales are multiplied; `zeros`: as `scales`, None: 8 everywhere; `permutation`: int64 [in], the
    input that each column belongs to; `input_scale`: float32 [], where a
    checkpoint wants inputs in the weight's kind: of the codes of fp8, or of the scales of nvfp4;
    `is_in_place`: the codes are multiplied where they lie if the library can, since they are many,
    and few rows are multiplied with them.
    """

    kind: CodeKind
    codes: Tensor
    scales: Tensor
    zeros: Tensor | None = None
    permutation: Tensor | None = None
    block: tuple[int, int] | None = None
    factors: Tensor | None = None
    input_scale: Tensor | None = None
    is_in_place: bool = False

    @property
    def layout(self) -> WeightLayout:
        """The layout, which decides the kernel."""
        width_in = self.codes.shape[1]
        if self.kind == "trellis3":
            width_in = width_in // BYTES * IN_BYTES
        group = width_in // self.scales.shape[1] if self.block is None else self.block[1]
        return WeightLayout(self.kind, width_in, group)


@dataclass(frozen=True, slots=True)
class BlockRows:
    """Rows in blocks of GGUF's type `type`; `codes`: uint8 [rows, bytes of a row]."""

    type: str
    codes: Tensor


@dataclass(frozen=True, slots=True)
class BlocksWeight:
    """A weight of `parts`, one below the other, of rows with `width_in` values; `order`: int64
    [out], which row each output is, None if they are in order.
    """

    parts: tuple[BlockRows, ...]
    width_in: int
    order: Tensor | None = None


class Linears(Protocol):
    """Makes products from weights, and packs each weight once. They take [rows, in] and return
    [rows, out] in `dtype`, or in float32 if rows are wide. None: no kernel for it (see Traits).
    """

    @property
    def of_experts(self) -> "Linears":
        """Makes the products that `experts` takes."""
        return self

    def plain(self, weight: Tensor, bias: Tensor | None) -> Product:
        """`weight`: [out, in]."""

    def packed(
        self, weight: CodedWeight | BlocksWeight, bias: Tensor | None, dtype: torch.dtype
    ) -> Product | None:
        """The product with a quantized weight, in a model of `dtype`."""

    def experts(
        self, gate_up: Sequence[Product], down: Sequence[Product], kind: GateKind
    ) -> ExpertsProduct | None:
        """Both products of all experts as one, if all are products that it takes."""
