"""A weight rounded as a recipe says, with and without regard to its inputs."""

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from localllm.model.layer import LayerPlan
from localllm.model.packed.fp8 import Fp8Weight
from localllm.model.packed.int8 import Int8Weight
from localllm.model.packed.weight import PackedWeight
from localllm.quantize.gptq import round_columns
from localllm.quantize.grid import fit_grid, relative_error
from localllm.quantize.inverse import DampedInverse
from localllm.quantize.quantized_layer import QuantizedLayer
from localllm.quantize.recipe import FP8_BLOCK, Recipe
from localllm.quantize.trellis import round_trellis
from localllm_kernels import TORCH_OPS, Ops

_MAX_FP8 = 448.0  # the largest e4m3 value


def round_weight(weight: Tensor, recipe: Recipe, ops: Ops = TORCH_OPS) -> PackedWeight:
    """`weight`, float32 [out, in], rounded to what the recipe's method writes."""
    if recipe.method == "int8":
        return Int8Weight.rounded(weight)
    if recipe.method == "fp8":
        block = FP8_BLOCK if recipe.file_format == "fp8" else (1, weight.shape[1])
        return round_fp8(weight, block)
    if recipe.method == "trellis":
        return round_trellis(weight, ops=ops)
    grid = fit_grid(weight, recipe.grids)
    return grid.weight(grid.round(weight))


def round_towards(
    weight: Tensor, recipe: Recipe, hessian: Tensor, inverse: DampedInverse | None, ops: Ops
) -> PackedWeight:
    """The same with the least error of its outputs; `hessian`: the second moments of its inputs,
    `inverse`: theirs, None: errors are not fed back.
    """
    if recipe.method == "trellis":
        return round_trellis(weight, hessian, ops)
    grid = fit_grid(weight, recipe.grids, hessian)
    codes = grid.round(weight) if inverse is None else round_columns(weight, inverse, grid)
    return grid.weight(codes)


def round_layer(
    tensors: Mapping[str, Tensor], plan: LayerPlan, recipe: Recipe, ops: Ops
) -> QuantizedLayer:
    """Quantize a layer, float32 tensors by name within it, without regard to its inputs.

    Errors are those of the weights: squared difference over squared values.
    """
    plain, weights, errors = dict(tensors), {}, {}
    for linear in plan.quantized():
        weight = plain.pop(f"{linear}.weight")
        weights[linear] = round_weight(weight, recipe, ops)
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
