"""The best ways through the states of a trellis, for rounding weights to it.

A way's cost is the sum of the squares of its errors. Each error changes what the weights ahead
should be, so every way has its own ones: per-survivor processing (Raheli et al. 1995) in the
algorithm of Viterbi (1967).
"""

import torch
from torch import Tensor

from localllm_kernels.trellis import BITS, STATE_BITS, TABLE

STATES = 1 << STATE_BITS
# Ways that meet in a state: from those that differ in the oldest bits.
MET = 1 << BITS
MOST_COLUMNS = 64


def steps_by_way() -> Tensor:
    """The steps of the table, float32 [ways that meet, the state that they lead to]."""
    return torch.tensor(TABLE, dtype=torch.float32).view(STATES, MET).T.contiguous()


def best_ways_reference(
    work: Tensor, factor: Tensor, states: Tensor, kept: int
) -> tuple[Tensor, Tensor]:
    """The ways with the least cost through the columns of `work`, float32 [rows, columns] in steps.

    `factor`: float32 [columns, columns]; an error at i, over factor[i, i], changes what is wanted
    at j by -error · factor[i, j]. `states`: uint8 [rows], before the first column; afterwards
    before the first that is not `kept`. -> windows, uint8, and errors, float32, of the first `kept`
    columns: [rows, kept]. At most MOST_COLUMNS columns.
    """
    rows, columns = work.shape
    device, every = work.device, torch.arange(STATES, device=work.device)
    table = steps_by_way().to(device)
    # Of all ways that lead to a state: the state before.
    before = every[:, None] % 2 * MET + torch.arange(MET, device=device)
    ahead = work[:, None].repeat(1, STATES, 1)
    cost = torch.where(every == states[:, None], 0.0, torch.inf)
    errors, came_from = [], []
    for i in range(columns):
        lost = (ahead[:, before, i] - table.T) / factor[i, i]
        cost, way = (cost[:, before] + lost.square()).min(2)
        error = lost.gather(2, way[:, :, None])[:, :, 0]
        source = way + every % 2 * MET
        ahead = ahead.gather(1, source[:, :, None].expand(-1, -1, columns))
        ahead -= error[:, :, None] * factor[i]
        errors.append(error)
        came_from.append(source)
    found = torch.empty(rows, kept, dtype=torch.uint8, device=device), work.new_empty(rows, kept)
    state = cost.argmin(1, keepdim=True)
    for i in reversed(range(columns)):
        source = came_from[i].gather(1, state)
        if i < kept:
            if i == kept - 1:
                states[:] = state[:, 0]
            found[0][:, i] = (state >> 1 << STATE_BITS | source)[:, 0]
            found[1][:, i] = errors[i].gather(1, state)[:, 0]
        state = source
    return found
