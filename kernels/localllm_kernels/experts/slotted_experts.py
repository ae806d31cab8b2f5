"""A mixture whose experts are in host memory, with copies of some of them in slots on the device.

The experts that a step needs are copied to slots unless they are there; the ones that were not used
for longest give way. Where a step needs more than there are slots, as prefill does, its pairs are
computed in rounds, each with the experts that it can hold: so whole layers stream through the
slots. A pair's result does not depend on its round, and a row's are added up when all are there, so
the bits are those of a mixture that is on the device as a whole.

The host looks at the choice of each layer, which is why steps with such experts are not captured.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from localllm_kernels.experts.gpu_experts import GpuExperts, tasks_of
from localllm_kernels.experts.product import Pairs, expert_product, rows_for
from localllm_kernels.experts.stacked_weight import StackedWeight
from localllm_kernels.experts.sum import expert_sum
from localllm_kernels.linears import ExpertsProduct


class SlotTable:
    """Which expert is in which slot; the one that was not used for longest is the first."""

    def __init__(self, num_slots: int) -> None:
        self._slots: dict[int, int] = {}
        self._free = list(reversed(range(num_slots)))
        self.num_slots = num_slots
        self.num_hits = self.num_misses = 0

    def rounds(self, needed: Sequence[int]) -> list[list[int]]:
        """`needed` in parts that fit into the slots, those that are there first."""
        there = [each for each in needed if each in self._slots]
        absent = [each for each in needed if each not in self._slots]
        ordered, most = [*there, *absent], self.num_slots
        return [ordered[start : start + most] for start in range(0, len(ordered), most)]

    def take(self, experts: Sequence[int]) -> tuple[dict[int, int], dict[int, int]]:
        """The slots of `experts`, and those of them whose expert has to be copied there."""
        absent = []
        for expert in experts:
            slot = self._slots.pop(expert, None)
            if slot is None:
                absent.append(expert)
            else:
                self._slots[expert] = slot  # now the last one
        missing = {}
        for expert in absent:
            if not self._free:
                self._free.append(self._slots.pop(next(iter(self._slots))))
            missing[expert] = self._slots[expert] = self._free.pop()
        self.num_hits += len(experts) - len(missing)
        self.num_misses += len(missing)
        return {expert: self._slots[expert] for expert in experts}, missing

    def forget(self) -> None:
        """Empty every slot."""
        self._slots.clear()
        self._free = list(reversed(range(self.num_slots)))


@dataclass(frozen=True, slots=True)
class SlottedExperts(ExpertsProduct):
    """Both products of all experts. `host`: all of them, in pinned memory if
    the device is a GPU; `held`: the slots.
    """

    host: GpuExperts
    held: GpuExperts
    table: SlotTable

    @classmethod
    def of(cls, host: GpuExperts, num_slots: int, device: torch.device) -> "SlottedExperts":
        """`host`: a mixture in host memory; `num_slots`: from 1 on."""
        first, last = (
            _slots_for(weight, num_slots, device) for weight in (host.gate_up, host.down)
        )
        if device.type == "cuda":
            first_host, last_host = map(_pinned, (host.gate_up, host.down))
            host = replace(host, gate_up=first_host, down=last_host)
        return cls(host, GpuExperts(first, last, host.kind), SlotTable(num_slots))

    def __call__(
        self, x: Tensor, chosen: Tensor, factors: Tensor, gate: Callable[[Tensor], Tensor]
    ) -> Tensor:
        """The gate is part of the first product, and `gate` is not called."""
        if not len(x):
            return torch.empty_like(x)
        held, num_experts = self.held, self.host.gate_up.num_experts
        tasks = tasks_of(chosen, num_experts)
        inner = x.new_empty(chosen.numel(), held.down.width_in)
        outputs = x.new_empty(chosen.numel(), held.down.width_out)
        rows = rows_for(held.gate_up, x)
        for part in self.table.rounds(sorted(set(chosen.flatten().tolist()))):
            slots, missing = self.table.take(part)
            try:
                for expert, slot in missing.items():
                    self._copy(expert, slot)
            except BaseException:
                self.table.forget()
                raise
            numbers = [slots.get(expert, -1) for expert in range(num_experts)]
            pairs = Pairs(chosen, tasks, torch.tensor(numbers, dtype=torch.int32).to(x.device))
            expert_product(rows, held.gate_up, pairs, held.kind, inner)
            expert_product(rows_for(held.down, inner), held.down, pairs, None, outputs)
        return expert_sum(outputs, factors)

    def _copy(self, expert: int, slot: int) -> None:
        """In the order of the launches, so that whoever reads the slot is done with it."""
        held = *self.held.gate_up.tensors, *self.held.down.tensors
        host = *self.host.gate_up.tensors, *self.host.down.tensors
        for target, source in zip(held, host, strict=True):
            target[slot].copy_(source[expert], non_blocking=True)


def _slots_for(weight: StackedWeight, count: int, device: torch.device) -> StackedWeight:
    slots = weight.mapped(lambda each: each.new_empty(count, *each.shape[1:], device=device))
    return slots if slots.mixing is None else replace(slots, mixing=slots.mixing.to(device))


def _pinned(weight: StackedWeight) -> StackedWeight:
    return weight.mapped(lambda each: each.pin_memory())
