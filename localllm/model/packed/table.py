"""The table of the weights' number formats; other code knows a format only by its row here."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from math import prod

import torch

from localllm.model.packed.fp8 import Fp8Weight
from localllm.model.packed.fp8_schemes import Fp8
from localllm.model.packed.int4 import Int4Weight
from localllm.model.packed.int4_schemes import Awq, Gptq, PackedInt4
from localllm.model.packed.int8 import Int8Weight
from localllm.model.packed.int8_schemes import PackedInt8, PlainInt8
from localllm.model.packed.mxfp4 import BIAS, GROUP_SIZE, Mxfp4Weight
from localllm.model.packed.mxfp4_schemes import BlocksMxfp4, PackedMxfp4
from localllm.model.packed.nvfp4 import GROUP_SIZE as NVFP4_GROUP
from localllm.model.packed.nvfp4 import Nvfp4Weight
from localllm.model.packed.nvfp4_schemes import ModelOptNvfp4, PackedNvfp4
from localllm.model.packed.scheme import Scheme
from localllm.model.packed.trellis import TrellisWeight
from localllm.model.packed.trellis_schemes import Trellis
from localllm.model.packed.weight import PackedWeight
from localllm_kernels.compiling.choice import Piece
from localllm_kernels.trellis import BYTES, IN_BYTES, TABLE

Shape = tuple[int, int]
_GROUP_SIZE = 128
# The standard deviation of uniformly drawn codes of e2m1.
_OF_E2M1 = 2.92


@dataclass(frozen=True, slots=True)
class PackedType:
    """A number format.

    `weight`: its type, which has the torch reference and the products; `schemes`: its file formats;
    `piece`: the kernels that multiply with it; `draw`: a random weight of a shape, with values of
    about 1 / sqrt(in); `stored_bytes`: bytes of such a weight; `group`: its inputs that share a
    scale, of so many.
    """

    weight: type[PackedWeight]
    schemes: tuple[Callable[..., Scheme], ...]
    piece: Piece
    draw: Callable[[Shape, torch.Generator], PackedWeight]
    stored_bytes: Callable[[Shape], int]
    group: Callable[[int], int] = lambda width_in: width_in


def drawn_group(width_in: int) -> int:
    """Inputs per scale of a random int4 weight: 128, or another size if 128 does not divide."""
    return next(size for size in (_GROUP_SIZE, 64, 32, 16, width_in) if width_in % size == 0)


def _draw_int4(shape: Shape, generator: torch.Generator) -> Int4Weight:
    codes = torch.empty(shape[0], shape[1] // 2, dtype=torch.uint8, device=generator.device)
    num_groups = shape[1] // drawn_group(shape[1])
    # 4.61: the standard deviation of uniformly drawn codes.
    scales = _even_scales((shape[0], num_groups), shape, 4.61, torch.bfloat16, generator)
    return Int4Weight(codes.random_(0, 256, generator=generator), scales, None)


def _draw_int8(shape: Shape, generator: torch.Generator) -> Int8Weight:
    codes = torch.empty(shape, dtype=torch.int8, device=generator.device)
    scales = _even_scales(shape[:1], shape, 73.3, torch.bfloat16, generator)
    return Int8Weight(codes.random_(-127, 128, generator=generator), scales)


def _draw_fp8(shape: Shape, generator: torch.Generator) -> Fp8Weight:
    values = torch.empty(shape, dtype=torch.bfloat16, device=generator.device)
    codes = values.normal_(generator=generator).to(torch.float8_e4m3fn)
    scales = _even_scales((shape[0], 1), shape, 1.0, torch.float32, generator)
    return Fp8Weight(codes, scales, (1, shape[1]))


def _draw_mxfp4(shape: Shape, generator: torch.Generator) -> Mxfp4Weight:
    codes = torch.empty(shape[0], shape[1] // 2, dtype=torch.uint8, device=generator.device)
    # Of the two powers of two around what is wanted, each has such a part of the groups that the
    # values have it together.
    wanted = math.log2(shape[1] ** -0.5 / _OF_E2M1)
    low = math.floor(wanted)
    is_high = (
        torch.rand(shape[0], shape[1] // GROUP_SIZE, generator=generator, device=generator.device)
        < (4 ** (wanted - low) - 1) / 3
    )
    exponents = (is_high + (low + BIAS)).to(torch.uint8)
    return Mxfp4Weight(codes.random_(0, 256, generator=generator), exponents)


def _draw_nvfp4(shape: Shape, generator: torch.Generator) -> Nvfp4Weight:
    codes = torch.empty(shape[0], shape[1] // 2, dtype=torch.uint8, device=generator.device)
    groups = (shape[0], shape[1] // NVFP4_GROUP)
    ones = torch.full(groups, 0x38, dtype=torch.uint8, device=generator.device)
    divisors = 1 / _even_scales(shape[:1], shape, _OF_E2M1, torch.float32, generator)
    return Nvfp4Weight(
        codes.random_(0, 256, generator=generator), ones.view(torch.float8_e4m3fn), divisors
    )


def _draw_trellis(shape: Shape, generator: torch.Generator) -> TrellisWeight:
    width = shape[1] // IN_BYTES * BYTES
    codes = torch.empty(shape[0], width, dtype=torch.uint8, device=generator.device)
    deviation = (sum(step * step for step in TABLE) / len(TABLE)) ** 0.5
    scales = _even_scales(shape[:1], shape, deviation, torch.float32, generator)
    return TrellisWeight(codes.random_(0, 256, generator=generator), scales)


def _even_scales(
    count: tuple[int, ...],
    shape: Shape,
    of_codes: float,
    dtype: torch.dtype,
    generator: torch.Generator,
) -> torch.Tensor:
    return torch.full(count, shape[1] ** -0.5 / of_codes, dtype=dtype, device=generator.device)


PACKED_TYPES: dict[str, PackedType] = {
    "int4": PackedType(
        Int4Weight,
        (PackedInt4, Awq, Gptq),
        Piece.INT4,
        _draw_int4,
        lambda shape: prod(shape) // 2 + 2 * prod(shape) // drawn_group(shape[1]),
        drawn_group,
    ),
    "int8": PackedType(
        Int8Weight,
        (PackedInt8, PlainInt8),
        Piece.INT8,
        _draw_int8,
        lambda shape: prod(shape) + 2 * shape[0],
    ),
    "mxfp4": PackedType(
        Mxfp4Weight,
        (PackedMxfp4, BlocksMxfp4),
        Piece.MXFP4,
        _draw_mxfp4,
        lambda shape: prod(shape) // 2 + prod(shape) // GROUP_SIZE,
        lambda width_in: GROUP_SIZE,
    ),
    "nvfp4": PackedType(
        Nvfp4Weight,
        (PackedNvfp4, ModelOptNvfp4),
        Piece.NVFP4,
        _draw_nvfp4,
        lambda shape: prod(shape) // 2 + prod(shape) // NVFP4_GROUP + 4 * shape[0],
        lambda width_in: NVFP4_GROUP,
    ),
    "trellis3": PackedType(
        TrellisWeight,
        (Trellis,),
        Piece.TRELLIS3,
        _draw_trellis,
        lambda shape: prod(shape) // IN_BYTES * BYTES + 4 * shape[0],
    ),
    "fp8": PackedType(
        Fp8Weight, (Fp8,), Piece.FP8, _draw_fp8, lambda shape: prod(shape) + 4 * shape[0]
    ),
}
