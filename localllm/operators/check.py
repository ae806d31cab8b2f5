"""Checks operators in a separate process: `python -m localllm.operators.check`.

It reads what to check from stdin (a pickled `CheckRequest`, from its own parent), and exits when
stdin closes. It reports each event as a line of JSON on stdout:

    {"event": "begins", "piece", "name", "rows"}
    {"event": "compiled"}                             the operator ran once
    {"event": "done", "distance", "own_s", "plain_s"}
    {"event": "failed", "why", "is_memory", "is_fatal"}  out of memory; the device is lost
    {"event": "over"}                                 no case is left
"""

import json
import os
import pickle
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol

import torch

from localllm.model.random_weights import RandomWeights
from localllm.model.weight_check import WeightMap
from localllm.model.weights import open_source
from localllm.operators.case import OperatorCase, Sizes
from localllm.operators.cases import operator_cases
from localllm.operators.cpu_products import make_products_reproducible
from localllm.operators.device import is_fatal, is_out_of_memory
from localllm.operators.graph_timer import GraphTimer, Timer
from localllm_kernels import Ops, triton_ops
from localllm_kernels.compiling.choice import Choice, Piece
from localllm_kernels.compiling.tiles import TileConfig
from localllm_kernels.compiling.tunings import Tunings

_REPEATS = 7


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


class Place(Protocol):
    """The device on which operators are checked, and the operators."""

    @property
    def device(self) -> torch.device:
        """The device of inputs and weights."""

    def tables(self, request: CheckRequest) -> Callable[[Choice], Ops]:
        """The operators by choice."""

    def timer(self) -> Timer:
        """A timer that returns the seconds of a call."""


class _Gpu:
    device = torch.device("cuda")

    def tables(self, request: CheckRequest) -> Callable[[Choice], Ops]:
        """See Place."""

        def table(choice: Choice) -> Ops:
            return triton_ops(
                "cuda",
                deterministic=request.deterministic,
                tunings=Tunings(request.tunings),
                choice=choice,
            )

        return table

    def timer(self) -> Timer:
        """See Place."""
        return GraphTimer(self.device)


def main(place: Place) -> int:
    """Check what stdin asks for; returns the exit code, 3 after a fatal error."""
    request: CheckRequest = pickle.load(sys.stdin.buffer)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    make_products_reproducible()
    with torch.inference_mode():
        return _check(request, place)


def _check(request: CheckRequest, place: Place) -> int:
    timer = place.timer() if request.share is None else None
    for case in _cases(request, place):
        _say("begins", piece=case.piece, name=case.name, rows=case.rows)
        try:
            case.own()
            _wait(place.device)
            _say("compiled")
            if timer is None:
                _say("done", distance=0.0, own_s=0.0, plain_s=0.0)
                continue
            away = case.distance()
            own_s, plain_s = _times(case, timer)
            _say("done", distance=min(away, 1e9), own_s=own_s, plain_s=plain_s)
        except Exception as error:
            why = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]:.200}"
            lost = is_fatal(error)
            _say("failed", why=why, is_memory=is_out_of_memory(error), is_fatal=lost)
            if lost:
                return 3
        finally:
            if isinstance(timer, GraphTimer):
                timer.forget()
    _say("over")
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


def _times(case: OperatorCase, timer: Timer) -> tuple[float, float]:
    """The shortest times of the operator and its alternative, measured in turn, since other
    processes may use the machine too.
    """
    own_s, plain_s = [], []
    for _ in range(_REPEATS):
        own_s.append(timer(case.own))
        plain_s.append(timer(case.plain))
    return min(own_s), min(plain_s)


def _wait(device: torch.device) -> None:
    """Wait until the device is done, so that its errors are raised here."""
    if device.type == "cuda":
        torch.cuda.synchronize()


def _say(event: str, **more: Any) -> None:
    sys.stdout.write(json.dumps({"event": event, **more}) + "\n")
    sys.stdout.flush()


def _end_with_parent() -> None:
    while os.read(sys.stdin.fileno(), 1 << 16):
        pass
    os._exit(1)


def end(code: int) -> NoReturn:
    """Exit at once: a thread is still reading, and a lost device would block an orderly exit."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    end(main(_Gpu()))
