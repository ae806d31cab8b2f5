"""Count the instructions that a GPU issues for a kernel, from its machine code, without a GPU.

    python -m localllm_kernels.compiling.machine_code [--targets 80 89 90] [--only NAME] [--check]

Compiles each kernel that states the work of its inner loop (`AotSpec.work`), disassembles it, and
counts in the largest of its innermost loops. The floors are those of a processor that never waits:

    by issue    the busiest of its pipes, per unit: a weight, a key, a logit
    by memory   the bytes of a unit at the bandwidth of the card

A real run is slower than the larger of both. With `--check` the exit code is 1 if a kernel exceeds
its figure in `figures.py`.
"""

import argparse
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget

from localllm_kernels.compiling.ahead_of_time import SHARED_KIB, all_specs, compile_spec, usage_of
from localllm_kernels.compiling.aot import AotSpec, Work
from localllm_kernels.compiling.figures import figure_of

_LINE = re.compile(r"/\*([0-9a-f]{4,})\*/\s+(?:@(!?U?P\w+)\s+)?([A-Z][\w.]*)\s*([^;]*);")
_LANES = 32
# Results per clock of each pipe of a processor: CUDA C++ Programming Guide, "Throughput of Native
# Arithmetic Instructions". A warp's instruction gives 32 of them, and four are issued per clock.
_ISSUE = 128
_FMA = {80: 64, 86: 128, 89: 128, 90: 128, 100: 128, 120: 128}
_ALU, _SPECIAL, _MEMORY = 64, 16, 32
_ON_FMA = ("FADD", "FMUL", "FFMA", "IMAD", "HFMA2", "HADD2", "HMUL2", "VIADD")
_ON_SPECIAL = ("MUFU", "I2F", "F2I", "F2F", "FRND", "POPC", "FLO", "BREV")
_ON_MEMORY = ("LDG", "STG", "LDS", "STS", "LDGSTS", "LDSM", "STSM", "ATOM", "ATOMG", "RED", "SHFL")
_ON_TENSOR = ("HMMA", "IMMA", "HGMMA", "IGMMA", "QGMMA", "QMMA")
# m16n8k16 with sums in float32 is 2,048 products, of which a processor does 1,024 per clock on data
# centre cards (without sm_90's products of wide tiles) and 256 on GeForce.
_TENSOR = {80: 16, 86: 4, 89: 4, 90: 16, 100: 16, 120: 4}
# Instructions that the front end handles without a pipe.
_ON_NOTHING = ("BAR", "BRA", "NOP", "BSSY", "BSYNC", "WARPSYNC", "EXIT", "DEPBAR", "LDGDEPBAR")


@dataclass(frozen=True, slots=True)
class Card:
    """Data sheet of a GPU: processors, clock under load in Hz, bytes per second."""

    title: str
    num_processors: int
    clock: float
    bandwidth: float


CARDS = {
    80: Card("A100 80GB", 108, 1.41e9, 2.04e12),
    89: Card("RTX 4090", 128, 2.52e9, 1.01e12),
    90: Card("H100 SXM", 132, 1.83e9, 3.35e12),
}


@dataclass(frozen=True, slots=True)
class Instruction:
    """One line of the listing; `target`: where a branch goes."""

    address: int
    opcode: str
    operands: str

    @property
    def name(self) -> str:
        """The opcode without its modifiers."""
        return self.opcode.partition(".")[0]

    @property
    def target(self) -> int | None:
        """Where a branch goes; None if it is not a branch."""
        found = re.search(r"0x([0-9a-f]+)", self.operands)
        return int(found[1], 16) if self.name == "BRA" and found else None


@dataclass(frozen=True, slots=True)
class Counts:
    """What a kernel's inner loop takes; a turn is one pass through it.

    `slots`: how many instructions could have been issued while the busiest pipe, `pipe`, is busy;
    `loads`: how many of each width in bits read global memory; `programs`: how many fit on a
    processor at once.
    """

    instructions: float  # per unit
    slots: float  # per unit
    pipe: str
    num_barriers: int  # per turn
    loads: Counter[int]  # per turn
    registers: int
    stack: int
    shared: int
    threads: int
    programs: int


def read_listing(text: str) -> list[Instruction]:
    """The instructions in the output of `cuobjdump -sass`, in order of address."""
    return [
        Instruction(int(address, 16), opcode, operands.strip())
        for address, _, opcode, operands in _LINE.findall(text)
    ]


def innermost_loops(listing: Sequence[Instruction]) -> Iterator[list[Instruction]]:
    """The bodies of loops that have no loop inside; a branch to itself ends a kernel."""
    spans = [
        (line.target, line.address)
        for line in listing
        if line.target is not None and line.target < line.address
    ]
    for first, last in spans:
        if not any((a, b) != (first, last) and first <= a and b <= last for a, b in spans):
            yield [line for line in listing if first <= line.address <= last]


def largest_loop(listing: Sequence[Instruction]) -> list[Instruction]:
    """The innermost loop with the most instructions; the whole kernel if there is no loop."""
    return max(innermost_loops(listing), key=len, default=list(listing))


def busiest_pipe(body: Sequence[Instruction], capability: int) -> tuple[str, float]:
    """The pipe that is busy longest, and the issue slots that pass meanwhile."""
    slots: dict[str, float] = {"issue": len(body)}
    for line in body:
        pipe, rate = _pipe(line.name, capability)
        if pipe:
            slots[pipe] = slots.get(pipe, 0.0) + _ISSUE / rate
    return max(slots.items(), key=lambda item: item[1])


