"""The parts of `tools/gpu_suite.py` in order of worth, and which of them fit into a time."""

from collections.abc import Iterable
from dataclasses import dataclass

from gpu_parts import first, serving, steps
from gpu_parts.place import LARGE, MIDDLE, SMALL, Part

# Groups that use 4-bit weights of the large model.
_MEASURED = ("steps", "kernels", "serving", "context")
CHECK, CHECKED = "self-check int4", "checked"


@dataclass(frozen=True)
class Planned:
    """A part, the groups that it belongs to, and the seconds that it may take on a GPU."""

    groups: tuple[str, ...]
    part: Part
    seconds: int


PARTS: dict[str, Planned] = {
    "driver": Planned(("first",), first.driver, 60),
    CHECK: Planned(("first",), first.self_check("int4"), 150),
    "kernel tests": Planned(("first",), first.tests(first.KERNEL_TESTS), 240),
    # The verdict that parts about 4-bit weights need; at once over where this machine has it.
    CHECKED: Planned(_MEASURED, first.self_check("int4", anew=False), 150),
    "speed 8B int4": Planned(("steps",), steps.speed(LARGE, "int4", (1, 8, 16, 64)), 100),
    "engine tests": Planned(("engine",), first.tests(first.ENGINE_TESTS), 210),
    "float32": Planned(("engine",), first.float32, 60),
    "kernels": Planned(("kernels",), steps.kernels, 150),
    "serving 8B": Planned(("serving",), serving.serving(LARGE, 32, 1024, 512), 80),
    "start 0.6B": Planned(("serving",), serving.start(SMALL), 60),
    "self-check int8": Planned(("first",), first.self_check("int8"), 60),
    "self-check fp8": Planned(("first",), first.self_check("fp8"), 60),
    "sampling 8B int4": Planned(("steps",), steps.sampling("int4"), 60),
    "pacer 8B int4": Planned(("serving",), serving.pacer("int4"), 60),
    "drafts": Planned(("context",), steps.drafts, 80),
    "compilations": Planned(("serving",), serving.compilations, 100),
    "prefill": Planned(("context",), steps.prefill, 80),
    "caches": Planned(("context",), steps.caches, 100),
    "compare": Planned(("serving",), serving.compare, 90),
    "prefix": Planned(("serving",), serving.prefix, 30),
    "windows": Planned(("context",), steps.windows, 60),
    "load": Planned(("serving",), serving.load, 60),
    "speed 8B bf16": Planned(("steps",), steps.speed(LARGE, "bf16"), 60),
    "sampling 8B bf16": Planned(("steps",), steps.sampling("bf16"), 60),
    "pacer 8B bf16": Planned(("serving",), serving.pacer("bf16"), 60),
    "serving 0.6B": Planned(("serving",), serving.serving(SMALL, 256, 1024, 128), 60),
    "speed 0.6B int4": Planned(("steps",), steps.speed(SMALL, "int4"), 40),
    "speed 0.6B bf16": Planned(("steps",), steps.speed(SMALL, "bf16"), 40),
    "speed 1B bf16": Planned(("steps",), steps.speed(MIDDLE, "bf16"), 40),
    "speed 1B int4": Planned(("steps",), steps.speed(MIDDLE, "int4"), 40),
    "start 8B": Planned(("serving",), serving.start(LARGE), 90),
    "sanitizer": Planned(("engine",), first.sanitizer, 150),
    "profiled": Planned(("kernels",), steps.profiled, 100),
    "tuned": Planned(("kernels",), steps.tuned, 180),
}
GROUPS = tuple(dict.fromkeys(group for part in PARTS.values() for group in part.groups))


def wanted(groups: Iterable[str], done: Iterable[str]) -> list[str]:
    """The parts of `groups` without those that are done, in order of worth. `done`: a check stands
    in the file, but its verdict may be on another machine, so that "checked" is asked again.
    """
    asked, done = set(groups), set(done) - {CHECKED}
    left = [
        name for name, part in PARTS.items() if asked.intersection(part.groups) and name not in done
    ]
    if CHECK in left and CHECKED in left:
        left.remove(CHECKED)
    # Alone it measures nothing.
    return [] if left == [CHECKED] else left


def next_fitting(waiting: Iterable[str], seconds: float) -> str | None:
    """The first part whose limit is at most `seconds`."""
    return next((name for name in waiting if PARTS[name].seconds <= seconds), None)


def fitting(waiting: Iterable[str], seconds: float) -> list[str]:
    """The parts that fit into `seconds` even if each takes all that it may."""
    chosen, left = [], [*waiting]
    while (name := next_fitting(left, seconds)) is not None:
        chosen.append(name)
        left.remove(name)
        seconds -= PARTS[name].seconds
    return chosen
