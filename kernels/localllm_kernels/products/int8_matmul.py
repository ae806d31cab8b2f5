"""Products with 8-bit weights that have one scale per output.

    y[m, n] = scale[n] · Σ_k code[n, k] · x[m, k]  (+ bias[n])

A code is exact in any type of x, so the sum is that of a plain product, and the scale is applied to
it once.
"""

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from localllm_kernels.compiling.launch import Workspace
from localllm_kernels.products.eight_bits import ByteWeight, multiply, spec_of


def int8_matmul(
    x: Tensor, codes: Tensor, scales: Tensor, bias: Tensor | None, workspace: Workspace
) -> Tensor:
    """`x`: [rows, in]; `codes`: int8 [out, in]; `scales`: [out] -> [rows, out]."""
    out = x.new_empty(len(x), len(codes))
    weight = ByteWeight(codes, scales, (1, x.shape[1]), bias)
    multiply(x.contiguous(), None, weight, out, workspace)
    return out


def int8_matmul_reference(x: Tensor, codes: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
    """The same in float64."""
    weight = codes.double() * scales.double()[:, None]
    return F.linear(x.double(), weight, None if bias is None else bias.double())


def _example(workspace: Workspace, num_rows: int) -> None:
    x, codes = torch.empty(num_rows, 4096), torch.empty(4096, 4096, dtype=torch.int8)
    int8_matmul(x.bfloat16(), codes, torch.empty(4096, dtype=torch.bfloat16), None, workspace)


AOT_SPECS = [spec_of(f"{rows} rows", partial(_example, num_rows=rows)) for rows in (1, 64, 512)]
