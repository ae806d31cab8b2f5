"""Products with 4-bit weights, dequantized on their way to the arithmetic.

    y[m, n] = Σ_g scale[g, n] · Σ_{k in g} (code[k, n] − zero[g, n]) · x[m, k]  (+ bias[n])

Scales and zeros are applied once per group, to sums of products: Σ code · x − zero · Σ x.

The layout of the weight is that of `int4_weight.py`. Up to 64 rows use `int4_fragments.py` where
that is allowed; otherwise one row uses `int4_row.py` and more use `int4_tiles.py`. A few times 64
rows are done in parts of 64. For more rows, a slice of the weight at a time is dequantized and left
to the library. If outputs are few, inputs are split among programs, and the last program adds up
the parts in order.

Fused with the product, to save launches: the norm before it (the weight of the norm goes to x, the
factor of the row to the sum), the gate after it (`silu(gate) · up`, two halves of the outputs), and
the residual. Sources: Frantar et al. 2024, "MARLIN", section 3 (codes in mantissas); Hoque et al.
2024 (arXiv 2402.00025; split inputs).
"""

from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
import torch.nn.functional as F
import triton
from torch import Tensor

from localllm_kernels.compiling.aot import AotSpec, Work
from localllm_kernels.compiling.launch import Workspace, present, row_bucket
from localllm_kernels.compiling.tiles import MAX_WARPS, Ranges, TileConfig, neighbours
from localllm_kernels.pointwise.gate_launch import gate
from localllm_kernels.pointwise.rms_norm_launch import rms_norm
from localllm_kernels.products.int4_fragments import _fragment_kernel
from localllm_kernels.products.int4_row import _row_kernel
from localllm_kernels.products.int4_tiles import _dequantize_kernel, _tile_kernel
from localllm_kernels.products.int4_weight import BLOCK, NOTHING, TILE, Around, PackedInt4

MAX_TILE_ROWS = 64
# With more rows the norm costs more, in steps of the matrix units, than a launch of its own.
MAX_NORM_ROWS = 16
# Up to here it is better to take slices of rows than to dequantize the weight, whose values are
# then written and read again: 4.5 bytes each, instead of half a byte for each slice.
MAX_SLICED_ROWS = 192
SYMMETRIC_ZERO = 8
TURN = 2 * BLOCK  # inputs per warp and turn in the kernels without tiles
MAX_WIDE = 4  # warps side by side in the kernel with fragments
AHEAD = 4  # turns whose words are brought into the L2 cache, where launches overlap
MAGIC = 0x4B000000  # the bits of 2^23
Way = Literal["fragments", "row", "tiles"]


def int4_matmul(
    x: Tensor, weight: PackedInt4, workspace: Workspace, around: Around = NOTHING
) -> Tensor:
    """`x`: [rows, in] -> [rows, out], or half the outputs if they are gated.

    Raises: ValueError for more than 64 rows with anything fused.
    """
    num_rows = x.shape[0]
    if num_rows > MAX_TILE_ROWS and around is not NOTHING:
        raise ValueError(f"{num_rows} rows are too many for a fused norm, gate or residual")
    if num_rows > MAX_SLICED_ROWS:
        return _by_library(x, weight, workspace)
    if around.is_gated and weight.width_out % (2 * TILE):
        # An output and its gate are at different places in their tiles.
        return gate(int4_matmul(x, weight, workspace, replace(around, is_gated=False)), "silu")
    way = _way(x, weight, workspace)
    if around.norm is not None and way == "fragments" and num_rows > MAX_NORM_ROWS:
        x, around = rms_norm(x, around.norm, around.eps), replace(around, norm=None)
    outputs = weight.width_out // 2 if around.is_gated else weight.width_out
    out = x.new_empty(num_rows, outputs)
    for first in range(0, num_rows, MAX_TILE_ROWS):
        rows = slice(first, first + MAX_TILE_ROWS)
        _launch(way, x[rows], weight, workspace, around, out[rows])
    return out


