"""A product with a weight in the C library, ready to be called or handed to other operators."""

import ctypes
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from localllm_kernels.cpu import structs
from localllm_kernels.cpu.structs import FloatWeight, IntegerWeight, ProductKind
from localllm_kernels.cpu.team import Team


@dataclass(frozen=True, slots=True)
class CProduct:
    """`x`, float32 [rows, in] -> [rows, out].

    `weight` is the C structure; `kept` are the tensors that it points to.
    """

    team: Team
    kind: ProductKind
    run: Callable[..., int]
    weight: IntegerWeight | FloatWeight
    kept: tuple[Tensor | None, ...]

    @property
    def struct(self) -> structs.Product:
        """It as a Product of operators.h, which must not outlive it."""
        return structs.Product(self.kind, ctypes.addressof(self.weight))

    def __call__(self, x: Tensor) -> Tensor:
        """Compute. Raises: MemoryError."""
        x = x.contiguous()
        y = x.new_empty(x.shape[0], self.weight.width_out)
        failed = self.run(
            ctypes.addressof(self.weight),
            x.data_ptr(),
            y.data_ptr(),
            x.shape[0],
            self.team.size,
        )
        if failed:
            raise MemoryError("out of memory for the inputs of a product")
        return y


@dataclass(frozen=True, slots=True)
class PermutedProduct:
    """A product whose columns are permuted; `permutation`: [in], the input of each column."""

    product: CProduct
    permutation: Tensor

    def __call__(self, x: Tensor) -> Tensor:
        """`x`, float32 [rows, in] -> [rows, out]."""
        return self.product(x[:, self.permutation])


CpuProduct = CProduct | PermutedProduct
