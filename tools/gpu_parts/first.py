"""What a first run must show: kernels launch, are correct, and touch no memory but their own."""

import os
import shutil
import subprocess
import sys
import time
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpu_parts.place import LARGE, ROOT, TINY, Part, Place, say

if TYPE_CHECKING:
    from localllm.model.random_weights import WeightKind
    from localllm.operators.verdict import Verdict

# Arguments of pytest. Most of the time of kernels goes to compiling, in several processes at once;
# one test of the engine takes all memory.
KERNEL_TESTS = (
    *("tests/gpu/test_kernels.py", "tests/gpu/test_recurrences.py"),
    *(("-n", str(max(1, min(8, (os.cpu_count() or 1) // 2)))) if find_spec("xdist") else ()),
)
ENGINE_TESTS = ("tests/gpu/test_engine.py",)
# One test of each kind, since a launch takes a hundred times as long under the sanitizer.
SANITIZED = (
    "tests/gpu/test_kernels.py::test_split_sums_replayed_from_a_graph",
    "tests/gpu/test_kernels.py::test_attention[8-2-128-None-None-torch.bfloat16]",
)


def driver(place: Place) -> None:
    """Whether Triton can launch anything, and which GPU it is."""
    import torch

    from localllm_kernels.compiling.driver import why_no_kernels

    place.keep("torch", torch.__version__)
    if place.rehearses:
        place.cannot("launches by a driver, and the clocks and power of a GPU")
    else:
        properties = torch.cuda.get_device_properties(0)
        place.keep("gpu", f"{properties.name}, {properties.multi_processor_count} processors")
    began_s = time.monotonic()
    place.keep("why_no_kernels", why_no_kernels())
    place.keep("driver_s", time.monotonic() - began_s)


def self_check(kind: "WeightKind", *, anew: bool = True) -> Part:
    """Check every operator of an 8B model against its reference, and time it against torch's. The
    verdict is kept, so the parts after it use the operators that a user's models would. `anew`:
    even if there is one.
    """

    def run(place: Place) -> None:
        began_s = time.monotonic()
        verdict = _rehearsed(place, kind) if place.rehearses else _found(place, kind, anew)
        place.keep("seconds", time.monotonic() - began_s)
        if verdict is None:
            raise RuntimeError("nothing could be checked")
        place.keep("choice", str(verdict.choice()))
        place.keep("findings", [asdict(finding) for finding in verdict.findings()])
        place.keep("cases", [asdict(outcome) for outcome in verdict.outcomes])

    return run


def _found(place: Place, kind: "WeightKind", anew: bool) -> "Verdict | None":
    import torch

    from localllm.engine.chosen_device import select_device
    from localllm.engine.chosen_operators import check_request
    from localllm.hub.catalog_shape import catalog_shape
    from localllm.model.random_weights import RandomWeights
    from localllm.operators.choice import find_verdict
    from localllm.operators.listener import Listener

    architecture, _ = catalog_shape(LARGE)
    select_device(place.config())
    drawn = RandomWeights(architecture, kind, torch.device("cuda"))
    request = check_request(drawn, architecture, place.config())
    return find_verdict(request, Listener(say, say), anew=anew)


def _rehearsed(place: Place, kind: "WeightKind") -> "Verdict":
    """The verdict on torch's operators, by the same process and cases."""
    import torch

    from localllm.hub.catalog_shape import catalog_shape
    from localllm.model.families.table import architecture_of
    from localllm.model.random_weights import RandomWeights
    from localllm.operators.case import Sizes
    from localllm.operators.check import CheckRequest
    from localllm.operators.self_check import check_operators
    from localllm.operators.verdict import Verdict

    place.cannot("kernels: torch's operators are checked in their place")
    architecture = architecture_of({**catalog_shape(LARGE)[1], **TINY})
    drawn = RandomWeights(architecture, kind, torch.device("cpu"))
    sizes = Sizes(architecture, torch.float32, torch.float32, 16)
    command = (sys.executable, str(ROOT / "tools/gpu_suite.py"), "--check")
    outcomes = check_operators(CheckRequest(drawn, sizes, {}, False), say, command)
    return Verdict("a rehearsal", "tiny", outcomes)


def check_torchs_operators() -> None:
    """Be the process that checks operators, with torch's on a CPU."""
    from functools import partial

    import torch

    from localllm.cost.rates import timed
    from localllm.operators.check import Place as OperatorsPlace
    from localllm.operators.check import end, main
    from localllm_kernels import TORCH_OPS

    cpu = torch.device("cpu")
    tables, timer = (lambda request: lambda choice: TORCH_OPS), (lambda: partial(timed, device=cpu))
    end(main(OperatorsPlace(cpu, tables, timer)))


def tests(chosen: tuple[str, ...]) -> Part:
    """Run some of tests/gpu; the suites for the interpreter run elsewhere."""

    def run(place: Place) -> None:
        if place.rehearses:
            place.cannot("compiled kernels: their tests are collected, and skip themselves")
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *chosen]
        tail = ""
        with subprocess.Popen(
            command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        ) as process:
            for line in process.stdout or ():
                tail = (tail + line)[-3000:]
                place.keep("tail", tail)
        place.keep("exit_code", int(process.returncode != 0))

    return run


def sanitizer(place: Place) -> None:
    """Out-of-bounds reads and writes, found by NVIDIA's tool if it is installed."""
    if place.rehearses:
        place.cannot("NVIDIA's sanitizer")
        return
    tool = shutil.which("compute-sanitizer") or _beside_cuda("compute-sanitizer")
    if tool is None:
        place.keep("skipped", "compute-sanitizer is not installed")
        return
    command = [tool, "--error-exitcode", "9", "--print-limit", "3", sys.executable, "-m", "pytest"]
    done = subprocess.run(
        [*command, "-q", "-p", "no:cacheprovider", *SANITIZED],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    place.keep("tail", (done.stdout + done.stderr)[-3000:])
    place.keep("exit_code", int(done.returncode not in (0, 5)))


def float32(place: Place) -> None:
    """The built-in model in float32 must give the tokens of the CPU."""
    from localllm.answer.llm import LLM

    prompts = ["What is the KV cache?", "Write a line about rivers.", "1, 2, 3,"]
    texts: dict[str, list[str]] = {}
    for device in ("cpu",) if place.rehearses else ("cpu", "cuda"):
        llm = LLM("pocket", device=device, dtype="float32", self_check=False)
        params = llm.sampling_params(temperature=0.0, max_tokens=48)
        texts[device] = [
            llm.chat([{"role": "user", "content": each}], params)[0].text for each in prompts
        ]
        place.keep(device, texts[device])
    place.keep("exit_code", int(len({tuple(each) for each in texts.values()}) > 1))
    if place.rehearses:
        place.cannot("the tokens of a GPU, with which those of the CPU are compared")


def _beside_cuda(name: str) -> str | None:
    found: list[Any] = sorted(Path("/usr/local").glob(f"cuda*/bin/{name}"))
    return str(found[-1]) if found else None