def _pipe(name: str, capability: int) -> tuple[str, float]:
    if name in _ON_NOTHING:
        return "", _ISSUE
    if name in _ON_FMA:
        return "fma", _FMA[capability]
    if name in _ON_SPECIAL:
        return "special", _SPECIAL
    if name in _ON_MEMORY:
        return "memory", _MEMORY
    if name in _ON_TENSOR:
        return "tensor", _TENSOR[capability]
    return "alu", _ALU


def count(spec: AotSpec, capability: int) -> Counts:
    """Compile and count. Raises: whatever Triton raises; ValueError for a spec without work."""
    if spec.work is None:
        raise ValueError(f"{spec.label}: the spec does not state the work of its loop")
    compiled = compile_spec(spec, GPUTarget("cuda", capability, 32))
    usage = usage_of(compiled)
    body = largest_loop(read_listing(_disassemble(compiled)))
    pipe, slots = busiest_pipe(body, capability)
    launch = spec.launch(capability)
    threads = _LANES * launch.num_warps
    units = spec.count(launch.constants) / (1 if spec.work.is_shared else threads)
    return Counts(
        len(body) / units,
        slots / units,
        pipe,
        sum(line.name == "BAR" for line in body),
        Counter(_bits(line.opcode) for line in body if line.name in ("LDG", "LDGSTS")),
        usage.registers,
        usage.stack,
        usage.shared,
        threads,
        _programs(usage.registers, usage.shared, threads, capability),
    )


def _disassemble(compiled: Any) -> str:
    with tempfile.TemporaryDirectory() as folder:
        binary = Path(folder) / "kernel.cubin"
        binary.write_bytes(compiled.asm["cubin"])
        tool = triton.knobs.nvidia.cuobjdump.path
        return subprocess.run(
            [tool, "-sass", str(binary)], capture_output=True, text=True, check=True
        ).stdout


def _bits(opcode: str) -> int:
    found = re.search(r"\.[US]?(8|16|64|128)\b", opcode)
    return int(found[1]) if found else 32


def _programs(registers: int, shared: int, threads: int, capability: int) -> int:
    """How many programs fit on a processor (CUDA guide, "Technical Specifications")."""
    by_registers = 65536 // (-(-registers // 8) * 8 * threads)
    by_shared = (SHARED_KIB[capability] + 1 << 10) // (shared + 1024)
    most = 2048 if capability in (80, 90, 100) else 1536
    return min(by_registers, by_shared, most // threads)


def floors(counts: Counts, work: Work, card: Card) -> tuple[float, float]:
    """Seconds per unit by issue and by memory, with all processors at work."""
    lanes = counts.slots * (counts.threads if work.is_shared else 1)
    by_issue = lanes / (_ISSUE * card.num_processors * card.clock)
    return by_issue, work.bytes_each / card.bandwidth


def describe(label: str, spec: AotSpec, counts: Counts, capability: int) -> str:
    """A line of the table."""
    assert spec.work is not None
    loads = ", ".join(f"{number} x {bits}" for bits, number in sorted(counts.loads.items()))
    line = (
        f"{label} sm_{capability}: {counts.instructions:.2f} instructions per {spec.work.unit}, "
        f"{counts.slots:.2f} by the {counts.pipe} pipe, {counts.num_barriers} barriers, "
        f"loads {loads or 'none'}, {counts.registers} registers, {counts.stack} B spilled, "
        f"{counts.shared} B shared, {counts.programs} per processor"
    )
    card = CARDS.get(capability)
    if card:
        by_issue, by_memory = floors(counts, spec.work, card)
        line += (
            f"; {card.title}: {1e12 * by_issue:.3g} ps by issue, {1e12 * by_memory:.3g} by memory"
        )
    return line


def main() -> int:
    """Count, print, and return the exit code."""
    parser = argparse.ArgumentParser(prog="localllm_kernels.compiling.machine_code")
    parser.add_argument("--targets", type=int, nargs="*", choices=[*_FMA], default=[*CARDS])
    parser.add_argument("--only", default="", help="files whose name contains this")
    parser.add_argument("--check", action="store_true", help="fail if a kernel exceeds its figure")
    args = parser.parse_args()
    jobs = [
        (i, target)
        for i, (name, spec) in enumerate(all_specs())
        for target in args.targets
        if args.only in name and spec.work and spec.runs_on(target)
    ]
    are_good = True
    with ProcessPoolExecutor(mp_context=get_context("spawn")) as pool:
        for line, is_good in pool.map(_count_one, *zip(*jobs, strict=True)):
            print(line, flush=True)
            are_good &= is_good or not args.check
    return 0 if are_good else 1


def _count_one(index: int, capability: int) -> tuple[str, bool]:
    name, spec = list(all_specs())[index]
    counts = count(spec, capability)
    line = describe(f"{name}.{spec.kernel.__name__} {spec.label}", spec, counts, capability)
    figure = figure_of(name, spec)
    if figure is None:
        return f"{line}: FAILED, it has no figure", False
    if counts.instructions > figure.instructions or counts.num_barriers > figure.num_barriers:
        most = f"more than {figure.instructions} or {figure.num_barriers} barriers"
        return f"{line}: FAILED, {most}", False
    if counts.stack > spec.max_stack:
        return f"{line}: FAILED, over {spec.max_stack} bytes of stack", False
    return f"{line}; {figure.why}" if figure.why else line, True


if __name__ == "__main__":
    sys.exit(main())