def _launch(
    way: Way, x: Tensor, weight: PackedInt4, workspace: Workspace, around: Around, out: Tensor
) -> None:
    """The product of at most 64 rows, into `out`."""
    num_rows, width_in = x.shape
    outputs, num_blocks = out.shape[1], weight.num_blocks
    rows = {"tiles": max(16, row_bucket(num_rows)), "fragments": _eights(num_rows), "row": 1}[way]
    config = workspace.tunings.config(
        f"int4 {way}",
        (rows, outputs, num_blocks, weight.group_size, int(around.is_gated)),
        lambda: _choose(way, rows, outputs, num_blocks, workspace, around.is_gated),
        _vary if way == "tiles" or not workspace.overlaps else _vary_ahead,
    )
    num_tasks = triton.cdiv(outputs, config.block_n)
    num_parts = num_tasks * config.num_splits if config.num_splits > 1 else 0
    x = x.contiguous()
    norm = present(around.norm, x)
    arguments: dict[str, Any] = {
        "x_ptr": x.view(torch.int64) if way == "fragments" else x,
        "words_ptr": weight.words,
        "scales_ptr": weight.scales,
        "zeros_ptr": present(weight.zeros, weight.scales),
        "bias_ptr": present(weight.bias, x),
        "norm_ptr": norm.view(torch.int64) if way == "fragments" else norm,
        "residual_ptr": present(around.residual, x),
        "out_ptr": out,
        "parts_ptr": workspace.parts(num_parts * _part_size(way, rows, config)),
        "counters_ptr": workspace.counters(num_tasks),
        "width_in": width_in,
        "width_out": weight.width_out,
        "num_blocks": num_blocks,
        "num_splits": config.num_splits,
        "eps": around.eps,
        "GROUP": weight.group_size,
        "HAS_ZEROS": weight.zeros is not None,
        "HAS_BIAS": weight.bias is not None,
        "HAS_NORM": around.norm is not None,
        "HAS_RESIDUAL": around.residual is not None,
        "IS_GATED": around.is_gated,
        "num_warps": config.num_warps,
    }
    is_even = width_in % config.block_k == 0
    ptx = not triton.knobs.runtime.interpret
    grid = (num_tasks, config.num_splits)
    if way != "tiles":
        arguments["ahead"] = config.ahead
        arguments["OVERLAPS"] = workspace.overlaps
        arguments |= workspace.launch_options
    if way == "fragments":
        _fragment_kernel[grid](
            **arguments,
            num_rows=num_rows,
            IS_EVEN=is_even,
            EIGHTS=rows // 8,
            DEEP=config.block_k // TURN,
            WIDE=_wide(config),
            PTX=ptx,
        )
        return
    arguments["permutation_ptr"] = present(weight.permutation, weight.words)
    arguments["HAS_PERMUTATION"] = weight.permutation is not None
    if way == "row":
        _row_kernel[grid](
            **arguments, magic=MAGIC, IS_EVEN=is_even, WARPS=config.num_warps, PTX=ptx
        )
    else:
        _tile_kernel[grid](
            **arguments, num_rows=num_rows, BLOCK_M=config.block_m, BLOCK_N=config.block_n
        )


def _way(x: Tensor, weight: PackedInt4, workspace: Workspace) -> Way:
    """The same for all parts, even if the last has one row: that is one kernel less to compile."""
    takes_fragments = min(len(x), MAX_TILE_ROWS) in workspace.fragment_rows and x.itemsize == 2
    if takes_fragments and weight.permutation is None:
        return "fragments"
    return "row" if len(x) == 1 else "tiles"


def _eights(num_rows: int) -> int:
    """`num_rows` rounded up to eight times a power of two."""
    return 8 * int(triton.next_power_of_2(triton.cdiv(num_rows, 8)))


def _wide(config: TileConfig) -> int:
    """Warps side by side, in the kernels without tiles."""
    return config.num_warps * TURN // config.block_k


