"""Compile every kernel for every target, without a GPU.

    python -m localllm_kernels.compiling.ahead_of_time [--amd]

It prints one line for each: registers, shared memory, spills. The exit code is 1 if one does not
compile, needs more shared memory than its target has, or spills. It tests neither speed nor
correctness.
"""

import argparse
import importlib
import pkgutil
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from localllm_kernels.compiling.aot import AotSpec

# KiB of shared memory that a block may use, by compute capability (CUDA C++ Programming Guide,
# "Technical Specifications per Compute Capability").
SHARED_KIB = {80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 120: 99}
PACKAGE = Path(__file__).parents[1]
AMD_TARGETS = ("gfx942", "gfx1100")


@dataclass(frozen=True, slots=True)
class Usage:
    """What a compiled kernel uses: registers per thread, bytes of shared memory and of stack."""

    registers: int
    shared: int
    stack: int


def all_specs() -> Iterator[tuple[str, AotSpec]]:
    """Every spec of every file in this package, with its folder and file as "products/gate"."""
    for module in pkgutil.walk_packages([str(PACKAGE)], f"{PACKAGE.name}."):
        if not module.ispkg and module.name != __name__:
            for spec in getattr(importlib.import_module(module.name), "AOT_SPECS", []):
                yield "/".join(module.name.split(".")[1:]), spec


def compile_spec(spec: AotSpec, target: GPUTarget) -> Any:
    """The compiled kernel. Raises: whatever Triton raises for what it cannot compile."""
    launch = spec.launch(target.arch if target.backend == "cuda" else 80)
    names = spec.kernel.arg_names
    signature = {name: launch.signature.get(name, "constexpr") for name in names}
    # Tensors begin at multiples of sixteen bytes, as torch allocates them. Sizes that are multiples
    # of sixteen are declared to the compiler, as they are when a kernel is launched.
    aligned = {
        (i,): [["tt.divisibility", 16]]
        for i, name in enumerate(names)
        if signature[name].startswith("*") or name in spec.multiples_of_16
    }
    source = ASTSource(spec.kernel, signature, dict(launch.constants), aligned)
    return triton.compile(source, target=target, options={"num_warps": launch.num_warps})


def usage_of(compiled: Any) -> Usage:
    """Read from the binary, which needs no driver."""
    tool = triton.knobs.nvidia.cuobjdump.path
    with tempfile.TemporaryDirectory() as folder:
        binary = Path(folder) / "kernel.cubin"
        binary.write_bytes(compiled.asm["cubin"])
        listing = subprocess.run(
            [tool, "-res-usage", str(binary)], capture_output=True, text=True, check=True
        ).stdout
    found = {name: int(value) for name, value in re.findall(r"\b(REG|STACK|SHARED):(\d+)", listing)}
    declared = declared_shared(found["SHARED"], compiled.metadata.target.arch)
    return Usage(found["REG"], declared + compiled.metadata.shared, found["STACK"])


def declared_shared(listed: int, arch: int) -> int:
    """What a kernel declares itself, of the bytes that the tool lists: newer tools count a KiB that
    the system takes from sm_90 on, but not for every kernel.
    """
    return max(0, listed - 1024) if arch >= 90 else listed


def check_nvidia(name: str, spec: AotSpec, capability: int) -> tuple[str, bool]:
    """A line about one kernel on one target, and whether it passes."""
    label = f"{name}.{spec.kernel.__name__} {spec.label} sm_{capability}"
    if capability < spec.min_capability:
        return f"{label}: needs sm_{spec.min_capability}", True
    try:
        usage = usage_of(compile_spec(spec, GPUTarget("cuda", capability, 32)))
    except Exception as error:  # whatever the compiler says is reported
        return f"{label}: FAILED, {_innermost(error)}", False
    limit = SHARED_KIB[capability] << 10
    line = (
        f"{label}: {usage.registers} registers, {usage.shared} bytes shared, "
        f"{usage.stack} bytes of stack"
    )
    if usage.shared > limit:
        return f"{line}: FAILED, over {limit} bytes shared", False
    if usage.stack > spec.max_stack:
        return f"{line}: FAILED, over {spec.max_stack} bytes of stack", False
    return line, True


def _innermost(error: BaseException) -> str:
    """Triton wraps an error once per call; the innermost one says what is wrong."""
    while error.__cause__ is not None:
        error = error.__cause__
    return f"{type(error).__name__}: {error}"


def check_amd(name: str, spec: AotSpec, architecture: str) -> str:
    """A line about one kernel; a failure here does not count."""
    label = f"{name}.{spec.kernel.__name__} {spec.label} {architecture}"
    lanes = 64 if architecture.startswith("gfx9") else 32
    try:
        compiled = compile_spec(spec, GPUTarget("hip", architecture, lanes))
    except Exception as error:
        return f"{label}: not compiled, {_innermost(error)}"
    return f"{label}: {compiled.metadata.shared} bytes shared"


def main() -> int:
    """Compile, print, and return the exit code."""
    parser = argparse.ArgumentParser(prog="localllm_kernels.compiling.ahead_of_time")
    parser.add_argument("--amd", action="store_true", help="AMD's GPUs instead; never fails")
    parser.add_argument("--only", default="", help="files whose name contains this")
    parser.add_argument(
        "--targets", type=int, nargs="*", choices=[*SHARED_KIB], default=[*SHARED_KIB]
    )
    args = parser.parse_args()
    chosen = [(i, spec) for i, (name, spec) in enumerate(all_specs()) if args.only in name]
    targets: list[int | str] = [*AMD_TARGETS] if args.amd else args.targets
    are_good = True
    # Each compiler uses one core. A kernel cannot be sent to another process, but its index can.
    with ProcessPoolExecutor(mp_context=get_context("spawn")) as pool:
        jobs = (
            (i, target)
            for i, spec in chosen
            for target in targets
            if isinstance(target, str) or not spec.only or target in spec.only
        )
        for line, is_good in pool.map(_check, *zip(*jobs, strict=True)):
            print(line, flush=True)
            are_good &= is_good
    return 0 if are_good else 1


def _check(index: int, target: int | str) -> tuple[str, bool]:
    name, spec = list(all_specs())[index]
    if isinstance(target, str):
        return check_amd(name, spec, target), True
    return check_nvidia(name, spec, target)


if __name__ == "__main__":
    sys.exit(main())
