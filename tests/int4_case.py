"""A random 4-bit weight and its products, on any device."""

import torch
from guards import GuardedMemory
from torch import Tensor

from localllm_kernels.int4_matmul import int4_matmul, int4_matmul_reference
from localllm_kernels.int4_weight import NOTHING, Around, PackedInt4
from localllm_kernels.launch import Workspace

TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


class Case:
    """A random weight, its codes as they are packed, and what the product should be."""

    def __init__(
        self,
        width_in: int,
        width_out: int,
        group: int,
        *,
        is_symmetric: bool = True,
        has_bias: bool = False,
        is_permuted: bool = False,
        dtype: torch.dtype = torch.float32,
        device: str = "cpu",
    ) -> None:
        generator = torch.Generator().manual_seed(width_in + width_out + group)
        groups = width_in // group
        shape = (width_out, groups)
        self.dtype, self.width_in, self.width_out = dtype, width_in, width_out
        self.codes = torch.randint(
            16, (width_out, width_in), generator=generator, dtype=torch.uint8
        )
        self.scales = (torch.rand(shape, generator=generator) / width_in**0.5).to(dtype)
        self.zeros = (
            None
            if is_symmetric
            else torch.randint(16, shape, generator=generator, dtype=torch.uint8)
        )
        self.permutation = torch.randperm(width_in, generator=generator) if is_permuted else None
        self.bias = torch.randn(width_out, generator=generator).to(dtype) if has_bias else None
        self.workspace = Workspace(torch.device(device))
        for name in ("codes", "scales", "zeros", "permutation", "bias"):
            value = getattr(self, name)
            setattr(self, name, None if value is None else value.to(device))

    def rows(self, count: int) -> Tensor:
        return torch.randn(count, self.width_in).to(self.codes.device, self.dtype)

    def check(self, num_rows: int, around: Around = NOTHING) -> None:
        x = self.rows(num_rows)
        expected = int4_matmul_reference(
            x, self.codes, self.scales, self.zeros, self.permutation, self.bias, around
        )
        with GuardedMemory() as memory:
            others = (self.scales, self.zeros, self.permutation, self.bias)
            packed = PackedInt4.pack(
                self.codes, *(None if each is None else memory.guarded(each) for each in others)
            )
            found = int4_matmul(memory.guarded(x), packed, self.workspace, around)
        memory.check()
        assert found.dtype == self.dtype
        tolerance = TOLERANCE[self.dtype]
        torch.testing.assert_close(found.double(), expected, atol=tolerance, rtol=tolerance)
