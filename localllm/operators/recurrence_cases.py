"""Recurrences and short convolutions, for a request in decode and for a prompt. See `case.py`."""

from collections.abc import Iterator

import torch
from torch import Tensor

from localllm.model.blocks.delta_net import DeltaNetSpec
from localllm.model.blocks.mamba import MambaSpec
from localllm.model.blocks.short_conv import ShortConvSpec
from localllm.operators.case import Cost, OperatorCase, Setting
from localllm_kernels import Ops
from localllm_kernels.compiling.choice import Piece
from localllm_kernels.recurrence.recurrence import Heads, RecurrenceRows, RecurrenceWeights
from localllm_kernels.recurrence.state_cache import StateCache, StateSlots

# A request in decode behind so many tokens, and rows of a prompt, of which torch takes each alone.
_START, _ROWS = 5, (1, 33)


def recurrences(on: Setting) -> Iterator[OperatorCase]:
    """Yield those of the model, with weights, inputs and states drawn at random."""
    architecture = on.sizes.architecture
    mixers: list[DeltaNetSpec | MambaSpec] = [
        *architecture.blocks_of(DeltaNetSpec),
        *architecture.blocks_of(MambaSpec),
    ]
    for rows in _ROWS:
        states = StateSlots((0,), (0, rows), (_START,), (_START,), (_START + rows,))
        for spec in mixers:
            yield _recurrence(on, spec, states)
        for conv in architecture.blocks_of(ShortConvSpec):
            yield _short_conv(on, conv, states)


def _recurrence(on: Setting, spec: DeltaNetSpec | MambaSpec, states: StateSlots) -> OperatorCase:
    heads, rows = spec.heads, states.bounds[-1]
    weights = _weights(on, heads, spec.taps)
    dtype: torch.dtype = getattr(torch, spec.state_dtype)
    matrix = _drawn(on, 1, *heads.matrix).to(dtype)
    cache = StateCache(_drawn(on, 1, spec.taps + 1, heads.row_width), spec.taps - 1, matrix)
    first, last = heads.values, heads.values + heads.conv_width
    x = on.values(rows, heads.values + heads.row_width)

    def call(ops: Ops, x: Tensor) -> Tensor:
        columns = RecurrenceRows(x[:, first:last], x[:, :first], x[:, last:])
        return ops.recurrence(columns, weights, heads, _copied(cache), states)

    moved = x.nbytes + rows * heads.values * x.itemsize + 2 * cache.num_bytes(_START)
    # Of a token: its convolution, and the matrix decayed, read by k, changed, and read by q.
    of_token = 2 * spec.taps * heads.conv_width + 7 * matrix.numel()
    name = "delta rule" if heads.is_delta else "Mamba-2"
    return on.case(Piece.RECURRENCES, name, call, (x,), Cost(moved, rows * of_token))


def _short_conv(on: Setting, spec: ShortConvSpec, states: StateSlots) -> OperatorCase:
    hidden, rows = spec.hidden_size, states.bounds[-1]
    weight = _drawn(on, spec.taps, hidden)
    cache = StateCache(_drawn(on, 1, spec.taps + 1, hidden), spec.taps - 1)
    x = on.values(rows, 3 * hidden)

    def call(ops: Ops, x: Tensor) -> Tensor:
        return ops.short_conv(x, weight, None, _copied(cache), states)

    moved = x.nbytes + rows * hidden * x.itemsize + 2 * cache.num_bytes(_START)
    cost = Cost(moved, rows * hidden * (2 * spec.taps + 2))
    return on.case(Piece.RECURRENCES, "short convolution", call, (x,), cost)


def _weights(on: Setting, heads: Heads, taps: int) -> RecurrenceWeights:
    is_delta = heads.is_delta
    return RecurrenceWeights(
        _drawn(on, taps, heads.conv_width) / 2,
        None if is_delta else _drawn(on, heads.conv_width),
        -_drawn(on, heads.num_values).abs(),
        _drawn(on, heads.num_values),
        None if is_delta else _drawn(on, heads.num_values),
        _drawn(on, heads.value_width if is_delta else heads.values),
        1e-6,
    )


def _drawn(on: Setting, *shape: int) -> Tensor:
    return torch.randn(shape, device=on.device)


def _copied(cache: StateCache) -> StateCache:
    matrix = None if cache.matrix is None else cache.matrix.clone()
    return StateCache(cache.rows.clone(), cache.num_rows, matrix)
