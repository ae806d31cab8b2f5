"""Find the table of a trellis: the steps that lose least of normally distributed weights.

    python tools/trellis_table.py [--starts 8] [--rounds 200]

Each start orders the quantiles of the normal distribution at random. A round codes new numbers by
the best ways through the trellis, and moves each entry to the mean of those that it stands for, as
Lloyd's algorithm does; at first with noise, which leads out of poor tables.
"""

import argparse
import sys

import torch
from torch import Tensor

from localllm_kernels.trellis import BITS, STATE_BITS

_WINDOWS = 1 << BITS + STATE_BITS
_MET = 1 << BITS
_STATES = 1 << STATE_BITS
_ROWS, _LENGTH = 256, 256
# Of the greatest entry, so that pairs of products with inputs in 8 bits fit in 16 bits.
_MOST = 63


def code(numbers: Tensor, table: Tensor) -> Tensor:
    """The windows, int64 [rows, length], of `numbers` on the best ways from any state."""
    values = table.view(_STATES, _MET)  # by the state that a way leads to, and its oldest bits
    before = torch.arange(_STATES)[:, None] % (_STATES // _MET) * _MET + torch.arange(_MET)
    cost, ways = numbers.new_zeros(len(numbers), _STATES), []
    for column in numbers.T:
        cost, way = (cost[:, before] + (column[:, None, None] - values).square()).min(2)
        ways.append(way)
    state, windows = cost.argmin(1, keepdim=True), torch.empty(numbers.shape, dtype=torch.int64)
    for i in reversed(range(len(ways))):
        way = ways[i].gather(1, state)
        windows[:, i] = (state * _MET + way)[:, 0]
        state = state % (_STATES // _MET) * _MET + way
    return windows


def loss(table: Tensor, generator: torch.Generator, rows: int = 1024) -> float:
    """The mean square of what coding loses of numbers with a deviation of 1."""
    numbers = torch.randn(rows, _LENGTH, generator=generator)
    return float((numbers - table[code(numbers, table)]).square().mean())


def find(seed: int, num_rounds: int) -> Tensor:
    """A table, from one random start."""
    generator = torch.Generator().manual_seed(seed)
    shares = (torch.arange(_WINDOWS) + 0.5) / _WINDOWS
    table = torch.erfinv(2 * shares - 1)[torch.randperm(_WINDOWS, generator=generator)] * 2**0.5
    sums, counts = torch.zeros(2, _WINDOWS)
    for i in range(num_rounds):
        numbers = torch.randn(_ROWS, _LENGTH, generator=generator)
        windows = code(numbers, table).flatten()
        # In the end a mean is taken over several rounds.
        kept = 0.0 if 2 * i < num_rounds else 0.9
        sums = (kept * sums).index_add(0, windows, numbers.flatten())
        counts = (kept * counts).index_add(0, windows, torch.ones(windows.shape))
        table = torch.where(counts > 0, sums / counts.clamp(min=1e-6), table)
        if 3 * i < num_rounds:
            noise = 0.1 * (1 - 3 * i / num_rounds)
            table = table + noise * torch.randn(_WINDOWS, generator=generator)
    return table


def main() -> None:
    """Find tables from several starts, and print the best one in whole steps."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--starts", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=200)
    args = parser.parse_args()
    best, least = torch.zeros(_WINDOWS), float("inf")
    for seed in range(args.starts):
        table = find(seed, args.rounds)
        step = float(table.abs().max()) / _MOST
        whole = torch.round(table / step)
        lost = loss(whole * step, torch.Generator().manual_seed(args.starts))
        sys.stdout.write(f"start {seed}: {lost:.5f} lost, a step is {step:.4f}\n")
        sys.stdout.flush()
        if lost < least:
            best, least = whole, lost
    for row in best.int().view(-1, 16).tolist():
        sys.stdout.write(f"*({', '.join(map(str, row))}),\n")


if __name__ == "__main__":
    main()
