"""Products with weights of NVFP4 and inputs in it too, on GPUs whose matrix units multiply it.

    y[m, n] = factor[n] · Σ_g s[m, g] · t[n, g] · Σ_{k in g} a[m, k] · b[n, k]  (+ bias[n])

For checkpoints that want inputs in 4 bits (compressed-tensors' `input_global_scale`, modelopt's
`input_scale`): each 16 inputs become e2m1 with a scale in e4m3, over one for the whole tensor. They
are rounded whatever the number of rows. Other GPUs multiply the inputs as they are.
"""

from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from localllm_kernels.compiling.aot import AotSpec
from localllm_kernels.compiling.launch import Workspace, present, tile_config
from localllm_kernels.experts.product import E2M1
from localllm_kernels.linears import CodedWeight
from localllm_kernels.products.split_sum import add_parts
from localllm_kernels.products.store_outputs import store_outputs

NATIVE_CAPABILITY = 100
# The first GPUs whose units multiply scaled tiles of less than 128 rows.
_ANY_ROWS = 120
_GROUP = 16
_E2M1 = tl.constexpr("e2m1")
# The largest values of e2m1 and e4m3.
_MOST, _MOST_SCALE = 6.0, 448.0


@triton.jit
def _codes_of(values):
    """The e2m1 code of each value up to 6; of two as near, the one whose last bit is 0."""
    size = tl.abs(values)
    code = (size > 0.25).to(tl.int32) + (size >= 0.75).to(tl.int32)
    code += (size > 1.25).to(tl.int32) + (size >= 1.75).to(tl.int32)
    code += (size > 2.5).to(tl.int32) + (size >= 3.5).to(tl.int32) + (size > 5.0).to(tl.int32)
    return code + tl.where(values < 0, 8, 0)


