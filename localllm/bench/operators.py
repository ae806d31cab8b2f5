"""Operators on their own, at the sizes of a model: time, rate, share of the limit, and speed
relative to torch's. `--ops` measures those that the model computes with.
"""

import statistics
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from math import prod

import torch

from localllm.bench.results import ListedSuite, Result, Spread
from localllm.bench.subject import Subject
from localllm.cost.rates import Rates, Roofline, measure_rates, timed
from localllm.model.blocks.attention import AttentionSpec
from localllm.model.blocks.gated_mlp import GatedMLPSpec
from localllm.operators.attention_cases import attention, rotation
from localllm.operators.case import OperatorCase, Setting, Sizes
from localllm.operators.graph_timer import GraphTimer, Timer
from localllm.operators.pointwise_cases import gate, norms
from localllm.operators.product_cases import PLAIN, drawn_product
from localllm_kernels.compiling.choice import Piece

ROWS = (1, 16, 512)
CONTEXT = 1024
BLOCK_SIZE = 16


@dataclass(frozen=True, slots=True)
class Line:
    """A line of the report: an operator on one set of inputs."""

    name: str
    conditions: dict[str, int]
    case: OperatorCase


@dataclass(frozen=True, slots=True)
class Clock:
    """How operators are timed: how often, and this machine's rates, None to measure them."""

    timer: Timer
    repeats: int
    limits: Rates | None = None


class OperatorSuite(ListedSuite):
    """Times each line's operator, alternating with its alternative."""

    def __init__(self, lines: Iterable[Line], device: torch.device, clock: Clock) -> None:
        self._lines, self._device = lines, device
        self._clock, self._limits = clock, clock.limits
        super().__init__()

    @property
    def limits(self) -> Rates | None:
        """The rates that are given, or measured before the first line."""
        return self._limits

    @torch.inference_mode()
    def run(self, progress: Callable[[str], None]) -> None:
        if self._limits is None:
            self._limits = measure_rates(self._device)
        for line in self._lines:
            where = ", ".join(f"{name} {value}" for name, value in line.conditions.items())
            progress(f"{line.name}, {where}")
            self._results.append(self._measure(line, self._limits))
            if isinstance(self._clock.timer, GraphTimer):
                self._clock.timer.forget()

    def _measure(self, line: Line, limits: Rates) -> Result:
        case, timer = line.case, self._clock.timer
        timer(case.own), timer(case.plain)
        own_s, plain_s = [], []
        for _ in range(10 * self._clock.repeats):
            own_s.append(timer(case.own))
            plain_s.append(timer(case.plain))
        seconds, cost = statistics.median(own_s), case.cost
        roofline = Roofline.of(cost.num_bytes, cost.operations, limits, cost.arithmetic)
        times = Spread.of([plain / own for own, plain in zip(own_s, plain_s, strict=True)])
        return Result(
            "operators",
            line.name,
            line.conditions,
            {
                "seconds": Spread.of(own_s),
                "bytes_per_s": cost.num_bytes / seconds,
                "operations_per_s": cost.operations / seconds,
                "share_of_limit": roofline.seconds / seconds,
                "bound": roofline.bound,
                "times_torch": times,
            },
            f"{roofline.verdict(seconds)}; {times.median:.1f} times torch's speed",
        )


def model_suite(subject: Subject, repeats: int) -> OperatorSuite:
    """The operators in a subject's table."""
    decoder, device = subject.decoder, subject.device
    sizes = Sizes(subject.architecture, decoder.dtype, decoder.dtype, BLOCK_SIZE)
    lines = model_lines(Setting(sizes, device, decoder.model.ops))
    return OperatorSuite(lines, device, Clock(partial(timed, device=device), repeats))


def model_lines(on: Setting) -> Iterator[Line]:
    """Every operator, for one row, a batch and a prompt."""
    architecture = on.sizes.architecture
    for rows in ROWS:
        norm, norm_of_sum = norms(on, rows, is_wide=False)
        yield Line("rms_norm", {"rows": rows}, norm)
        yield Line("add_rms_norm", {"rows": rows}, norm_of_sum)
        for mlp in architecture.blocks_of(GatedMLPSpec):
            case = gate(on, rows, mlp.inner_size, mlp.gate)
            yield Line(case.name, {"rows": rows}, case)
        for spec in architecture.rotations():
            name = "rotate_and_store" if spec.reads is None else "rotate"
            yield Line(name, {"rows": rows}, rotation(on, rows, spec))
        seqs = 1 if rows == ROWS[-1] else rows
        for spec in whole_attentions(on):
            case = attention(on, Piece.FEW_QUERIES, seqs * [(CONTEXT, rows // seqs)], spec)
            where = {"rows": rows, "requests": seqs, "context": CONTEXT}
            yield Line("paged_attention", where, case)
    # The largest product of a layer with every kind of weights, against torch's plain product.
    weights = [shape for _, shape, _ in architecture.layers[0].linears()]
    out, width = max(weights, key=prod)
    for rows in ROWS:
        for kind in (PLAIN, "int4", "int8", "fp8"):
            case = drawn_product(on, kind, (out, width)).case(on, rows)
            yield Line(f"linear {kind}", {"rows": rows, "out": out, "in": width}, case)


def whole_attentions(on: Setting) -> list[AttentionSpec]:
    """The distinct attentions of the model, without their windows."""
    found = (replace(each, window=None) for each in on.sizes.architecture.attentions())
    return list(dict.fromkeys(found))
