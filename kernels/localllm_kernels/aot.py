"""What a kernel is compiled for ahead of time, without a GPU: types and constants."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Work:
    """What a program works off in one turn of its inner loop.

    `unit`: what is counted, in the singular ("weight"); `count`: how many; `bytes_each`: of memory
    that a unit takes; `is_shared`: all threads work at each unit together, so that what one of them
    issues is told, and not the sum of a warp's.
    """

    unit: str
    count: float
    bytes_each: float
    is_shared: bool = False


@dataclass(frozen=True, slots=True)
class AotSpec:
    """One compilation of a kernel.

    `label`: what tells it from the others of the kernel; `signature`: the type of each argument
    that is no constant, in Triton's words ("*bf16", "i32"); `constants`: the other arguments;
    `min_capability`: the first GPU that has what it needs, as 89; `max_stack`: bytes a thread may
    spill; `multiples_of_16`: arguments that are, in what it is compiled for;
    `only`: the GPUs it is for, as 90; all where there are none; `work`: for `_sass`, which counts.
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