@triton.jit(do_not_specialize=["width"])
def _quantize_kernel(x_ptr, input_scale_ptr, codes_ptr, scales_ptr, width, GROUPS: tl.constexpr):
    """GROUPS groups of one row for each program."""
    row, first = tl.program_id(0).to(tl.int64), tl.program_id(1) * GROUPS
    groups = first + tl.arange(0, GROUPS)
    inside = groups[:, None] * 16 + tl.arange(0, 16)[None, :]
    x = tl.load(x_ptr + row * width + inside, mask=inside < width, other=0.0).to(tl.float32)
    whole = tl.load(input_scale_ptr)
    most = tl.max(tl.abs(x), axis=1)
    # A value that is not finite makes the scale NaN.
    stored = tl.minimum(tl.div_rn(tl.div_rn(most, 6.0), whole), 448.0) + tl.sum(x - x, axis=1)
    kept = stored.to(scales_ptr.dtype.element_ty)
    scale = kept.to(tl.float32) * whole
    steps = tl.where((scale > 0.0)[:, None], tl.div_rn(x, scale[:, None]), 0.0)
    low, high = tl.split(tl.reshape(_codes_of(steps), [GROUPS, 8, 2]))
    pairs = groups[:, None] * 8 + tl.arange(0, 8)[None, :]
    at = codes_ptr + row * (width // 2) + pairs
    tl.store(at, (low | (high << 4)).to(tl.uint8), mask=pairs < width // 2)
    tl.store(scales_ptr + row * (width // 16) + groups, kept, mask=groups < width // 16)


@triton.jit(do_not_specialize=["num_rows", "num_splits"])
def _nvfp4_kernel(
    x_ptr,
    x_scales_ptr,
    codes_ptr,
    scales_ptr,
    factors_ptr,
    bias_ptr,
    out_ptr,
    parts_ptr,
    counters_ptr,
    num_rows,
    width_in,
    width_out,
    num_splits,
    HAS_BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    block_n, block_m, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    rows = block_m * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = block_n * BLOCK_N + tl.arange(0, BLOCK_N)
    is_row, is_column = rows < num_rows, columns < width_out
    steps_each = tl.cdiv(tl.cdiv(width_in, BLOCK_K), num_splits)
    first = split * steps_each * BLOCK_K
    end = tl.minimum(first + steps_each * BLOCK_K, width_in)
    half, groups_each = width_in // 2, width_in // 16
    row_at, column_at = rows.to(tl.int64)[:, None], columns.to(tl.int64)[:, None]
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(first, end, BLOCK_K):
        pairs = start // 2 + tl.arange(0, BLOCK_K // 2)
        groups = start // 16 + tl.arange(0, BLOCK_K // 16)
        is_pair, is_group = (pairs < half)[None, :], (groups < groups_each)[None, :]
        row_mask, column_mask = is_row[:, None], is_column[:, None]
        at = row_at * half + pairs[None, :]
        x = tl.load(x_ptr + at, mask=row_mask & is_pair, other=0)
        at = row_at * groups_each + groups[None, :]
        x_scales = tl.load(x_scales_ptr + at, mask=row_mask & is_group, other=0.0)
        at = column_at * half + pairs[None, :]
        codes = tl.load(codes_ptr + at, mask=column_mask & is_pair, other=0)
        at = column_at * groups_each + groups[None, :]
        scales = tl.load(scales_ptr + at, mask=column_mask & is_group, other=0.0)
        acc = tl.dot_scaled(x, x_scales, _E2M1, tl.trans(codes), scales, _E2M1, acc)
    if num_splits > 1:
        task = block_n * tl.num_programs(1) + block_m
        acc, is_done = add_parts(
            acc, parts_ptr, counters_ptr, task, split, num_splits, BLOCK_M, BLOCK_N
        )
        if not is_done:
            return
    store_outputs(acc, factors_ptr, bias_ptr, out_ptr, rows, columns, num_rows, width_out, HAS_BIAS)


@dataclass(frozen=True, slots=True)
class PackedNvfp4:
    """A weight for the kernel.

    `codes`: uint8 [out, in / 2], the even inputs in the low halves; `scales`: float8_e4m3fn
    [out, in / 16]; `factors`: float32 [out], of the weight and of the inputs; `input_scale`:
    float32 [1], of the inputs' scales.
    """

    codes: Tensor
    scales: Tensor
    factors: Tensor
    input_scale: Tensor
    bias: Tensor | None

    @classmethod
    def pack(cls, weight: CodedWeight, bias: Tensor | None) -> "PackedNvfp4":
        """Of a weight with an input scale."""
        assert weight.factors is not None
        assert weight.input_scale is not None
        codes, scale = weight.codes, weight.input_scale.float().reshape(1)
        pairs = codes[:, 0::2] | codes[:, 1::2] << 4
        return cls(pairs, weight.scales, weight.factors * scale, scale, bias)


def multiplies_nvfp4(workspace: Workspace) -> bool:
    """Whether the matrix units of its GPU multiply NVFP4; AMD's count their versions otherwise."""
    return workspace.capability >= NATIVE_CAPABILITY and torch.version.hip is None


def quantize_to_nvfp4(x: Tensor, input_scale: Tensor) -> tuple[Tensor, Tensor]:
    """`x`: [rows, width], a multiple of 16 -> codes, uint8 [rows, width / 2], and scales,
    float8_e4m3fn [rows, width / 16], which `input_scale`, float32 [1], multiplies.
    """
    num_rows, width = x.shape
    codes = torch.empty(num_rows, width // 2, dtype=torch.uint8, device=x.device)
    scales = torch.empty(num_rows, width // _GROUP, dtype=torch.float8_e4m3fn, device=x.device)
    num_groups = min(64, triton.next_power_of_2(width // _GROUP))
    grid = num_rows, triton.cdiv(width // _GROUP, num_groups)
    _quantize_kernel[grid](x, input_scale, codes, scales, width, GROUPS=num_groups, num_warps=4)
    return codes, scales


def nvfp4_matmul(x: Tensor, weight: PackedNvfp4, workspace: Workspace) -> Tensor:
    """`x`: [rows, in] -> [rows, out]."""
    (num_rows, width_in), width_out = x.shape, len(weight.codes)
    out = x.new_empty(num_rows, width_out)
    if num_rows == 0:
        return out
    codes, scales = quantize_to_nvfp4(x.contiguous(), weight.input_scale)
    config = tile_config("nvfp4", num_rows, width_out, width_in, workspace)
    if workspace.capability < _ANY_ROWS:
        config = replace(config, block_m=128)
    tasks = config.num_tasks(num_rows, width_out)
    _nvfp4_kernel[config.grid(num_rows, width_out)](
        codes,
        scales,
        weight.codes,
        weight.scales,
        weight.factors,
        present(weight.bias, out),
        out,
        workspace.parts(config.num_part_values(tasks)),
        workspace.counters(tasks),
        num_rows,
        width_in,
        width_out,
        config.num_splits,
        HAS_BIAS=weight.bias is not None,
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        BLOCK_K=config.block_k,
        num_warps=config.num_warps,
    )
    return out


def rounded_to_nvfp4(x: Tensor, input_scale: Tensor) -> Tensor:
    """What `quantize_to_nvfp4` makes of `x`, float32 [rows, width], by torch; but ties go down."""
    groups = x.view(len(x), x.shape[1] // _GROUP, _GROUP)
    stored = (groups.abs().amax(2) / _MOST / input_scale).clamp(max=_MOST_SCALE)
    scales = (stored.to(torch.float8_e4m3fn).float() * input_scale)[:, :, None]
    sizes = torch.tensor(E2M1, device=x.device)
    steps = torch.where(scales > 0, groups / scales, 0.0)
    nearest = torch.bucketize(steps.abs().contiguous(), (sizes[1:] + sizes[:-1]) / 2)
    return (sizes[nearest].copysign(steps) * scales).flatten(1)


def nvfp4_matmul_reference(x: Tensor, weight: CodedWeight, bias: Tensor | None) -> Tensor:
    """The same in float64."""
    assert weight.factors is not None
    assert weight.input_scale is not None
    both = (*E2M1, *(-each for each in E2M1))
    values = torch.tensor(both, dtype=torch.float64, device=x.device)
    scales = (weight.scales.double() * weight.factors.double()[:, None]).repeat_interleave(16, 1)
    rounded = rounded_to_nvfp4(x.float(), weight.input_scale).double()
    whole = values[weight.codes.int()] * scales
    return F.linear(rounded, whole, None if bias is None else bias.double())


def _example(workspace: Workspace, num_rows: int) -> None:
    codes = torch.empty(4096, 4096, dtype=torch.uint8)
    scales = torch.empty(4096, 256, dtype=torch.float8_e4m3fn)
    factors, scale = torch.empty(4096), torch.empty(1)
    weight = CodedWeight("nvfp4", codes, scales, factors=factors, input_scale=scale)
    x = torch.empty(num_rows, 4096, dtype=torch.bfloat16)
    nvfp4_matmul(x, PackedNvfp4.pack(weight, None), workspace)


AOT_SPECS = [
    *(
        AotSpec(
            _nvfp4_kernel,
            f"{rows} rows",
            partial(_example, num_rows=rows),
            min_capability=NATIVE_CAPABILITY,
            multiples_of_16=("width_in", "width_out"),
        )
        for rows in (1, 64, 512)
    ),
    AotSpec(
        _quantize_kernel,
        "bf16",
        lambda _: quantize_to_nvfp4(torch.empty(1, 4096, dtype=torch.bfloat16), torch.empty(1)),
        min_capability=NATIVE_CAPABILITY,
    ),
]