def _part_size(way: Way, rows: int, config: TileConfig) -> int:
    """Floats that a program leaves for the program that adds up."""
    if way == "tiles":
        return config.block_m * (2 * config.block_n + 1)
    return 5 * 32 if way == "row" else 10 * 32 * _wide(config) * (rows // 8)


def _choose(
    way: Way, rows: int, outputs: int, num_blocks: int, workspace: Workspace, is_gated: bool
) -> TileConfig:
    """Tiles such that each processor of the GPU has enough work, if the weight is large enough."""
    if way != "tiles":
        return _choose_warps(way, rows, outputs, num_blocks, workspace, is_gated)
    num_processors, block_m = workspace.num_processors, max(16, rows)
    # 64 outputs of 64 rows would not fit into the registers.
    block_n = 32 if block_m == 64 else 64
    wanted = triton.cdiv(2 * num_processors, triton.cdiv(outputs, block_n))
    # Parts shorter than two blocks cost more to add up than they save.
    most = max(1, num_blocks // 2)
    num_splits = min(wanted, most) if workspace.splits and num_processors > 1 else 1
    return TileConfig(block_m, block_n, BLOCK, num_splits, 4)


def _choose_warps(
    way: Way, rows: int, outputs: int, num_blocks: int, workspace: Workspace, is_gated: bool
) -> TileConfig:
    """The same for the kernels without tiles, about as an H100 was found to take them
    (docs/results): programs that fit at once, and as few parts as that leaves.
    """
    num_processors, each = workspace.num_processors, TILE if is_gated else 2 * TILE
    pairs = triton.cdiv(outputs, each)
    warps_at_once = (16 if rows <= 16 else 8) * num_processors
    if rows > 8:
        wide = 2 if 4 * pairs <= warps_at_once else MAX_WIDE
        deep = 8 // wide
    elif 8 * pairs > warps_at_once:
        deep, wide = 4, 1 if way == "row" else 2
    else:
        deep, wide = 16 if num_processors // 2 < pairs <= num_processors else 8, 1
    while deep > 1 and num_blocks * BLOCK % (deep * TURN):
        deep //= 2
    num_tasks, num_splits = triton.cdiv(pairs, wide), 1
    if workspace.splits and num_processors > 1:
        fitting = warps_at_once // (num_tasks * deep * wide)
        num_splits = max(1, min(fitting, num_blocks * BLOCK // (deep * TURN)))
    # It pays where it brings all words of a program.
    num_turns = triton.cdiv(num_blocks * BLOCK, deep * TURN * num_splits)
    is_short = rows <= 8 and num_turns <= AHEAD
    ahead = AHEAD if workspace.overlaps and is_short else 0
    return TileConfig(rows, each * wide, deep * TURN, num_splits, deep * wide, ahead)


def _vary(config: TileConfig) -> list[TileConfig]:
    """The alternatives to try. In the kernel for a row, all warps share outputs."""
    if config.block_k == BLOCK:
        return neighbours(config, Ranges((16, 128), (BLOCK, BLOCK)))
    each = config.block_n // _wide(config)
    most_wide = 1 if config.block_m == 1 else MAX_WIDE
    # With more, the words of one turn only would fit into shared memory, see int4_ring.py.
    most_warps = MAX_WARPS if config.block_m <= 8 else 8
    return [
        replace(other, block_k=other.num_warps * each // other.block_n * TURN)
        for other in neighbours(config, Ranges((each, each * most_wide), (0, 0)))
        if other.block_n <= other.num_warps * each and other.num_warps <= most_warps
    ]


def _vary_ahead(config: TileConfig) -> list[TileConfig]:
    """The same, and more or fewer turns ahead."""
    others = {0, config.ahead // 2, min(2 * config.ahead or 2, 16)} - {1, config.ahead}
    return [*_vary(config), *(replace(config, ahead=each) for each in sorted(others))]


def _by_library(x: Tensor, weight: PackedInt4, workspace: Workspace) -> Tensor:
    """Dequantize and multiply one slice of the weight after another."""
    if weight.permutation is not None:
        x = x[:, weight.permutation]
    out = x.new_empty(x.shape[0], weight.width_out)
    most = max(64, workspace.slice_bytes // (weight.width_in * x.itemsize) // 64 * 64)
    # As many slices as are needed, of about equal size.
    num_slices = triton.cdiv(weight.width_out, most)
    rows_each = triton.cdiv(triton.cdiv(weight.width_out, num_slices), 64) * 64
    for first in range(0, weight.width_out, rows_each):
        end = min(first + rows_each, weight.width_out)
        part = workspace.slice(end - first, weight.width_in, x.dtype)
        dequantize_rows(weight, first, end, part)
        if weight.bias is None:
            torch.mm(x, part.T, out=out[:, first:end])
        else:
            torch.addmm(weight.bias[first:end], x, part.T, out=out[:, first:end])
    return out


def dequantize_rows(weight: PackedInt4, first: int, end: int, out: Tensor) -> None:
    """Outputs `first` to `end` into `out` [end - first, in], in the permutation's order."""
    block_n = 64
    _dequantize_kernel[(weight.num_blocks, triton.cdiv(end - first, block_n))](
        weight.words,
        weight.scales,
        present(weight.zeros, weight.scales),
        out,
        first,
        end,
        weight.width_in,
        weight.num_blocks,
        GROUP=weight.group_size,
        HAS_ZEROS=weight.zeros is not None,
        BLOCK_N=block_n,
    )


def int4_matmul_reference(
    x: Tensor,
    codes: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    permutation: Tensor | None = None,
    bias: Tensor | None = None,
    around: Around = NOTHING,
) -> Tensor:
    """The same in float64, from the codes as `pack` takes them."""
    wide = x.double()
    if around.norm is not None:
        mean = wide.square().mean(-1, keepdim=True)
        wide = wide * torch.rsqrt(mean + around.eps) * around.norm.double()
    if permutation is not None:
        wide = wide[:, permutation]
    offsets = torch.full_like(scales, SYMMETRIC_ZERO) if zeros is None else zeros
    groups = codes.double().view(*scales.shape, -1) - offsets.double()[:, :, None]
    weight = (groups * scales.double()[:, :, None]).flatten(1)
    out = F.linear(wide, weight, None if bias is None else bias.double())
    if around.is_gated:
        gate, up = out.chunk(2, dim=-1)
        out = F.silu(gate) * up
    return out if around.residual is None else out + around.residual.double()


_KERNELS = {"fragments": _fragment_kernel, "row": _row_kernel, "tiles": _tile_kernel}
# The weights of a turn: how many, and by which constants that is multiplied.
_TURNS: dict[Way, tuple[int, tuple[str, ...]]] = {
    "fragments": (TURN * 2 * TILE, ("DEEP", "WIDE")),
    "row": (TURN * 2 * TILE, ("WARPS",)),
    "tiles": (BLOCK, ("BLOCK_N",)),
}


def _example_weight(width_out: int, group: int) -> PackedInt4:
    scales = torch.empty(width_out, 4096 // group, dtype=torch.bfloat16)
    words = torch.empty(width_out // TILE, 4096 // BLOCK, 32, 4, dtype=torch.int32)
    zeros = scales.to(torch.uint8) if group == 32 else None
    return PackedInt4(words, scales, zeros, permutation=None, bias=None, width_in=4096)


@dataclass(frozen=True, slots=True)
class _Example:
    """`around`: "norm", "residual", or "gate" for a norm and a gate."""

    way: Way
    rows: int
    group: int
    around: str
    overlaps: bool = False

    def __call__(self, workspace: Workspace) -> None:
        workspace.overlaps = self.overlaps
        workspace.fragment_rows = range(65 if self.way == "fragments" else 0)
        is_gated, x = self.around == "gate", torch.empty(self.rows, 4096, dtype=torch.bfloat16)
        around = Around(norm=x[0], is_gated=is_gated)
        if self.around == "residual":
            around = Around(residual=x)
        weight = _example_weight(4096 * (2 if is_gated else 1), self.group)
        int4_matmul(x, weight, workspace, around)


def _spec(example: _Example) -> AotSpec:
    way, group, around = example.way, example.group, example.around
    count, times = _TURNS[way]
    if way == "tiles" and around == "gate":
        count *= 2
    return AotSpec(
        _KERNELS[way],
        f"{example.rows} rows groups of {group} {around}"
        + (", overlapping" if example.overlaps else ""),
        example,
        min_capability=90 if example.overlaps else 80,
        multiples_of_16=("width_in", "width_out", "num_blocks", "magic"),
        # A few values from before the loop: on sm_90 of one row, on sm_100 and sm_120 of more.
        max_stack=0 if way == "tiles" else 24,
        work=Work("weight", count, 0.5 + (3 if group == 32 else 2) / group, times=times),
    )


AOT_SPECS = [
    *map(
        _spec,
        (
            _Example("row", 1, 128, "norm"),
            _Example("row", 1, 128, "residual"),
            _Example("row", 1, 32, "gate"),
            _Example("row", 1, 128, "gate", overlaps=True),
            _Example("fragments", 8, 128, "norm"),
            _Example("fragments", 8, 128, "residual"),
            _Example("fragments", 8, 32, "gate"),
            _Example("fragments", 8, 128, "norm", overlaps=True),
            _Example("fragments", 16, 128, "gate"),
            _Example("fragments", 64, 128, "gate"),
            _Example("tiles", 16, 128, "norm"),
            _Example("tiles", 16, 32, "gate"),
            _Example("tiles", 64, 128, "gate"),
            _Example("tiles", 64, 32, "residual"),
        ),
    ),
    AotSpec(
        _dequantize_kernel,
        "groups of 128",
        lambda _: dequantize_rows(
            _example_weight(64, 128), 0, 64, torch.empty(64, 4096, dtype=torch.bfloat16)
        ),
        multiples_of_16=("width_in", "num_blocks"),
    ),
]
