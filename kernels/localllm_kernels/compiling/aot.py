"""The types and constants that a kernel is compiled for ahead of time, without a GPU."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Work:
    """The work of a program in one turn of its inner loop.

    `unit`: what is counted, in the singular ("weight"); `count`: how many; `bytes_each`: bytes of
    memory per unit; `is_shared`: all threads work on each unit together, so the instructions of one
    of them are counted, not the sum over a warp.
    """

    unit: str
    count: float
    bytes_each: float
    is_shared: bool = False


@dataclass(frozen=True, slots=True)
class AotSpec:
    """One compilation of a kernel.

    `label`: distinguishes it from the kernel's other specs; `signature`: the type of each argument
    that is not a constant, in Triton's notation ("*bf16", "i32"); `constants`: the other arguments;
    `min_capability`: the first GPU that has what it needs, as 89; `max_stack`: bytes a thread may
    spill; `multiples_of_16`: arguments that are multiples of 16 in this compilation; `only`: the
    GPUs it is for, as 90; all if empty; `work`: for `machine_code`, which counts instructions.
    """

    kernel: Any
    label: str
    signature: Mapping[str, str]
    constants: Mapping[str, Any] = field(default_factory=dict)
    num_warps: int = 4
    num_stages: int = 3
    min_capability: int = 80
    max_stack: int = 0
    multiples_of_16: tuple[str, ...] = ()
    only: tuple[int, ...] = ()
    work: Work | None = None

    def runs_on(self, capability: int) -> bool:
        """Whether it is for a GPU of `capability`, as 90."""
        return capability >= self.min_capability and (not self.only or capability in self.only)
