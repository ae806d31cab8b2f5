"""GPTQ: round one column at a time and let the remaining columns compensate for the error.

Source: Frantar et al. 2022, "GPTQ: Accurate Post-Training Quantization for Generative Pre-trained
Transformers", algorithm 1; act-order and static groups as in the authors' code.

Deviations: columns are rounded in order of decreasing input energy, but every column keeps the
group of its position (static groups), so the file needs no permutation; and the grids are fitted to
the output error beforehand (`fit_grid`).
"""

import torch
from torch import Tensor

from localllm.quantize.grid import Grid
from localllm.quantize.inverse import DampedInverse

BLOCK = 128


def round_columns(weight: Tensor, inverse: DampedInverse, grid: Grid) -> Tensor:
    """Codes, float32 [out, in], of `weight` [out, in] on `grid`; `inverse`: of the second moments
    of the inputs.
    """
    order, triangle = inverse.order, inverse.factor
    groups = (order // (weight.shape[1] // grid.scales.shape[1])).tolist()
    rounded = grid.by_column()
    work = weight[:, order].T.contiguous()  # [in, out]: a column of the weight is a row here
    codes = torch.empty_like(work)
    for start in range(0, len(work), BLOCK):
        end = min(start + BLOCK, len(work))
        block, factor = work[start:end], triangle[start:end, start:end]
        errors = torch.empty_like(block)
        for i in range(end - start):
            codes[start + i], value = rounded(groups[start + i], block[i])
            error = (block[i] - value) / factor[i, i]
            block[i:].addr_(factor[i, i:], error, alpha=-1)
            errors[i] = error
        work[end:].addmm_(triangle[start:end, end:].T, errors, alpha=-1)
    result = torch.empty_like(weight)
    result[:, order] = codes.T
    return result
