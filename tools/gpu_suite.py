"""Everything that wants a GPU, in one run: tests, models with traces, start, kernels; one JSON.

    PYTHONPATH=.:kernels python tools/gpu_suite.py --out results.json

Runs from a bare checkout, in under eight minutes. Every part is a process of its own with a limit
of time, so one that fails, or a GPU that is lost, costs that part alone; the file is written after
each, and names what there was no time for. `--only NAME` runs some parts; `--on-cpu` tries the
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
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
SMALL, MIDDLE, LARGE = "qwen3-0.6b", "llama-3.2-1b", "llama-3.1-8b"


@dataclass(frozen=True)
class Place:
    """Where it runs: on a GPU at full size, or on a CPU to see whether the script holds."""

    on_cpu: bool

    def size(self, full: int, tiny: int) -> int:
        """The one that goes with the place."""
        return tiny if self.on_cpu else full

    def config(self, **options: Any) -> Any:
        """An EngineConfig for the device."""
        from localllm.config import EngineConfig

        if self.on_cpu:
            return EngineConfig(device="cpu", backend="torch", **options)
        return EngineConfig(device="cuda", **options)

    def open(self, alias: str, kind: Any, longest: int, **options: Any) -> Any:
        """A subject with random weights; on a CPU the built-in model in its place."""
        from localllm.bench.subject import open_random, open_subject

        config = self.config(**options)
        if self.on_cpu:
            return open_subject("pocket", config, min(longest, 2000))
        return open_random(alias, kind, config, longest, seed=0)


Part = Callable[[Place], Any]


# What pytest is asked for, beside each other: most of the time goes to compiling.
TEST_RUNS = (
    ("tests/gpu/test_engine.py",),
    ("tests/gpu/test_kernels.py", "-k", "attention and bfloat16"),
    ("tests/gpu/test_kernels.py", "-k", "attention and not bfloat16"),
    ("tests/gpu/test_kernels.py", "-k", "int4 and not attention"),
    ("tests/gpu/test_kernels.py", "-k", "not int4 and not attention"),
)
TEST_SECONDS = 140


def tests(place: Place) -> Any:
    """tests/gpu; the suites of the interpreter run elsewhere."""
    with tempfile.TemporaryDirectory() as folder:
        runs = []
        for i, chosen in enumerate(TEST_RUNS):
            command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *chosen]
            log = (Path(folder) / f"{i}").open("w+")
            runs.append((subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log), log))
        deadline, found = time.monotonic() + TEST_SECONDS, {}
        for chosen, (process, log) in zip(TEST_RUNS, runs, strict=True):
            try:
                code: int | str = process.wait(max(1.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                code = "not done"
            log.seek(0)
            found[" ".join(chosen)] = {"exit_code": code, "tail": log.read()[-3000:]}
            log.close()
    # 5: nothing was chosen.
    return {"exit_code": int(any(run["exit_code"] not in (0, 5) for run in found.values()))} | found


def kernels(place: Place) -> Any:
    """Each kernel against torch's, at the sizes of an 8B model."""
    from localllm.bench.kernels import KernelSuite
    from localllm.bench.subject import catalog_shape
    from localllm.engine.loading import select_device

    if place.on_cpu:
        raise RuntimeError("kernels need a GPU")
    config, _, _ = catalog_shape(LARGE)
    suite = KernelSuite(config, select_device(place.config()), repeats=1)
    suite.run(_say)
    return _rows(suite)


def speed(alias: str, kind: str, batches: tuple[int, ...] = (1, 16)) -> Part:
    """Start, prefill and decode of a shape."""

    def run(place: Place) -> Any:
        from localllm.bench.speed import SpeedSuite, SpeedTests
        from localllm.bench.startup import StartupSuite, seconds_since_start

        imports_s = seconds_since_start()
        subject = place.open(alias, kind, 1024, max_num_seqs=max(batches))
        tests = SpeedTests(
            place.size(512, 16), place.size(128, 4), batches=batches, repeats=place.size(3, 1)
        )
        found = _run(subject, StartupSuite(subject, imports_s), SpeedSuite(subject, tests))
        return found | {"traces": {} if place.on_cpu else _traces(subject, batches)}

    return run


