"""A mixture of experts on a GPU, in three or four launches, two more on a trellis, and without a
look at the choice, so that steps can be captured.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from localllm_kernels.coded_blocks import BLOCK_TYPES, arranged, as_coded, joined
from localllm_kernels.experts.product import FEW, MANY, Pairs, expert_product, rows_for
from localllm_kernels.experts.stacked_weight import (
    FOUR_BITS,
    StackedWeight,
    can_stack,
    pack_halves,
)
from localllm_kernels.experts.sum import expert_sum
from localllm_kernels.experts.tasks import Tasks, expert_tasks
from localllm_kernels.linears import BlocksWeight, CodedWeight, ExpertsProduct, Linears, Product
from localllm_kernels.pointwise.gate import GateKind
from localllm_kernels.trellis import Mixing

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
class GpuExperts(ExpertsProduct):
    """Both products of all experts, in stacked weights."""

    gate_up: StackedWeight
    down: StackedWeight
    kind: GateKind

    def __call__(
        self, x: Tensor, chosen: Tensor, factors: Tensor, gate: Callable[[Tensor], Tensor]
    ) -> Tensor:
        """The gate is part of the first product, and `gate` is not called."""
        pairs = Pairs(chosen, tasks_of(chosen, self.gate_up.num_experts))
        inner = expert_product(rows_for(self.gate_up, x), self.gate_up, pairs, self.kind)
        return expert_sum(expert_product(rows_for(self.down, inner), self.down, pairs), factors)


def tasks_of(chosen: Tensor, num_experts: int) -> Tasks | None:
    """The tasks of a choice, int32 [rows, top_k]; None if each pair is one."""
    if len(chosen) <= MAX_ROWS_BY_PAIR and num_experts > 1:
        return None
    return expert_tasks(chosen, num_experts, MANY if len(chosen) >= MIN_ROWS_OF_MANY else FEW)


class ExpertLinears(Linears):
    """Makes products whose weights can be stacked."""

    def plain(self, weight: Tensor, bias: Tensor | None) -> Product:
        width_in = weight.shape[1]
        return StackedProduct(
            StackedWeight("plain", weight[None], None, None, _one(bias), width_in)
        )

    def packed(
        self, weight: CodedWeight | BlocksWeight, bias: Tensor | None, dtype: torch.dtype
    ) -> Product | None:
        if isinstance(weight, BlocksWeight):
            coded = as_coded(weight)
            return self._blocks(weight, bias) if coded is None else self.packed(coded, bias, dtype)
        kind, layout = weight.kind, weight.layout
        if weight.permutation is not None or not can_stack(layout):
            return None
        width_out, width_in = len(weight.codes), layout.width_in
        if kind == "trellis3":
            codes, factors = F.pad(weight.codes, (1, 0)), weight.scales.flatten().float()
            mixing = Mixing.of(width_in, dtype, codes.device)
            return StackedProduct(
                StackedWeight(
                    *(kind, codes[None], None, None, _one(bias), width_in),
                    factors=factors[None],
                    mixing=mixing,
                )
            )
        codes, scales = weight.codes, weight.scales
        if kind in FOUR_BITS:
            codes = pack_halves(codes)
        if weight.block is not None:
            scales = scales.repeat_interleave(min(weight.block[0], width_out), 0)[:width_out]
        if kind == "nvfp4":
            scales = scales.view(torch.uint8)
        tensors = codes[None], scales[None], _one(weight.zeros), _one(bias)
        stacked = StackedWeight(kind, *tensors, width_in, factors=_one(weight.factors))
        return StackedProduct(stacked)

    def _blocks(self, weight: BlocksWeight, bias: Tensor | None) -> Product | None:
        """Of one type, as the file has them."""
        part, *others = joined(weight.parts)
        if others or part.type not in BLOCK_TYPES:
            return None
        if weight.order is not None:
            part = replace(part, codes=part.codes[weight.order])
        codes = arranged(part).codes[None]
        return StackedProduct(
            StackedWeight("blocks", codes, None, None, _one(bias), weight.width_in, part.type)
        )

    def experts(
        self, gate_up: Sequence[Product], down: Sequence[Product], kind: GateKind
    ) -> GpuExperts | None:
        first, last = _stack(gate_up), _stack(down)
        return None if first is None or last is None else GpuExperts(first, last, kind)


def _stack(products: Sequence[Product]) -> StackedWeight | None:
    weights = [each.weight for each in products if isinstance(each, StackedProduct)]
    return StackedWeight.stack(weights) if len(weights) == len(products) else None


def _one(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor[None]
