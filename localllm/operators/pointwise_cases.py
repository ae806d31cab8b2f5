"""Operators on each row by itself: norms, gates, the choice of experts, sampling. See `case.py`."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from localllm.model.blocks.router import RouterSpec
from localllm.operators.case import Cost, OperatorCase, Setting, distance, unit_of
from localllm_kernels import Ops
from localllm_kernels.compiling.choice import Piece
from localllm_kernels.experts.route import route_reference
from localllm_kernels.pointwise.gate import GateKind, parts_of
from localllm_kernels.sampling.sample import SamplingRows, sample_reference

# Temperature, top-k, top-p and min-p of a row; see SamplingRows.
Filters = tuple[float, int, float, float]
# A greedy row, and rows with each filter and with several.
MIXED: tuple[Filters, ...] = (
    (0.0, 20, 1.0, 0.0),
    (0.625, 0, 0.95, 0.0),
    (0.75, 20, 0.95, 0.0),
    (0.875, 0, 1.0, 0.05),
    (1.0, 20, 0.95, 0.0),
    (1.125, 0, 0.95, 0.0),
    (1.25, 20, 1.0, 0.0),
    (1.375, 0, 0.95, 0.05),
)


def norms(on: Setting, rows: int, *, is_wide: bool) -> Iterator[OperatorCase]:
    """The norm, and the norm of a sum with the residual; `is_wide`: see NormSpec."""
    architecture = on.sizes.architecture
    hidden, eps = architecture.hidden_size, architecture.norm.eps
    x, residual = on.values(rows, hidden), on.values(rows, hidden)
    weight = on.norm_weight(hidden, is_wide=is_wide)
    wide = ", its weight in float32" if is_wide else ""
    yield on.case(
        Piece.NORMS,
        f"norm{wide}",
        lambda ops, x, weight: ops.rms_norm(x, weight, eps),
        (x, weight),
        Cost(2 * x.nbytes, 4 * x.numel()),
    )
    yield on.case(
        Piece.NORMS,
        f"norm of a sum{wide}",
        lambda ops, x, residual, weight: ops.add_rms_norm(x, residual, weight, eps),
        (x, residual, weight),
        Cost(4 * x.nbytes, 5 * x.numel()),
    )


def gate(on: Setting, rows: int, inner: int, kind: GateKind) -> OperatorCase:
    """The gate of a feed-forward, `inner` values wide."""
    gate_up = on.values(rows, parts_of(kind) * inner)
    return on.case(
        Piece.GATE,
        f"gate, {kind}",
        lambda ops, gate_up: ops.gate(gate_up, kind),
        (gate_up,),
        Cost(gate_up.nbytes + rows * inner * gate_up.itemsize, 5 * rows * inner),
    )


def route(on: Setting, rows: int, router: RouterSpec) -> OperatorCase:
    """The choice of experts; its factors are right only if it is."""
    drawn = [torch.rand(router.num_experts, device=on.device) for _ in range(2)]
    vectors = (
        None if name is None else values
        for name, values in zip((router.correction, router.scales), drawn, strict=True)
    )
    how, logits = router.routing(*vectors), on.values(rows, router.num_experts)

    def away() -> float:
        chosen, factors = on.own.route(logits, how)
        right, exact = route_reference(logits, how)
        if not torch.equal(chosen, right):
            return float("inf")
        return distance(factors, exact, unit_of(torch.float32))

    found = on.case(
        Piece.ROUTE,
        f"{router.top_k} of {router.num_experts} experts",
        lambda ops, logits: ops.route(logits, how),
        (logits,),
        Cost(logits.nbytes + rows * router.top_k * 8, router.top_k * logits.numel()),
    )
    return replace(found, distance=away)


def sampling(on: Setting, filters: Sequence[Filters] = MIXED) -> OperatorCase:
    """Rows with `filters`: the tokens must match, except for one near tie."""
    logits = 4 * torch.randn(len(filters), on.sizes.architecture.vocab_size, device=on.device)
    slots = torch.arange(len(filters), device=on.device)
    temperatures, top_k, top_p, min_p = torch.tensor(filters, device=on.device).unbind(-1)
    rows = SamplingRows(
        slots.int(),
        slots.clone(),
        temperatures.contiguous(),
        top_k.int(),
        top_p.contiguous(),
        min_p.contiguous(),
        (slots + 1) * 0x9E3779B97F4A7C1,
    )

    def call(ops: Ops, logits: Tensor) -> Tensor:
        return (ops.sample or sample_reference)(logits, rows)

    found = on.case(
        Piece.SAMPLING, "sampling", call, (logits,), Cost(logits.nbytes, logits.numel())
    )
    return replace(
        found,
        distance=lambda: (
            float((call(on.own, logits) != sample_reference(logits, rows)).sum()) / 1.5
        ),
    )
