"""Checks operators in a separate process: `python -m localllm.operators.check`.

Its stdin is a connection to its parent, and it exits when that closes. It receives a
`CheckRequest`, and sends for each case the outcome that it hopes for, "compiled" once the operator
ran, and the outcome that it found. In the end it sends "over" if no case is left, or "lost" if the
device is.
"""

import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from typing import Literal, NoReturn

import torch

from localllm.model.random_weights import RandomWeights
from localllm.model.weight_check import WeightMap
from localllm.model.weights import open_source
from localllm.operators.case import OperatorCase, Sizes
from localllm.operators.cases import operator_cases
from localllm.operators.cpu_products import make_products_reproducible
from localllm.operators.device import is_fatal, is_out_of_memory
from localllm.operators.graph_timer import GraphTimer, Timer
from localllm.operators.verdict import Outcome, State
from localllm_kernels import Ops
from localllm_kernels.compiling.choice import Choice, Piece
from localllm_kernels.compiling.tiles import TileConfig
from localllm_kernels.compiling.tunings import Tunings
from localllm_kernels.triton_ops import triton_ops

_REPEATS = 7

# What the process sends.
Event = Outcome | Literal["compiled", "over", "lost"]


@dataclass(frozen=True, slots=True)
class CheckRequest:
    """What is to be checked.

    `weights`: files whose headers are already checked, or a source of random weights; `share`: for
    a process that only compiles, its index and the number of such processes; `settled`: pieces that
    need no further check; `done`: cases that are done, by piece, name and rows.
    """

    weights: WeightMap | RandomWeights
    sizes: Sizes
    tunings: dict[str, TileConfig]
    deterministic: bool
    share: tuple[int, int] | None = None
    settled: frozenset[Piece] = frozenset()
    done: frozenset[tuple[Piece, str, int]] = frozenset()


@dataclass(frozen=True, slots=True)
class Place:
    """The device on which operators are checked. `tables`: the operators by choice, as a request
    asks for them; `timer`: makes a timer that returns the seconds of a call.
    """

    device: torch.device
    tables: Callable[[CheckRequest], Callable[[Choice], Ops]]
    timer: Callable[[], Timer]


def _on_gpu() -> Place:
    device = torch.device("cuda")

    def tables(request: CheckRequest) -> Callable[[Choice], Ops]:
        return lambda choice: triton_ops(
            "cuda",
            deterministic=request.deterministic,
            tunings=Tunings(request.tunings),
            choice=choice,
        )

    return Place(device, tables, lambda: GraphTimer(device))


def main(place: Place) -> int:
    """Check what the parent asks for; returns the exit code, 3 after a fatal error."""
    parent: Connection[Event, CheckRequest] = Connection(sys.stdin.fileno())
    request = parent.recv()
    threading.Thread(target=_end_with_parent, args=(parent,), daemon=True).start()
    make_products_reproducible()
    with torch.inference_mode():
        return _check(request, place, parent.send)


def _check(request: CheckRequest, place: Place, say: Callable[[Event], None]) -> int:
    timer = place.timer() if request.share is None else None
    for case in _cases(request, place):
        assert case.piece is not None  # as of every case of the self-check
        outcome = Outcome(case.piece, case.name, case.rows, "good")
        say(outcome)
        try:
            case.own()
            _wait(place.device)
            say("compiled")
            if timer is not None:
                outcome = _measured(case, outcome, timer)
        except Exception as error:
            why = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]:.200}"
            state: State = "unchecked" if is_out_of_memory(error) else "crashed"
            outcome = replace(outcome, state=state, why=why)
            if is_fatal(error):
                say(outcome)
                say("lost")
                return 3
        finally:
            if isinstance(timer, GraphTimer):
                timer.forget()
        say(outcome)
    say("over")
    return 0


def _cases(request: CheckRequest, place: Place) -> Iterator[OperatorCase]:
    with ExitStack() as stack:
        source = (
            request.weights
            if isinstance(request.weights, RandomWeights)
            else stack.enter_context(open_source(request.weights))
        )
        found = operator_cases(source, request.sizes, place.device, place.tables(request))
        for i, case in enumerate(found):
            is_done = (case.piece, case.name, case.rows) in request.done
            is_mine = request.share is None or i % request.share[1] == request.share[0]
            if is_mine and not is_done and case.piece not in request.settled:
                yield case


def _measured(case: OperatorCase, outcome: Outcome, timer: Timer) -> Outcome:
    """Whether the operator is right; and its shortest time and that of its alternative, measured in
    turn, since other processes may use the machine too.
    """
    away = case.distance()
    if away > 1:
        why = f"{min(away, 1e9):.3g} times as far off as rounding explains"
        outcome = replace(outcome, state="wrong", why=why)
    times = [(timer(case.own), timer(case.plain)) for _ in range(_REPEATS)]
    own_s, plain_s = (min(each) for each in zip(*times, strict=True))
    return replace(outcome, own_s=own_s, plain_s=plain_s)


def _wait(device: torch.device) -> None:
    """So that its errors are raised here."""
    if device.type == "cuda":
        torch.cuda.synchronize()


def _end_with_parent(parent: "Connection[Event, CheckRequest]") -> None:
    with suppress(EOFError, OSError):
        parent.recv()
    os._exit(1)


def end(code: int) -> NoReturn:
    """Exit at once: a thread is still reading, and a lost device would block an orderly exit."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    end(main(_on_gpu()))