def drafts(place: Place) -> Any:
    """What drafts give on copied text and cost elsewhere, and whether texts stay the same."""
    from localllm.bench.speculation import SpeculationSuite
    from localllm.bench.verify import VerifySuite

    batches = (1, place.size(64, 2))
    subject = place.open(LARGE, "int4", 1536, max_num_seqs=batches[1])
    sizes = (place.size(128, 8), place.size(6, 1))
    return _run(
        subject,
        SpeculationSuite(subject, batches, *sizes, seed=0),
        VerifySuite(subject, place.size(48, 2), seed=0),
    )


def _traces(subject: Any, batches: tuple[int, ...]) -> Any:
    """Launches, gaps and idle time of decode steps."""
    from localllm.bench.trace import summarize, trace_decode

    layers = subject.config.num_layers
    return {
        f"batch {batch}": summarize(trace_decode(subject.engine, batch, 32), 32, layers)
        for batch in batches
    }


def tuned(place: Place) -> Any:
    """Batch 1 in 4 bits before and after tuning, in one process, alternating."""
    from localllm.bench.speed import run_decode

    subject = place.open(LARGE, "int4", 1024, max_num_seqs=1)
    started, trials = time.monotonic(), 0
    while time.monotonic() - started < 50 and subject.engine.work_ahead():
        trials += 1
    seconds = time.monotonic() - started
    again = place.open(LARGE, "int4", 1024, max_num_seqs=1)
    pairs = []
    for _ in range(place.size(5, 1)):
        steps = [run_decode(each.engine, [[1]], place.size(64, 4)) for each in (subject, again)]
        pairs.append([sum(each) / len(each) for each in steps])
    return {"trials": trials, "seconds": seconds, "step_s": pairs}


def caches(place: Place) -> Any:
    """Seconds of a decode step by context, for keys and values in each type: the slope."""
    from localllm.bench.speed import run_decode, run_prefill

    found = {}
    for kind in ("auto", "int8", "fp8"):
        subject = place.open(
            LARGE, "int4", 33_000, max_num_seqs=1, kv_cache_dtype=kind, max_num_batched_tokens=8192
        )
        prompt = [i % 1000 for i in range(place.size(32_000, 300))]
        run_prefill(subject.engine, prompt)
        found[kind] = {
            depth: run_decode(subject.engine, [prompt[:depth]], place.size(48, 4))
            for depth in (place.size(1_000, 10), place.size(32_000, 300))
        }
        del subject
    return found


def prefix(place: Place) -> Any:
    """The first token of a prompt of which nine tenths are cached."""
    from localllm.bench.prefix import PrefixSuite

    subject = place.open(LARGE, "int4", 8192, max_num_seqs=16)
    return _run(subject, PrefixSuite(subject, place.size(8000, 200), place.size(5, 1), seed=0))


def load(place: Place) -> Any:
    """Many requests, arrivals, static batches."""
    from localllm.bench.load import LoadSuite
    from localllm.bench.workload import Mix

    subject = place.open(SMALL, "bf16", 2048, max_num_seqs=64)
    mix = Mix.within(subject.engine.context_length, subject.config.vocab_size, 0)
    return _run(subject, LoadSuite(subject, replace(mix, num_requests=place.size(64, 3))))


def compare(place: Place) -> Any:
    """The forward passes of transformers, alternating."""
    from localllm.bench.compare import CompareSuite
    from localllm.bench.speed import SpeedTests

    batches = (1, 8)
    subject = place.open(SMALL, "bf16", 1024, max_num_seqs=8)
    tests = SpeedTests(
        place.size(512, 16), place.size(64, 3), batches=batches, repeats=place.size(3, 1)
    )
    return _run(subject, CompareSuite(subject, tests))


