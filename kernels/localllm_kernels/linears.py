"""The interface of products with weights, whatever the library and the device."""

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from localllm_kernels.pointwise.gate import GateKind

Product = Callable[[Tensor], Tensor]


class ExpertsProduct(Protocol):
    """Both products of all experts, with the gate between them."""

    @property
    def each(self) -> Sequence[Product]:
        """The products of the experts; none if they have no products of their own."""

    def __call__(
        self, x: Tensor, chosen: Tensor, factors: Tensor, gate: Callable[[Tensor], Tensor]
    ) -> Tensor:
        """Rows, the experts chosen for each, int32 [rows, top_k], the factors on their outputs,
        float32, and the gate -> [rows, hidden].
        """


class Linears(Protocol):
    """Makes products from weights, and packs each weight once. They take [rows, in] and return
    [rows, out] in `dtype`, or in float32 if rows are wide. None: no kernel for it (see Traits).
    """

    @property
    def of_experts(self) -> "Linears":
        """Makes the products that `experts` takes."""

    def plain(self, weight: Tensor, bias: Tensor | None) -> Product:
        """`weight`: [out, in]."""

    def int4(
        self,
        codes: Tensor,
        scales: Tensor,
        zeros: Tensor | None,
        permutation: Tensor | None,
        bias: Tensor | None,
        dtype: torch.dtype,
    ) -> Product | None:
        """`codes`: uint8 [out, in] below 16; `scales`, `zeros`: [out, num_groups]; `permutation`:
        [in], the input that each column belongs to.
        """

    def int8(
        self, codes: Tensor, scales: Tensor, bias: Tensor | None, dtype: torch.dtype
    ) -> Product | None:
        """`codes`: int8 [out, in]; `scales`: [out]."""

    def fp8(
        self,
        codes: Tensor,
        scales: Tensor,
        block: tuple[int, int],
        bias: Tensor | None,
        dtype: torch.dtype,
    ) -> Product | None:
        """`codes`: float8_e4m3fn [out, in]; `scales`: one for each `block` (outputs, inputs)."""

    def mxfp4(
        self, codes: Tensor, exponents: Tensor, bias: Tensor | None, dtype: torch.dtype
    ) -> Product | None:
        """`codes`: uint8 [out, in] below 16, e2m1; `exponents`: uint8 [out, in / 32], e8m0."""

    def experts(
        self, gate_up: Sequence[Product], down: Sequence[Product], kind: GateKind
    ) -> ExpertsProduct | None:
        """Both products of all experts as one, if all are products that it takes."""
