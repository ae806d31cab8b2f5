"""The embedding and the head, quantized. Each row is a token's, and rows are many: a few thousand
are in work at a time.
"""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from localllm.model.packed.int4 import Int4Weight
from localllm.model.packed.int8 import Int8Weight
from localllm.quantize.gptq import round_columns
from localllm.quantize.grid import fit_grid
from localllm.quantize.integer_grid import IntegerGrids
from localllm.quantize.inverse import DampedInverse

_ROWS = 8192


def round_to_int8(weight: Tensor) -> Int8Weight:
    """`weight`, [vocab_size, hidden] in any float dtype, rounded to the nearest."""
    return Int8Weight.stack(
        [Int8Weight.rounded(rows.float()) for rows in torch.split(weight, _ROWS)]
    )


def round_to_int4(
    weight: Tensor, group_size: int, hessian: Tensor | None, progress: Callable[[int], None]
) -> Int4Weight:
    """`weight`, [vocab_size, hidden] in any float dtype, in symmetric groups: by GPTQ with
    `hessian`, the second moments of its inputs, float32 [hidden, hidden], or to the nearest.
    `progress`: told how many rows are done.
    """
    inverse = None if hessian is None else DampedInverse.of(hessian.clone())
    kind, parts = IntegerGrids(group_size, symmetric=True), list[Int4Weight]()
    for stored in torch.split(weight, _ROWS):
        rows = stored.float() if hessian is None else stored.to(hessian)
        grid = fit_grid(rows, kind, hessian)
        codes = grid.round(rows) if inverse is None else round_columns(rows, inverse, grid)
        part = grid.weight(codes)
        assert isinstance(part, Int4Weight)
        parts.append(part)
        progress(sum(len(part.codes) for part in parts))
    return Int4Weight.stack(parts)


def mean_moments(inputs: Iterable[Tensor]) -> Tensor:
    """The mean of x·xᵀ over the rows of all `inputs`, [num_rows, width] each: [width, width]."""
    total, count = None, 0
    for x in inputs:
        x = x.float()
        total = x.T @ x if total is None else total.addmm_(x.T, x)
        count += len(x)
    assert total is not None
    return total / count
