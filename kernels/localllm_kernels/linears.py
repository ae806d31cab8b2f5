"""Products with weights as a library makes them, whatever it runs on."""

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

Product = Callable[[Tensor], Tensor]


class Linears(Protocol):
    """Makes products from weights, and packs each weight once. All [rows, in] -> [rows, out] in
    `dtype`, or in float32 where rows are wide; None where there is no kernel (see Traits).
    """

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
