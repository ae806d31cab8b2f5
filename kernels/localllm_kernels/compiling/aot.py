"""The launches that kernels are compiled for ahead of time, without a GPU."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor
from triton.runtime.jit import JITFunction

from localllm_kernels.compiling.launch import Workspace

# As Triton calls the types of what pointers point to.
_TYPES = {
    torch.bfloat16: "bf16",
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.float8_e4m3fn: "fp8e4nv",
    torch.int8: "i8",
    torch.int16: "i16",
    torch.uint8: "u8",
    torch.int32: "i32",
    torch.int64: "i64",
}
H100_PROCESSORS = 132


@dataclass(frozen=True, slots=True)
class Work:
    """The work of a program in one turn of its inner loop.

    `unit`: what is counted, in the singular ("weight"); `count`: how many, multiplied by the
    constants of the kernel in `times`; `bytes_each`: bytes of memory per unit; `is_shared`: all
    threads work on each unit together, so the instructions of one of them are counted, not the sum
    over a warp.
    """

    unit: str
    count: float
    bytes_each: float
    is_shared: bool = False
    times: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Launch:
    """What a launch asks the compiler for: the types of arguments in Triton's notation ("*bf16",
    "i32"), the constants, and the warps of a program.
    """

    signature: Mapping[str, str]
    constants: Mapping[str, Any]
    num_warps: int


@dataclass(frozen=True, slots=True)
class AotSpec:
    """One compilation of a kernel.

    `label`: distinguishes it from the kernel's other specs; `call`: calls the launcher, with a
    workspace of the GPU to compile for, and tensors in host memory; `min_capability`: the first GPU
    that has what it needs, as 89; `max_stack`: bytes a thread may spill; `multiples_of_16`:
    arguments that are multiples of 16 in this compilation; `only`: the GPUs it is for, as 90; all
    if empty; `at`: which of the kernel's launches it is, the last one if not said; `work`: for
    `machine_code`, which counts instructions.
    """

    kernel: Any
    label: str
    call: Callable[[Workspace], object]
    min_capability: int = 80
    max_stack: int = 0
    multiples_of_16: tuple[str, ...] = ()
    only: tuple[int, ...] = ()
    at: int = -1
    work: Work | None = None

    def runs_on(self, capability: int) -> bool:
        """Whether it is for a GPU of `capability`, as 90."""
        return capability >= self.min_capability and (not self.only or capability in self.only)

    def launch(self, capability: int) -> Launch:
        """The kernel's launch on such a GPU, which is noted and not made."""
        workspace = Workspace(torch.device("cpu"))
        workspace.capability, workspace.num_processors = capability, H100_PROCESSORS
        with _noting() as noted:
            self.call(workspace)
        given = [arguments for kernel, arguments in noted if kernel is self.kernel][self.at]
        passed = {name: given[name] for name in self.kernel.arg_names}
        return Launch(
            {name: _type_of(value) for name, value in passed.items() if not name.isupper()},
            {name: value for name, value in passed.items() if name.isupper()},
            given.get("num_warps", 4),
        )

    def count(self, constants: Mapping[str, Any]) -> float:
        """The units of its work in a turn."""
        assert self.work is not None
        times: int = prod(constants[name] for name in self.work.times)
        return self.work.count * times


@contextmanager
def _noting() -> Iterator[list[tuple[Any, dict[str, Any]]]]:
    """Collects kernels and arguments of the launches of a `with` block, none of which is made."""
    noted: list[tuple[Any, dict[str, Any]]] = []

    def note(kernel: Any, *given: Any, **named: Any) -> None:
        noted.append((kernel, dict(zip(kernel.arg_names, given, strict=False)) | named))

    run = JITFunction.run
    JITFunction.run = note
    try:
        yield noted
    finally:
        JITFunction.run = run


def _type_of(value: Tensor | float) -> str:
    if isinstance(value, Tensor):
        return f"*{_TYPES[value.dtype]}"
    return "fp32" if isinstance(value, float) else "i32"
