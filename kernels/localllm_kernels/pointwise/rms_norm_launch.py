"""Root-mean-square norm on a GPU, see `rms_norm.py`: a program holds one whole row."""

from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from localllm_kernels.compiling.aot import AotSpec, Work
from localllm_kernels.compiling.launch import Workspace, present


@triton.jit
def _rms_norm_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    out_ptr,
    total_ptr,
    width,
    eps,
    HAS_RESIDUAL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    at = tl.program_id(0).to(tl.int64) * width + columns
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    wide = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        wide += tl.load(residual_ptr + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(total_ptr + at, wide.to(dtype), mask=inside)
        wide = wide.to(dtype).to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, axis=0) / width + eps)
    normed = wide * scale
    if weight_ptr.dtype.element_ty != tl.float32:
        normed = normed.to(dtype).to(tl.float32)
    weight = tl.load(weight_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + at, (weight * normed).to(dtype), mask=inside)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See rms_norm_reference."""
    normed, _ = _launch(x, None, weight, eps)
    return normed


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """See add_rms_norm_reference."""
    return _launch(x, residual, weight, eps)


def _launch(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    x, width = x.contiguous(), x.shape[-1]
    out = torch.empty_like(x)
    total = out if residual is None else torch.empty_like(x)
    block = triton.next_power_of_2(width)
    _rms_norm_kernel[(x.numel() // width,)](
        x,
        present(residual, x),
        weight,
        out,
        total,
        width,
        eps,
        HAS_RESIDUAL=residual is not None,
        BLOCK=block,
        num_warps=min(8, max(1, block // 512)),
    )
    return out, total


def _example(_: Workspace, weight_type: torch.dtype, *, has_residual: bool) -> None:
    x, weight = torch.empty(1, 4096, dtype=torch.bfloat16), torch.empty(4096, dtype=weight_type)
    _launch(x, x if has_residual else None, weight, 1e-6)


AOT_SPECS = [
    AotSpec(
        _rms_norm_kernel,
        ("with residual" if has_residual else "alone") + words,
        partial(_example, weight_type=kind, has_residual=has_residual),
        work=Work("value", 4096, 8 if has_residual else 4),
    )
    for kind, words in ((torch.bfloat16, ""), (torch.float32, ", weight in float32"))
    for has_residual in (False, True)
]
