"""Products with weights in e4m3, with one scale per output or per block of the weight.

    y[m, n] = Σ_b scale[n, b] · Σ_{k in b} code[n, k] · x[m, k]  (+ bias[n])

GPUs that multiply 8-bit floats (capability 8.9 and newer) get x in e4m3 too, with one scale per row
that is computed on the fly:  x ≈ code · max |x| / 448. Their sums are kept in float32 after at most
128 inputs: the adders of Hopper drop bits (DeepSeek-V3 technical report, section 3.3.2). On other
GPUs the codes are widened to the type of x, where they are exact.
"""

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from localllm_kernels.compiling.aot import AotSpec, Work
from localllm_kernels.compiling.launch import Workspace, present, tile_config
from localllm_kernels.compiling.tiles import TileConfig, choose_tiles
from localllm_kernels.primitives.e4m3 import from_e4m3
from localllm_kernels.products.split_sum import add_parts

NATIVE_CAPABILITY = 89


@triton.jit
def _quantize_kernel(x_ptr, codes_ptr, scales_ptr, width, BLOCK: tl.constexpr):
    """One row of x per program."""
    row = tl.program_id(0)
    columns = tl.arange(0, BLOCK)
    at, inside = row.to(tl.int64) * width + columns, columns < width
    x = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
    largest = tl.max(tl.abs(x), axis=0)
    # Divided exactly, as by torch: x is often half-way between two codes.
    factor = tl.where(largest > 0.0, tl.div_rn(448.0, largest), 0.0)
    tl.store(codes_ptr + at, (x * factor).to(codes_ptr.dtype.element_ty), mask=inside)
    # A value that is not finite makes the scale so too, and with it the row's results.
    tl.store(scales_ptr + row, tl.div_rn(largest, 448.0) + tl.sum(x - x, axis=0))


