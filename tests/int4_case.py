"""A random 4-bit weight and its products, on any device."""

import torch
import torch.nn.functional as F
import triton
from guards import GuardedMemory
from rounding import assert_near, gated_bound, scatter, sum_bound, unit
from torch import Tensor

from localllm_kernels.compiling.launch import Workspace
from localllm_kernels.linears import CodedWeight
from localllm_kernels.products.int4_matmul import (
    MAX_SLICED_ROWS,
    MAX_TILE_ROWS,
    SYMMETRIC_ZERO,
    int4_matmul,
    int4_matmul_reference,
)
from localllm_kernels.products.int4_weight import NOTHING, Around, PackedInt4


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
        fragments: bool = False,
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
        self.workspace = Workspace(
            torch.device(device), fragment_rows=range(1, MAX_TILE_ROWS + 1 if fragments else 1)
        )
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
            *weight, bias = (None if each is None else memory.guarded(each) for each in others)
            packed = PackedInt4.pack(CodedWeight("int4", self.codes, *weight), bias)
            found = int4_matmul(memory.guarded(x), packed, self.workspace, around)
        memory.check()
        assert found.dtype == self.dtype
        is_cut = self.dtype == torch.bfloat16 and triton.knobs.runtime.interpret
        assert_near(found, expected, self.bound(x, around), 4.0 if is_cut else 1.0)

    def dense(self) -> Tensor:
        """The weight in float64, its inputs in the order of x."""
        offsets = torch.full_like(self.scales, SYMMETRIC_ZERO) if self.zeros is None else self.zeros
        groups = self.codes.double().view(*self.scales.shape, -1) - offsets.double()[:, :, None]
        weight = (groups * self.scales.double()[:, :, None]).flatten(1)
        if self.permutation is None:
            return weight
        return torch.empty_like(weight).index_copy_(1, self.permutation, weight)

    def bound(self, x: Tensor, around: Around = NOTHING) -> Tensor:
        """How far `check` lets the product of x be from the exact one.

        Of several rows the product of x and the norm is rounded; of one row nothing is. Of very
        many the weight is, which is dequantized for them. What else is in half precision, codes and
        inputs, is exact in it. Fragments add up 128 and the code in float32, for up to eight rows.
        """
        wide, weight = x.double(), self.dense()
        fragments = bool(self.workspace.fragment_rows) and self.dtype != torch.float32
        rounded = unit(self.dtype) if len(x) > MAX_SLICED_ROWS else 0.0
        if around.norm is not None:
            mean = wide.square().mean(-1, keepdim=True)
            wide = wide * torch.rsqrt(mean + around.eps) * around.norm.double()
            rounded = unit(self.dtype) if len(x) > 1 or fragments else 0.0
        bound = sum_bound(wide, weight, rounded)
        if fragments:
            group = self.width_in // self.scales.shape[1]
            scales = self.scales.double().repeat_interleave(group, dim=1)
            bound += scatter(wide, 136 * group**0.5 * scales, unit(torch.float32))
        if not around.is_gated:
            return bound
        sums = F.linear(wide, weight, None if self.bias is None else self.bias.double())
        return gated_bound(*sums.chunk(2, dim=-1), bound)
