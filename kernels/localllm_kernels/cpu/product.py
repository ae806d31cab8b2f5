"""A product with a weight in the C library, ready to be called or handed to other operators."""

import ctypes
from ctypes import Structure
from dataclasses import dataclass

from torch import Tensor

from localllm_kernels.cpu import structs
from localllm_kernels.cpu.team import Team


@dataclass(frozen=True, slots=True)
class CProduct:
    """`x`, float32 [rows, in] -> [rows, out].

    `kind`, `weight`: as a Product of operators.h has them; `kept`: the tensors that the weight
    points to.
    """

    library: ctypes.CDLL
    team: Team
    kind: int
    weight: Structure
    kept: tuple[Tensor | None, ...]

    @property
    def struct(self) -> Structure:
        """It as a Product of operators.h, which must not outlive it."""
        return structs.Product(self.kind, ctypes.addressof(self.weight))

    def __call__(self, x: Tensor) -> Tensor:
        """Compute. Raises: MemoryError."""
        x = x.contiguous()
        y = x.new_empty(x.shape[0], self.weight.width_out)
        product = self.struct
        pointers = ctypes.addressof(product), x.data_ptr(), y.data_ptr()
        if self.library.multiply(*pointers, x.shape[0], self.team.size):
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