@triton.jit(do_not_specialize=["num_rows", "num_splits"])
def _fp8_kernel(
    x_ptr,
    x_scales_ptr,
    codes_ptr,
    scales_ptr,
    bias_ptr,
    out_ptr,
    parts_ptr,
    counters_ptr,
    num_rows,
    width_in,
    width_out,
    num_splits,
    SCALE_N: tl.constexpr,
    SCALE_K: tl.constexpr,
    IS_NATIVE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    block_n, block_m, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    rows = block_m * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = block_n * BLOCK_N + tl.arange(0, BLOCK_N)
    is_row, is_column = rows < num_rows, columns < width_out
    steps_each = tl.cdiv(tl.cdiv(width_in, BLOCK_K), num_splits)
    first = split * steps_each * BLOCK_K
    end = tl.minimum(first + steps_each * BLOCK_K, width_in)
    row_at = rows.to(tl.int64)[:, None] * width_in
    column_at = columns.to(tl.int64)[:, None] * width_in
    # SCALE_K is 0 if one scale covers all inputs.
    scales_each = 1 if SCALE_K == 0 else tl.cdiv(width_in, SCALE_K)
    scale_at = columns // SCALE_N * scales_each
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(first, end, BLOCK_K):
        inputs = start + tl.arange(0, BLOCK_K)
        is_input = inputs < width_in
        x_mask = is_row[:, None] & is_input[None, :]
        x = tl.load(x_ptr + row_at + inputs[None, :], mask=x_mask, other=0.0)
        code_mask = is_column[:, None] & is_input[None, :]
        nothing = 0.0 if IS_NATIVE else 0
        codes = tl.load(codes_ptr + column_at + inputs[None, :], mask=code_mask, other=nothing)
        if IS_NATIVE:
            part = tl.dot(x, tl.trans(codes), max_num_imprecise_acc=BLOCK_K)
        else:
            part = tl.dot(x, tl.trans(from_e4m3(codes).to(dtype)), input_precision="ieee")
        if SCALE_K != 0:
            scales = tl.load(scales_ptr + scale_at + start // SCALE_K, mask=is_column, other=0.0)
            part *= scales.to(tl.float32)[None, :]
        acc += part
    if num_splits > 1:
        task = block_n * tl.num_programs(1) + block_m
        acc, is_done = add_parts(
            acc, parts_ptr, counters_ptr, task, split, num_splits, BLOCK_M, BLOCK_N
        )
        if not is_done:
            return
    if SCALE_K == 0:
        scales = tl.load(scales_ptr + scale_at, mask=is_column, other=0.0).to(tl.float32)
        acc *= scales[None, :]
    if IS_NATIVE:
        acc *= tl.load(x_scales_ptr + rows, mask=is_row, other=0.0)[:, None]
    if HAS_BIAS:
        acc += tl.load(bias_ptr + columns, mask=is_column, other=0.0).to(tl.float32)[None, :]
    at = rows.to(tl.int64)[:, None] * width_out + columns[None, :]
    tl.store(
        out_ptr + at, acc.to(out_ptr.dtype.element_ty), mask=is_row[:, None] & is_column[None, :]
    )


def takes_blocks(block_width: int, width_in: int) -> bool:
    """Whether the kernel supports scales for blocks of `block_width` inputs."""
    return block_width >= width_in or block_width % 128 == 0


def rounds_inputs(device: torch.device) -> bool:
    """Whether inputs are rounded to e4m3 on `device`, since its matrix units multiply that."""
    return Workspace(device).capability >= NATIVE_CAPABILITY


def fp8_matmul(
    x: Tensor,
    codes: Tensor,
    scales: Tensor,
    block: tuple[int, int],
    bias: Tensor | None,
    workspace: Workspace,
) -> Tensor:
    """`x`: [rows, in]; `codes`: float8_e4m3fn [out, in]; `scales`: [ceil(out / block[0]),
    ceil(in / block[1])] -> [rows, out].

    Raises: ValueError for blocks that `takes_blocks` rejects.
    """
    num_rows, width_in = x.shape
    width_out = codes.shape[0]
    if not takes_blocks(block[1], width_in):
        raise ValueError(f"scales for blocks of {block[1]} inputs are not supported")
    out = x.new_empty(num_rows, width_out)
    if num_rows == 0:
        return out
    is_native = workspace.capability >= NATIVE_CAPABILITY
    inputs, x_scales, weight = x.contiguous(), scales, codes.view(torch.uint8)
    if is_native:
        inputs, x_scales = quantize_inputs(inputs)
        weight = codes
    config = tile_config("fp8", num_rows, width_out, width_in, workspace)
    tasks = config.num_tasks(num_rows, width_out)
    _fp8_kernel[config.grid(num_rows, width_out)](
        inputs,
        x_scales,
        weight,
        scales,
        present(bias, x),
        out,
        workspace.parts(config.num_part_values(tasks)),
        workspace.counters(tasks),
        num_rows,
        width_in,
        width_out,
        config.num_splits,
        SCALE_N=block[0],
        SCALE_K=0 if block[1] >= width_in else block[1],
        IS_NATIVE=is_native,
        HAS_BIAS=bias is not None,
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        BLOCK_K=config.block_k,
        num_warps=config.num_warps,
    )
    return out


def quantize_inputs(x: Tensor) -> tuple[Tensor, Tensor]:
    """`x`: [rows, width] -> e4m3 codes of the same shape, and float32 scales [rows]."""
    num_rows, width = x.shape
    codes = torch.empty_like(x, dtype=torch.float8_e4m3fn)
    scales = x.new_empty(num_rows, dtype=torch.float32)
    block = triton.next_power_of_2(width)
    _quantize_kernel[(num_rows,)](
        x, codes, scales, width, BLOCK=block, num_warps=min(8, max(1, block // 512))
    )
    return codes, scales


def fp8_matmul_reference(
    x: Tensor, codes: Tensor, scales: Tensor, block: tuple[int, int], bias: Tensor | None
) -> Tensor:
    """The same in float64, with x unrounded."""
    width_out, width_in = codes.shape
    rows = scales.double().repeat_interleave(block[0], 0)[:width_out]
    weight = codes.double() * rows.repeat_interleave(block[1], 1)[:, :width_in]
    return F.linear(x.double(), weight, None if bias is None else bias.double())


def _spec(num_rows: int, config: TileConfig, is_native: bool, scale_k: int) -> AotSpec:
    return AotSpec(
        _fp8_kernel,
        f"{num_rows} rows, scales for {scale_k or 'all'} inputs{', native' if is_native else ''}",
        {
            "x_ptr": "*fp8e4nv" if is_native else "*bf16",
            "codes_ptr": "*fp8e4nv" if is_native else "*u8",
            **dict.fromkeys(("scales_ptr", "x_scales_ptr", "parts_ptr"), "*fp32"),
            **dict.fromkeys(("bias_ptr", "out_ptr"), "*bf16"),
            "counters_ptr": "*i32",
            **dict.fromkeys(("num_rows", "width_in", "width_out", "num_splits"), "i32"),
        },
        {
            "SCALE_N": 128 if scale_k else 1,
            "SCALE_K": scale_k,
            "IS_NATIVE": is_native,
            "HAS_BIAS": False,
            "BLOCK_M": config.block_m,
            "BLOCK_N": config.block_n,
            "BLOCK_K": config.block_k,
        },
        config.num_warps,
        min_capability=NATIVE_CAPABILITY if is_native else 80,
        multiples_of_16=("width_in", "width_out"),
        max_stack=8,  # on sm_100 the compiler spills two values from before the loop
        work=Work("weight", config.block_n * config.block_k, 1),
    )


AOT_SPECS = [
    _spec(rows, choose_tiles(rows, 4096, 4096, 132), is_native, scale_k)
    for rows, is_native, scale_k in (
        (1, False, 0),
        (512, False, 128),
        (64, True, 0),
        (512, True, 128),
    )
]
AOT_SPECS.append(
    AotSpec(
        _quantize_kernel,
        "bf16",
        {"x_ptr": "*bf16", "codes_ptr": "*fp8e4nv", "scales_ptr": "*fp32", "width": "i32"},
        {"BLOCK": 4096},
        8,
        min_capability=NATIVE_CAPABILITY,
    )
)
