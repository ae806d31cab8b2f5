"""Runs everything that needs a GPU, in the order that suits a first run; writes one JSON file.

    PYTHONPATH=.:kernels python tools/gpu_suite.py --group first --out first.json

Runs from a bare checkout. The groups, for ten minutes each:

    first     the driver, every operator against its reference, the tests of the kernels
    engine    the tests of the engine, float32, out-of-bounds reads and writes
    steps     8B models at their default context, greedy and sampled, with traces
    kernels   each kernel against torch's, tuning, NVIDIA's profiler
    serving   prompts beside running answers, compilations, starts, load, other engines
    context   long contexts, 8-bit caches, windows, prefill, drafts

Every part is a process of its own with a time limit, so a failure or a lost GPU costs only that
part; a part that is killed leaves what it has measured. The file is written after each part, and
names the parts that there was no time for. `--only NAME` runs some parts; `--on-cpu` tries the
script itself with the built-in model.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from gpu_parts import first, serving, steps
from gpu_parts.place import LARGE, MIDDLE, ROOT, SMALL, Part, Place, say

# What the parts about 4-bit weights need; at once over where it was done before.
CHECKED: dict[str, tuple[Part, int]] = {"checked": (first.self_check("int4", anew=False), 150)}
# By group: the name of each part, and the seconds it may take; the most important first.
GROUPS: dict[str, dict[str, tuple[Part, int]]] = {
    "first": {
        "driver": (first.driver, 60),
        "self-check int4": (first.self_check("int4"), 150),
        "kernel tests": (first.tests(first.KERNEL_TESTS), 240),
        "self-check int8": (first.self_check("int8"), 60),
        "self-check fp8": (first.self_check("fp8"), 60),
    },
    "engine": {
        "engine tests": (first.tests(first.ENGINE_TESTS), 210),
        "float32": (first.float32, 60),
        "sanitizer": (first.sanitizer, 150),
    },
    "steps": {
        **CHECKED,
        "speed 8B int4": (steps.speed(LARGE, "int4", (1, 8, 16, 64)), 100),
        "speed 8B bf16": (steps.speed(LARGE, "bf16"), 60),
        "sampling 8B int4": (steps.sampling("int4"), 60),
        "sampling 8B bf16": (steps.sampling("bf16"), 60),
        "speed 1B bf16": (steps.speed(MIDDLE, "bf16"), 40),
        "speed 0.6B int4": (steps.speed(SMALL, "int4"), 40),
        "speed 0.6B bf16": (steps.speed(SMALL, "bf16"), 40),
        "speed 1B int4": (steps.speed(MIDDLE, "int4"), 40),
    },
    "kernels": {
        **CHECKED,
        "kernels": (steps.kernels, 150),
        "profiled": (steps.profiled, 100),
        "tuned": (steps.tuned, 180),
    },
    "serving": {
        **CHECKED,
        "pacer 8B int4": (serving.pacer("int4"), 60),
        "pacer 8B bf16": (serving.pacer("bf16"), 60),
        "compilations": (serving.compilations, 100),
        "start 0.6B": (serving.start(SMALL), 60),
        "start 8B": (serving.start(LARGE), 90),
        "serving 0.6B": (serving.serving(SMALL, 256, 1024, 128), 60),
        "serving 8B": (serving.serving(LARGE, 32, 1024, 512), 80),
        "load": (serving.load, 60),
        "compare": (serving.compare, 90),
        "prefix": (serving.prefix, 30),
    },
    "context": {
        **CHECKED,
        "caches": (steps.caches, 100),
        "windows": (steps.windows, 60),
        "prefill": (steps.prefill, 80),
        "drafts": (steps.drafts, 80),
    },
}
PARTS = {name: part for group in GROUPS.values() for name, part in group.items()}


def environment(place: Place) -> dict[str, Any]:
    """Machine, versions and commit."""
    from localllm.bench.environment import describe_environment
    from localllm.engine.device import select_device

    found = describe_environment(select_device(place.config()))
    query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
    try:
        smi = subprocess.run(query, capture_output=True, text=True, check=True, timeout=20)
        found["gpu"] = smi.stdout.strip()
    except (OSError, subprocess.SubprocessError) as error:
        found["gpu"] = f"unknown: {error}"
    return found


def run_part(name: str, place: Place, seconds: float) -> dict[str, Any]:
    """Run a part in its own process: what it found, and the error if it did not finish."""
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "found.json"
        command = [sys.executable, __file__, "--part", name, "--out", str(out)]
        with (Path(folder) / "log").open("w+") as log:
            process = subprocess.Popen(
                [*command, *(["--on-cpu"] if place.on_cpu else [])],
                cwd=ROOT,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
            error = ""
            try:
                if process.wait(seconds):
                    error = f"exited with {process.returncode}; "
            except subprocess.TimeoutExpired:
                # Its children too, which would disturb the next part.
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                error = f"timed out after {seconds:.0f} s; "
            log.seek(0)
            told = log.read()[-4000:]
        found = json.loads(out.read_text()) if out.exists() else {}
    return {
        "seconds": time.monotonic() - started,
        "found": found | ({"error": error + told} if error else {}),
    }


def main() -> int:
    """Run the parts; returns the exit code, 1 if a part failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("gpu.json"))
    parser.add_argument("--group", nargs="*", choices=list(GROUPS), default=list(GROUPS))
    parser.add_argument("--only", nargs="*", choices=list(PARTS), default=[])
    parser.add_argument("--budget", type=float, default=570.0, help="total seconds")
    parser.add_argument("--on-cpu", action="store_true")
    parser.add_argument("--part", choices=list(PARTS), help=argparse.SUPPRESS)
    parser.add_argument("--first-token", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--steps", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    sys.path[:0] = [str(ROOT), str(ROOT / "kernels")]
    place = Place(args.on_cpu, args.out if args.part is not None else None)
    if args.first_token is not None:
        serving.first_token(place, args.first_token)
    if args.steps:
        steps.some_steps(place)
        return 0
    if args.part is not None:
        PARTS[args.part][0](place)
        return 0
    report: dict[str, Any] = {"environment": environment(place), "parts": {}}
    deadline, failed = time.monotonic() + args.budget, 0
    chosen = [name for group in args.group for name in GROUPS[group]]
    for name in args.only or dict.fromkeys(chosen):
        left = deadline - time.monotonic()
        if left < 5:
            report["parts"][name] = {"seconds": 0, "found": {"error": "no time left"}}
        else:
            say(f"== {name}")
            report["parts"][name] = run_part(name, place, min(PARTS[name][1], left))
        found = report["parts"][name]["found"]
        if "error" in found or found.get("exit_code", 0):
            failed += 1
            say(f"   failed: {str(found)[-300:]}")
        args.out.write_text(json.dumps(report, indent=1) + "\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
