"""AWQ: scale up the input channels that matter before rounding, and undo it one operation earlier.

Source: Lin et al. 2023, "AWQ: Activation-aware Weight Quantization for LLM Compression and
Acceleration", section 3.2 (scales s = activation magnitude ^ ratio, the ratio found by search),
and the authors' code (the weights' magnitude in the denominator).

Deviations: The search minimises the output error of the linears that read the input, computed from
the inputs' second moments and not from samples of inputs. It rounds to the grids that are used
afterwards, symmetric or not. Where key/value heads are shared, the heads of a group share the
scales of the attention's output; the authors' code leaves those scales out.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from localllm.quantize.grid import GridKind, fit_grid

NUM_RATIOS = 20
# Outputs whose error the search computes, spread over all: scales belong to inputs, so these tell
# as much as all do, in a seventh of the time.
NUM_OUTPUTS = 256


def search_scales(
    weight: Tensor,
    hessian: Tensor,
    magnitudes: Tensor,
    *,
    kind: GridKind,
    tie: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """Scales float32 [in] for the input of `weight` [out, in]; all 1 if none reduces the error.

    `hessian`: [in, in], second moments of the inputs; `magnitudes`: [in], their mean absolute
    values; `tie` makes the scales equal that have to be equal.
    """
    grouped = weight.abs().view(weight.shape[0], -1, kind.group_size)
    relative = grouped / grouped.amax(-1, keepdim=True).clamp(min=1e-12)
    weight_magnitudes = relative.view_as(weight).mean(0)
    best = torch.ones_like(magnitudes)
    if len(weight) > NUM_OUTPUTS:
        # At no whole distance from each other, which would take the same rows of every head.
        rows = torch.linspace(0, len(weight) - 1, NUM_OUTPUTS, device=weight.device)
        weight = weight[rows.long()]
    least = output_error(weight, best, hessian, kind)
    for uses_weights in (True, False):
        for step in range(1, NUM_RATIOS):
            ratio = step / NUM_RATIOS
            scales = magnitudes.clamp(min=1e-12) ** ratio
            if uses_weights:
                scales = scales / (weight_magnitudes.clamp(min=1e-6) ** (1 - ratio))
            scales = normalised(scales if tie is None else tie(scales))
            error = output_error(weight, scales, hessian, kind)
            if error < least:
                best, least = scales, error
    return best


def normalised(scales: Tensor) -> Tensor:
    """`scales` with their extremes balanced around 1, and none too small to divide by."""
    scales = scales.clamp(min=1e-4)
    return scales / (scales.max() * scales.min()).sqrt()


def output_error(weight: Tensor, scales: Tensor, hessian: Tensor, kind: GridKind) -> float:
    """Squared output error of `weight` [out, in] rounded under `scales`, a mean over the inputs."""
    scaled = weight * scales
    grid = fit_grid(scaled, kind)
    error = weight - grid.values(grid.round(scaled)) / scales
    return float(((error @ hessian) * error).sum())
