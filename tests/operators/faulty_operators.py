"""The process that checks operators, as tests start it: torch's on the CPU, the gate at fault.

    python faulty_operators.py FAULT

FAULT: none, wrong, crashing, raising, memory, hanging, slow.
"""

import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from localllm.operators.check import CheckRequest, Place, end, main
from localllm.operators.graph_timer import Timer
from localllm_kernels import TORCH_OPS, Ops
from localllm_kernels.compiling.choice import Choice
from localllm_kernels.pointwise.gate import GateKind


class Faulty:
    """Its clock goes on by a microsecond a call, and by a thousand in a gate that is slow."""

    def __init__(self, fault: str) -> None:
        self._fault, self._clock_s = fault, 0.0

    def tables(self, request: CheckRequest) -> Callable[[Choice], Ops]:
        return lambda choice: replace(TORCH_OPS, gate=self._gate, choice=choice)

    def timer(self) -> Timer:
        def seconds(call: Callable[[], object]) -> float:
            began_s = self._clock_s
            call()
            return 1e-6 + self._clock_s - began_s

        return seconds

    def _gate(self, gate_up: Tensor, kind: GateKind) -> Tensor:
        match self._fault:
            case "crashing":
                os.kill(os.getpid(), signal.SIGSEGV)
            case "raising":
                raise RuntimeError("CUDA error: an illegal memory access was encountered")
            case "memory":
                raise RuntimeError("CUDA out of memory. Tried to allocate 20.00 GiB")
            case "hanging":
                time.sleep(600)
            case "slow":
                self._clock_s += 1e-3
        found = TORCH_OPS.gate(gate_up, kind)
        if self._fault == "wrong":
            found[0, 0] += 0.5
        return found


if __name__ == "__main__":
    faulty = Faulty(sys.argv[1])
    end(main(Place(torch.device("cpu"), faulty.tables, faulty.timer)))
