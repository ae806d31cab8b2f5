"""The embedding and the head, quantized. Each row is a token's, and rows are many: a few thousand
are in work at a time.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

from localllm.model.packed.int8 import Int8Weight
from localllm.model.packed.weight import PackedWeight
from localllm.quantize.gptq import round_columns
from localllm.quantize.grid import fit_grid
from localllm.quantize.inverse import DampedInverse
from localllm.quantize.recipe import EndFormat

_ROWS = 8192


def round_end(weight: Tensor, end: EndFormat, hessian: Tensor | None) -> PackedWeight:
    """`weight`, [vocab_size, hidden] in any float dtype, in a format; `hessian`: the second moments
    of a head's inputs, float32 [hidden, hidden], by which GPTQ rounds to 4 bits. Without them, and
    to 8 bits, each value is rounded to the nearest.
    """
    inverse = None if hessian is None else DampedInverse.of(hessian.clone())
    parts: list[PackedWeight] = []
    for rows in torch.split(weight, _ROWS):
        rows = rows.float() if hessian is None else rows.to(hessian)
        if end.group_size is None:
            parts.append(Int8Weight.rounded(rows))
            continue
        grid = fit_grid(rows, end.group_size, symmetric=True, hessian=hessian)
        codes = grid.round(rows) if inverse is None else round_columns(rows, inverse, grid)
        parts.append(grid.weight(codes))
    return type(parts[0]).stack(parts)


def mean_moments(inputs: Iterable[Tensor]) -> Tensor:
    """The mean of x·xᵀ over the rows of all `inputs`, [num_rows, width] each: [width, width]."""
    total, count = None, 0
    for x in inputs:
        x = x.float()
        total = x.T @ x if total is None else total.addmm_(x.T, x)
        count += len(x)
    assert total is not None
    return total / count
