"""The sum of a row's experts, in the order in which they were chosen.

out[row] = factor[row, 0] · y[row, 0] + factor[row, 1] · y[row, 1] + …
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from localllm_kernels.compiling.aot import AotSpec, Work

BLOCK = 1024


@triton.jit
def _sum_kernel(y_ptr, factors_ptr, out_ptr, width, TOP_K: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    total = tl.zeros([BLOCK], tl.float32)
    for place in tl.static_range(TOP_K):
        pair = row * TOP_K + place
        factor = tl.load(factors_ptr + pair)
        total += factor * tl.load(y_ptr + pair * width + columns, mask=inside).to(tl.float32)
    tl.store(out_ptr + row * width + columns, total.to(out_ptr.dtype.element_ty), mask=inside)


def expert_sum(y: Tensor, factors: Tensor) -> Tensor:
    """See expert_sum_reference."""
    num_rows, top_k = factors.shape
    out = y.new_empty(num_rows, y.shape[1])
    grid = (num_rows, triton.cdiv(y.shape[1], BLOCK))
    if num_rows:
        _sum_kernel[grid](y, factors.contiguous(), out, y.shape[1], TOP_K=top_k, BLOCK=BLOCK)
    return out


def expert_sum_reference(y: Tensor, factors: Tensor) -> Tensor:
    """`y`: [rows · top_k, width], a row for each pair; `factors`: float32 [rows, top_k] -> [rows,
    width] in the type of y, added up in float32.
    """
    parts = y.float().view(*factors.shape, y.shape[1]) * factors[:, :, None]
    total = parts[:, 0]
    for place in range(1, factors.shape[1]):
        total = total + parts[:, place]
    return total.to(y.dtype)


AOT_SPECS = [
    AotSpec(
        _sum_kernel,
        "8 of bf16",
        lambda _: expert_sum(torch.empty(8, 4096, dtype=torch.bfloat16), torch.empty(1, 8)),
        multiples_of_16=("width",),
        work=Work("value", 8 * BLOCK, 2),
    )
]
