"""The recurrences and short convolutions of a model as cases to check, see operators/cases.py."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from localllm.model.architecture import Architecture
from localllm.model.blocks.delta_net import DeltaNetSpec
from localllm.model.blocks.mamba import MambaSpec
from localllm.model.blocks.short_conv import ShortConvSpec
from localllm.operators.case import OperatorCase, distance, unit_of
from localllm_kernels import TORCH_OPS, Ops
from localllm_kernels.compiling.choice import Piece
from localllm_kernels.recurrence.recurrence import Heads, RecurrenceRows, RecurrenceWeights
from localllm_kernels.recurrence.state_cache import StateCache, StateSlots

# A request in decode behind so many tokens, and rows of a prompt, of which torch takes each alone.
_START, _ROWS = 5, (1, 33)


def recurrence_cases(
    architecture: Architecture, dtype: torch.dtype, device: torch.device, ops: Ops
) -> Iterator[OperatorCase]:
    """Yield each, with weights, inputs and states drawn at random."""

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, device=device)

    def case(
        name: str, x: Tensor, cache: StateCache, call: Callable[[Ops, Tensor, StateCache], Tensor]
    ) -> OperatorCase:
        def run(table: Ops, x: Tensor) -> Tensor:
            matrix = None if cache.matrix is None else cache.matrix.clone()
            return call(table, x, StateCache(cache.rows.clone(), cache.num_rows, matrix))

        return OperatorCase(
            Piece.RECURRENCES,
            name,
            len(x),
            lambda: distance(run(ops, x), run(TORCH_OPS, x.float()), unit_of(dtype)),
            lambda: run(ops, x),
            lambda: run(TORCH_OPS, x),
        )

    mixers: list[DeltaNetSpec | MambaSpec] = [
        *dict.fromkeys(architecture.blocks_of(DeltaNetSpec)),
        *dict.fromkeys(architecture.blocks_of(MambaSpec)),
    ]
    for rows in _ROWS:
        states = StateSlots((0,), (0, rows), (_START,), (_START,), (_START + rows,))
        for spec in mixers:
            heads, weights = spec.heads, _weights(spec.heads, spec.taps, drawn)
            state_dtype: torch.dtype = getattr(torch, spec.state_dtype)
            matrix = drawn(1, *heads.matrix).to(state_dtype)
            ring = drawn(1, spec.taps + 1, heads.row_width)

            def recur(
                table: Ops,
                x: Tensor,
                cache: StateCache,
                heads: Heads = heads,
                weights: RecurrenceWeights = weights,
                states: StateSlots = states,
            ) -> Tensor:
                first, last = heads.values, heads.values + heads.conv_width
                columns = RecurrenceRows(x[:, first:last], x[:, :first], x[:, last:])
                return table.recurrence(columns, weights, heads, cache, states)

            name = "delta rule" if heads.is_delta else "Mamba-2"
            x = drawn(rows, heads.values + heads.row_width).to(dtype)
            yield case(name, x, StateCache(ring, spec.taps - 1, matrix), recur)
        for conv in dict.fromkeys(architecture.blocks_of(ShortConvSpec)):
            weight = drawn(conv.taps, conv.hidden_size)
            cache = StateCache(drawn(1, conv.taps + 1, conv.hidden_size), conv.taps - 1)

            def convolve(
                table: Ops,
                x: Tensor,
                cache: StateCache,
                weight: Tensor = weight,
                states: StateSlots = states,
            ) -> Tensor:
                return table.short_conv(x, weight, None, cache, states)

            x = drawn(rows, 3 * conv.hidden_size).to(dtype)
            yield case("short convolution", x, cache, convolve)


def _weights(heads: Heads, taps: int, drawn: Callable[..., Tensor]) -> RecurrenceWeights:
    norm = drawn(heads.value_width if heads.is_delta else heads.values)
    is_delta = heads.is_delta
    return RecurrenceWeights(
        drawn(taps, heads.conv_width) / 2,
        None if is_delta else drawn(heads.conv_width),
        -drawn(heads.num_values).abs(),
        drawn(heads.num_values),
        None if is_delta else drawn(heads.num_values),
        norm,
        1e-6,
    )
