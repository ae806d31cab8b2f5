"""Runs everything that needs a GPU, what is worth most first; writes one JSON file.

    PYTHONPATH=.:kernels python tools/gpu_suite.py --minutes 10 --out gpu.json

Runs from a bare checkout. The groups:

    first     the driver, every operator against its reference, the tests of the kernels
    engine    the tests of the engine, float32, out-of-bounds reads and writes
    steps     8B models at their default context, greedy and sampled, with traces
    kernels   each kernel against torch's, tuning, NVIDIA's profiler
    serving   prompts beside running answers, compilations, starts, load, other engines
    context   long contexts, 8-bit caches, windows, prefill, drafts

Every part is a process of its own with a time limit, so a failure or a lost GPU costs only that
part; a part that is killed leaves what it has measured. The file is written after each part. Run
again with the same file, the script goes on: a part that has succeeded on this commit and GPU is
not repeated, except with `--again`. `--minutes` plans what fits, and says what it leaves out.

`--rehearse` runs the parts on a CPU with tiny models, to try the script and what it calls. What
can't be rehearsed stands in the result of its part, under "not_rehearsed".
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
from gpu_parts.place import ROOT, Place, say
from gpu_parts.plan import GROUPS, PARTS, fitting, next_fitting, wanted

# On a CPU, whatever the part; interpreted kernels take minutes.
_REHEARSAL_S = 300


def environment(place: Place) -> dict[str, Any]:
    """Machine, versions and commit."""
    from localllm.bench.environment import describe_environment
    from localllm.engine.chosen_device import select_device

    found = describe_environment(select_device(place.config()))
    query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
    try:
        smi = subprocess.run(query, capture_output=True, text=True, check=True, timeout=20)
        found["gpu"] = smi.stdout.strip()
    except (OSError, subprocess.SubprocessError) as error:
        found["gpu"] = f"unknown: {error}"
    return found | {"rehearsal": place.rehearses}


def run_part(name: str, place: Place, seconds: float) -> dict[str, Any]:
    """Run a part in its own process: what it found, and the error if it did not finish."""
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "found.json"
        command = [sys.executable, __file__, "--part", name, "--out", str(out)]
        # Kernels are interpreted where there is no GPU to compile them for.
        interpreted = {"TRITON_INTERPRET": "1"} if place.rehearses else {}
        with (Path(folder) / "log").open("w+") as log:
            process = subprocess.Popen(
                [*command, *place.flags],
                cwd=ROOT,
                env={**os.environ, **interpreted},
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


def succeeded(part: dict[str, Any]) -> bool:
    """Whether a part has found all that it looks for."""
    return "error" not in part["found"] and not part["found"].get("exit_code", 0)


def open_report(out: Path, here: dict[str, Any]) -> dict[str, Any]:
    """The report so far, or an empty one. Raises: ValueError for one of another place."""
    report: dict[str, Any] = {"environment": here, "parts": {}}
    if not out.exists():
        return report
    found = json.loads(out.read_text())
    for name in ("commit", "device", "rehearsal"):
        there = found["environment"].get(name)
        if there != here.get(name):
            raise ValueError(
                f"{out} holds results of {name} {there}, and this is {here.get(name)}:"
                " give --out another file"
            )
    return report | {"parts": found["parts"]}


def run_all(
    place: Place, out: Path, report: dict[str, Any], waiting: list[str], seconds: float
) -> int:
    """Run parts while their limits fit into `seconds`; returns how many failed."""
    deadline, failed = time.monotonic() + seconds, 0

    def save() -> None:
        out.write_text(json.dumps(report | {"left_out": waiting}, indent=1) + "\n")

    save()
    while (name := next_fitting(waiting, deadline - time.monotonic())) is not None:
        waiting.remove(name)
        say(f"== {name}")
        limit = _REHEARSAL_S if place.rehearses else PARTS[name].seconds
        found = report["parts"][name] = run_part(name, place, limit)
        if not succeeded(found):
            failed += 1
            say(f"   failed: {str(found['found'])[-300:]}")
        if "not_rehearsed" in found["found"]:
            say(f"   not rehearsed: {found['found']['not_rehearsed']}")
        save()
    return failed


def main() -> int:
    """Run the parts; returns the exit code, 1 if a part failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("gpu.json"))
    parser.add_argument("--group", nargs="*", choices=GROUPS, default=list(GROUPS))
    parser.add_argument("--only", nargs="*", choices=list(PARTS), default=[])
    parser.add_argument("--minutes", type=float, default=float("inf"), help="for all parts")
    parser.add_argument("--again", action="store_true", help="also the parts that are done")
    parser.add_argument("--rehearse", action="store_true", help="on a CPU, with tiny models")
    for hidden in ("--part", "--first-token"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    for hidden in ("--steps", "--check"):
        parser.add_argument(hidden, action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    sys.path[:0] = [str(ROOT), str(ROOT / "kernels")]
    place = Place(args.rehearse, args.out if args.part is not None else None)
    if args.first_token is not None:
        serving.first_token(place, Path(args.first_token))
    elif args.steps:
        steps.some_steps(place)
    elif args.check:
        first.check_torchs_operators()
    elif args.part is not None:
        PARTS[args.part].part(place)
    else:
        return run_planned(place, args)
    return 0


def run_planned(place: Place, args: argparse.Namespace) -> int:
    """Say what fits, and run it; returns the exit code."""
    try:
        report = open_report(args.out, environment(place))
    except ValueError as error:
        say(f"error: {error}")
        return 2
    done = [] if args.again else [name for name, part in report["parts"].items() if succeeded(part)]
    waiting = wanted(args.group, done)
    if args.only:
        waiting = [name for name in args.only if name not in done]
    seconds = 60 * args.minutes
    planned = fitting(waiting, seconds)
    say(f"done before: {', '.join(done) or 'nothing'}")
    say(f"planned, {sum(PARTS[name].seconds for name in planned)} s at most: {', '.join(planned)}")
    left = [name for name in waiting if name not in planned]
    if left:
        say(f"left out, unless the others take less: {', '.join(left)}")
    return 1 if run_all(place, args.out, report, waiting, seconds) else 0


if __name__ == "__main__":
    sys.exit(main())
