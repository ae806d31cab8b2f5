"""The methods that use only the weights: int4, int8, fp8 and mxfp4 by rounding to nearest."""

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from localllm.model.layer import LayerPlan
from localllm.model.packed.fp8 import Fp8Weight
from localllm.model.packed.int4 import pack_nibbles
from localllm.model.packed.int8 import Int8Weight
from localllm.model.packed.mxfp4 import BIAS, GROUP_SIZE, NAN, VALUES, Mxfp4Weight
from localllm.model.packed.weight import PackedWeight
from localllm.quantize.grid import fit_grid, relative_error
from localllm.quantize.layer import QuantizedLayer
from localllm.quantize.recipe import FP8_BLOCK, Recipe

_MAX_FP8 = 448.0  # the largest e4m3 value


def round_weight(weight: Tensor, recipe: Recipe) -> PackedWeight:
    """`weight`, float32 [out, in], rounded by the recipe's method (rtn, int8, fp8 or mxfp4)."""
    if recipe.method == "int8":
        return Int8Weight.rounded(weight)
    if recipe.method == "fp8":
        block = FP8_BLOCK if recipe.file_format == "fp8" else (1, weight.shape[1])
        return round_fp8(weight, block)
    if recipe.method == "mxfp4":
        return round_mxfp4(weight)
    grid = fit_grid(weight, recipe.group_size, symmetric=recipe.symmetric)
    return grid.weight(grid.round(weight))


def round_layer(tensors: Mapping[str, Tensor], plan: LayerPlan, recipe: Recipe) -> QuantizedLayer:
    """Quantize a layer, float32 tensors by name within it, without regard to its inputs.

    Errors are those of the weights: squared difference over squared values.
    """
    plain, weights, errors = dict(tensors), {}, {}
    for linear in plan.quantized():
        weight = plain.pop(f"{linear}.weight")
        weights[linear] = round_weight(weight, recipe)
        errors[linear] = relative_error(weights[linear].dequantize(torch.float32), weight)
    return QuantizedLayer(weights, plain, errors)


def round_fp8(weight: Tensor, block: tuple[int, int]) -> Fp8Weight:
    """e4m3 with one scale per block of rows and columns, in float32."""
    width_out, width_in = weight.shape
    rows, columns = block
    padded = F.pad(weight.abs(), (0, -width_in % columns, 0, -width_out % rows))
    blocks = padded.view(padded.shape[0] // rows, rows, padded.shape[1] // columns, columns)
    scales = (blocks.amax((1, 3)) / _MAX_FP8).clamp(min=torch.finfo(torch.float32).tiny)
    by_row = scales.repeat_interleave(rows, 0)[:width_out]
    spread = by_row.repeat_interleave(columns, 1)[:, :width_in]
    codes = (weight / spread).clamp(-_MAX_FP8, _MAX_FP8).to(torch.float8_e4m3fn)
    return Fp8Weight(codes, scales, block)


def round_mxfp4(weight: Tensor) -> Mxfp4Weight:
    """Of the powers of two around what holds a group's largest value, that of the least squared
    error; `weight`: float32 [out, in], `in` a multiple of 32.
    """
    groups = weight.view(len(weight), -1, GROUP_SIZE)
    # 4 is the largest power of two among the values.
    whole = groups.abs().amax(2).clamp(min=torch.finfo(torch.float32).tiny).log2().floor() - 2
    (low, low_codes, low_error), (high, high_codes, high_error) = (
        _at(groups, exponent) for exponent in (whole, whole + 1)
    )
    is_high = high_error < low_error
    codes = torch.where(is_high[:, :, None], high_codes, low_codes)
    exponents = torch.where(is_high, high, low)
    return Mxfp4Weight(pack_nibbles(codes.flatten(1)), exponents)


def _at(groups: Tensor, exponent: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The groups with these powers of two: these as they are stored, the codes, squared errors."""
    stored = (exponent.int() + BIAS).clamp(0, NAN - 1)
    codes = _nearest_code(torch.ldexp(groups, BIAS - stored[:, :, None]))
    values = torch.tensor(VALUES, device=groups.device)[codes]
    error = groups - torch.ldexp(values, stored[:, :, None] - BIAS)
    return stored.to(torch.uint8), codes.to(torch.uint8), error.square().sum(2)


def _nearest_code(values: Tensor) -> Tensor:
    """The e2m1 code of each value; of two as near, the one whose last bit is 0."""
    own = torch.tensor(VALUES[:8], device=values.device)
    between = (own[1:] + own[:-1]) / 2
    size = values.abs()
    # An odd code below a border gives way to the even one above it.
    up = torch.bucketize(size, between, right=True)
    down = torch.bucketize(size, between)
    code = torch.where(up % 2 == 0, up, down)
    return torch.where(values < 0, code + 8, code)
