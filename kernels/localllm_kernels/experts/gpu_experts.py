"""A mixture of experts on a GPU, in three or four launches and without a look at the choice, so
that steps can be captured.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from localllm_kernels.experts.product import FEW, MANY, Pairs, expert_product
from localllm_kernels.experts.stacked_weight import StackedWeight, pack_halves, takes_group
from localllm_kernels.experts.sum import expert_sum
from localllm_kernels.experts.tasks import Tasks, expert_tasks
from localllm_kernels.linears import Product
from localllm_kernels.pointwise.gate import GateKind

# Rows up to which each pair reads its expert's weight, since few of them share one.
MAX_ROWS_BY_PAIR = 8
# Rows from which tasks are long. Not of the pairs of an expert: the engine compiles ahead by rows.
MIN_ROWS_OF_MANY = 256


@dataclass(frozen=True, slots=True)
class StackedProduct:
    """A product with one weight, or with the only expert of a stack."""

    weight: StackedWeight

    def __call__(self, x: Tensor) -> Tensor:
        """`x`: [rows, in] -> [rows, out]."""
        chosen = torch.zeros(len(x), 1, dtype=torch.int32, device=x.device)
        return expert_product(x, self.weight, Pairs(chosen, tasks_of(chosen, 1)))


@dataclass(frozen=True, slots=True)
class GpuExperts:
    """Both products of all experts; see ExpertsProduct."""

    gate_up: StackedWeight
    down: StackedWeight
    kind: GateKind

    @property
    def each(self) -> tuple[Product, ...]:
        """See ExpertsProduct."""
        return ()

    def __call__(
        self, x: Tensor, chosen: Tensor, factors: Tensor, gate: Callable[[Tensor], Tensor]
    ) -> Tensor:
        """The gate is part of the first product, and `gate` is not called."""
        pairs = Pairs(chosen, tasks_of(chosen, self.gate_up.num_experts))
        inner = expert_product(x, self.gate_up, pairs, self.kind)
        return expert_sum(expert_product(inner, self.down, pairs), factors)


def tasks_of(chosen: Tensor, num_experts: int) -> Tasks | None:
    """The tasks of a choice, int32 [rows, top_k]; None if each pair is one."""
    if len(chosen) <= MAX_ROWS_BY_PAIR and num_experts > 1:
        return None
    return expert_tasks(chosen, num_experts, MANY if len(chosen) >= MIN_ROWS_OF_MANY else FEW)


class ExpertLinears:
    """Makes products whose weights can be stacked; see Linears."""

    @property
    def of_experts(self) -> "ExpertLinears":
        """See Linears."""
        return self

    def plain(self, weight: Tensor, bias: Tensor | None) -> Product:
        """See Linears."""
        width_in = weight.shape[1]
        return StackedProduct(
            StackedWeight("plain", weight[None], None, None, _one(bias), width_in)
        )

    def int4(
        self,
        codes: Tensor,
        scales: Tensor,
        zeros: Tensor | None,
        permutation: Tensor | None,
        bias: Tensor | None,
        dtype: torch.dtype,
    ) -> Product | None:
        """See Linears."""
        width_in = codes.shape[1]
        group = width_in // scales.shape[1]
        if permutation is not None or not takes_group("int4", group, width_in):
            return None
        packed = pack_halves(codes)
        zeros = None if zeros is None else zeros[None]
        return StackedProduct(
            StackedWeight("int4", packed[None], scales[None], zeros, _one(bias), width_in)
        )

    def int8(
        self, codes: Tensor, scales: Tensor, bias: Tensor | None, dtype: torch.dtype
    ) -> Product | None:
        """See Linears."""
        scales = scales.view(1, -1, 1)
        return StackedProduct(
            StackedWeight("int8", codes[None], scales, None, _one(bias), codes.shape[1])
        )

    def fp8(
        self,
        codes: Tensor,
        scales: Tensor,
        block: tuple[int, int],
        bias: Tensor | None,
        dtype: torch.dtype,
    ) -> Product | None:
        """See Linears."""
        width_out, width_in = codes.shape
        group = min(block[1], width_in)
        if width_in % group or not takes_group("fp8", group, width_in):
            return None
        of_rows = scales.repeat_interleave(min(block[0], width_out), 0)[:width_out]
        return StackedProduct(
            StackedWeight("fp8", codes[None], of_rows[None], None, _one(bias), width_in)
        )

    def mxfp4(
        self, codes: Tensor, exponents: Tensor, bias: Tensor | None, dtype: torch.dtype
    ) -> Product | None:
        """See Linears."""
        packed = pack_halves(codes)
        return StackedProduct(
            StackedWeight("mxfp4", packed[None], exponents[None], None, _one(bias), codes.shape[1])
        )

    def experts(
        self, gate_up: Sequence[Product], down: Sequence[Product], kind: GateKind
    ) -> GpuExperts | None:
        """See Linears."""
        first, last = _stack(gate_up), _stack(down)
        return None if first is None or last is None else GpuExperts(first, last, kind)


def _stack(products: Sequence[Product]) -> StackedWeight | None:
    weights = [each.weight for each in products if isinstance(each, StackedProduct)]
    return StackedWeight.stack(weights) if len(weights) == len(products) else None


def _one(bias: Tensor | None) -> Tensor | None:
    return None if bias is None else bias[None]
