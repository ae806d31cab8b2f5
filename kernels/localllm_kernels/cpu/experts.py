"""A mixture of experts in one call of the C library; see experts.c."""

import ctypes
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from localllm_kernels.cpu import structs
from localllm_kernels.cpu.product import CProduct
from localllm_kernels.cpu.team import Team
from localllm_kernels.pointwise.gate import GATE_KINDS, GateKind


class CExperts:
    """Both products of all experts; see ExpertsProduct. `struct`: as an Experts of experts.h."""

    def __init__(
        self,
        library: ctypes.CDLL,
        team: Team,
        gate_up: Sequence[CProduct],
        down: Sequence[CProduct],
        kind: GateKind,
    ) -> None:
        self._team = team
        self.each = (*gate_up, *down)
        self._experts = (structs.Expert * len(gate_up))(
            *(
                structs.Expert(first.struct, last.struct)
                for first, last in zip(gate_up, down, strict=True)
            )
        )
        self.struct = structs.Experts(
            self._experts,
            len(gate_up),
            gate_up[0].weight.width_in,
            down[0].weight.width_in,
            GATE_KINDS.index(kind),
        )
        self._forward = library.experts_forward

    def __call__(
        self, x: Tensor, chosen: Tensor, factors: Tensor, gate: Callable[[Tensor], Tensor]
    ) -> Tensor:
        """`gate` is the library's own. Raises: MemoryError."""
        x, chosen, factors = x.contiguous(), chosen.contiguous(), factors.contiguous()
        y = torch.empty_like(x)
        routed = structs.Routed(
            x.data_ptr(),
            chosen.data_ptr(),
            factors.data_ptr(),
            y.data_ptr(),
            len(x),
            chosen.shape[1],
        )
        threads = self._team.size
        if self._forward(ctypes.addressof(self.struct), ctypes.addressof(routed), threads):
            raise MemoryError("out of memory for the rows of experts")
        return y