def serving(alias: str, num_requests: int, num_prompt: int, num_new: int) -> Part:
    """Mixed prompts at once, against the continuous batching of transformers."""

    def run(place: Place) -> Any:
        import random

        from localllm.bench.compare import TheirModel
        from localllm.bench.load import run_requests
        from localllm.bench.workload import LoadRequest

        count, new = place.size(num_requests, 3), place.size(num_new, 4)
        longest = place.size(num_prompt, 30)
        subject = place.open(
            alias, "bf16", longest + new + 8, max_num_seqs=count, gpu_memory_utilization=0.45
        )
        rng = random.Random(0)
        prompts = [
            subject.random_tokens(rng, rng.randrange(longest // 10, longest)) for _ in range(count)
        ]
        run_requests(subject.engine, [LoadRequest(tuple(each[:50]), 8) for each in prompts])
        ours = run_requests(subject.engine, [LoadRequest(tuple(each), new) for each in prompts])
        found: dict[str, Any] = {"tokens": count * new, "ours_s": ours.seconds}
        theirs = TheirModel(subject)
        theirs.generate_batch([each[:50] for each in prompts], 8)
        found["theirs_s"] = theirs.generate_batch(prompts, new)
        return found | {"times": found["theirs_s"] / found["ours_s"]}

    return run


def start(alias: str) -> Part:
    """A fresh process to its first token, weights from files: kernels compiled anew, then not."""

    def run(place: Place) -> Any:
        with tempfile.TemporaryDirectory() as folder:
            model = Path(folder) / "model"
            _write_checkpoint(place, alias, model)
            found = {}
            environment = {**os.environ, "TRITON_CACHE_DIR": f"{folder}/triton"}
            for name in ("kernels compiled", "warm", "warm again"):
                command = [sys.executable, __file__, "--first-token", str(model)]
                started = time.monotonic()
                process = subprocess.run(
                    [*command, *(["--on-cpu"] if place.on_cpu else [])],
                    env=environment,
                    check=False,
                    capture_output=True,
                    text=True,
                )
                if process.returncode:
                    raise RuntimeError(process.stderr[-2000:])
                found[name] = time.monotonic() - started
            return found

    return run


def first_token(place: Place, model: Path) -> None:
    """Load a checkpoint without its tokenizer, and compute one token."""
    from localllm.bench.speed import run_prefill
    from localllm.engine.loading import load_engine
    from localllm.model.architectures import read_model_config

    config, spec = read_model_config(model)
    engine = load_engine(
        model, config, spec, place.config(max_num_seqs=1, max_model_len=2048), frozenset()
    )
    run_prefill(engine, list(range(64)))
    os._exit(0)  # what comes after the token is not its time


def _write_checkpoint(place: Place, alias: str, folder: Path) -> None:
    """A checkpoint in 4 bits whose weights are drawn at random."""
    import torch
    from safetensors.torch import save_file

    from localllm.bench.subject import catalog_shape
    from localllm.config import ModelConfig
    from localllm.engine.loading import select_device
    from localllm.model.architectures import expected_tensors, linear_shapes
    from localllm.model.random_weights import RandomWeights
    from localllm.quantize.recipe import Recipe

    config, spec, raw = catalog_shape(alias)
    if place.on_cpu:
        raw = {**raw, "num_hidden_layers": 2, "vocab_size": 1000, "intermediate_size": 1024}
        config = ModelConfig.from_hf({**spec.config_defaults, **raw}, alias)
    recipe, device = Recipe("rtn", group_size=128), select_device(place.config())
    linears = [name for name in linear_shapes(config, spec) if name != "lm_head"]
    tensors = {}
    drawn = RandomWeights(config, spec, "int4", device, 0)
    for name in linears:
        weight = drawn.quantized(name, torch.device("cpu"))
        for suffix, part in recipe.scheme.write(weight).items():
            tensors[f"{name}.{suffix}"] = part.contiguous()
    drawn = RandomWeights(config, spec, "bf16", device, 0)
    for name in expected_tensors(config, spec):
        if name.removesuffix(".weight") not in linears:
            tensors[name] = drawn.plain(name).to("cpu", torch.bfloat16).contiguous()
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    described = {
        **raw,
        "architectures": [config.architecture],
        "quantization_config": recipe.quantization_config(["lm_head"]),
    }
    (folder / "config.json").write_text(json.dumps(described))


# The name of each part, and the seconds it may take; what matters most first.
PARTS: dict[str, tuple[Part, int]] = {
    "tests": (tests, TEST_SECONDS + 10),
    "speed 8B int4": (speed(LARGE, "int4"), 50),
    "speed 8B bf16": (speed(LARGE, "bf16"), 50),
    "speed 1B bf16": (speed(MIDDLE, "bf16"), 30),
    "speed 0.6B int4": (speed(SMALL, "int4"), 30),
    "start 0.6B": (start(SMALL), 60),
    "start 8B": (start(LARGE), 90),
    "caches": (caches, 60),
    "serving 0.6B": (serving(SMALL, 256, 1024, 128), 60),
    "serving 8B": (serving(LARGE, 32, 1024, 512), 80),
    "drafts": (drafts, 70),
    "kernels": (kernels, 80),
    "prefix": (prefix, 30),
    "load": (load, 60),
    "compare": (compare, 40),
    "speed 0.6B bf16": (speed(SMALL, "bf16"), 30),
    "speed 1B int4": (speed(MIDDLE, "int4"), 30),
    "tuned": (tuned, 90),
}


def _say(what: str) -> None:
    sys.stderr.write(f"{what}\n")


def _rows(*suites: Any) -> list[dict[str, Any]]:
    return [result.as_json() for suite in suites for result in suite.results()]


def _run(subject: Any, *suites: Any) -> Any:
    for suite in suites:
        suite.run(_say)
    limits = next((suite.limits for suite in suites if suite.limits is not None), None)
    return {
        "rows": _rows(*suites),
        "limits": None if limits is None else asdict(limits),
        "memory": asdict(subject.decoder.plan),
    }


def _environment(place: Place) -> dict[str, Any]:
    from localllm.bench.environment import describe_environment
    from localllm.engine.loading import select_device

    found = describe_environment(select_device(place.config()))
    query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
    try:
        smi = subprocess.run(query, capture_output=True, text=True, check=True, timeout=20)
        found["gpu"] = smi.stdout.strip()
    except (OSError, subprocess.SubprocessError) as error:
        found["gpu"] = f"unknown: {error}"
    return found


def _run_part(name: str, place: Place, seconds: float) -> dict[str, Any]:
    """A part in a process of its own: what it found, or why it found nothing."""
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
                process.wait(seconds)
            except subprocess.TimeoutExpired:
                # With whatever it has started, which would disturb the next.
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                error = f"not done in {seconds:.0f} s; "
            log.seek(0)
            error += log.read()[-4000:]
        found = json.loads(out.read_text()) if out.exists() else {"error": error}
    return {"seconds": time.monotonic() - started, "found": found}


def main() -> int:
    """The exit code: 1 where a part failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("gpu.json"))
    parser.add_argument("--only", nargs="*", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--budget", type=float, default=470.0, help="seconds in all")
    parser.add_argument("--on-cpu", action="store_true")
    parser.add_argument("--part", choices=list(PARTS), help=argparse.SUPPRESS)
    parser.add_argument("--first-token", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    sys.path[:0] = [str(ROOT), str(ROOT / "kernels")]
    place = Place(args.on_cpu)
    if args.first_token is not None:
        first_token(place, args.first_token)
    if args.part is not None:
        args.out.write_text(json.dumps(PARTS[args.part][0](place)))
        return 0
    report: dict[str, Any] = {"environment": _environment(place), "parts": {}}
    deadline, failed = time.monotonic() + args.budget, 0
    for name in args.only:
        left = deadline - time.monotonic()
        if left < 5:
            report["parts"][name] = {"seconds": 0, "found": {"error": "no time left"}}
        else:
            _say(f"== {name}")
            report["parts"][name] = _run_part(name, place, min(PARTS[name][1], left))
        found = report["parts"][name]["found"]
        if isinstance(found, dict) and ("error" in found or found.get("exit_code", 0)):
            failed += 1
            _say(f"   failed: {str(found)[-300:]}")
        args.out.write_text(json.dumps(report, indent=1) + "\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
