"""What a step costs, by weights, batch, sampling, context and window, and where its time goes."""

import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from gpu_parts.place import LARGE, ROOT, TINY, Part, Place, rows_of, say

# Names of the compiled kernels, for NVIDIA's profiler.
_PROFILED = "_row_kernel|_fragment_kernel|_tile_kernel|_decode_kernel|_scan_kernel|_pick_kernel"
_METRICS = ",".join(
    (
        "gpu__time_duration.sum",
        "dram__throughput.avg.pct_of_peak_sustained_elapsed",
        "sm__inst_issued.avg.pct_of_peak_sustained_active",
        "launch__registers_per_thread",
        "sm__warps_active.avg.pct_of_peak_sustained_active",
    )
)


def speed(alias: str, kind: str, batches: tuple[int, ...] = (1, 16)) -> Part:
    """Start, prefill and decode of a shape, with traces of its steps."""

    def run(place: Place) -> None:
        from localllm.bench.speed import SpeedSuite, SpeedTests
        from localllm.bench.startup import StartupSuite, seconds_since_start

        imports_s = seconds_since_start()
        subject = place.open(alias, kind, 1024, max_num_seqs=max(batches))
        tests = SpeedTests(
            place.size(512, 16), place.size(128, 4), batches=batches, repeats=place.size(3, 1)
        )
        place.run(subject, StartupSuite(subject, imports_s), SpeedSuite(subject, tests))
        if place.rehearses:
            place.cannot("traces of what a GPU does")
        else:
            place.keep("traces", traces(subject, batches))

    return run


def traces(subject: Any, batches: Sequence[int]) -> Any:
    """Launches, gaps and idle time of decode steps."""
    from gpu_parts.trace import summarize, trace_decode

    layers = subject.architecture.num_layers
    return {
        f"batch {batch}": summarize(trace_decode(subject.engine, batch, 32), 32, layers)
        for batch in batches
    }


def sampling(kind: str) -> Part:
    """A step at the default context, greedy and with the sampling that chat models ask for: the
    difference is sampling. The variants alternate.
    """

    def run(place: Place) -> None:
        from localllm.schedule.sampling_params import SamplingParams

        subject = place.open(LARGE, kind, 1 << 20, max_num_seqs=1)  # the model's whole context
        place.keep("context", subject.engine.context_length)
        count = place.size(96, 4)
        asked = {
            "greedy": SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True),
            "default": SamplingParams(
                temperature=0.7, top_k=20, top_p=0.95, max_tokens=count, ignore_eos=True
            ),
            "penalties": SamplingParams(
                temperature=0.7,
                top_k=20,
                top_p=0.95,
                repetition_penalty=1.1,
                max_tokens=count,
                ignore_eos=True,
            ),
        }
        found: dict[str, list[float]] = {name: [] for name in asked}
        for _ in range(place.size(6, 1)):
            for name, params in asked.items():
                subject.engine.add_request([1, 2, 3], params)
                seconds = step_seconds(subject.engine)
                found[name].append(sum(seconds[2:]) / len(seconds[2:]))
            place.keep("step_s", found)

    return run


def step_seconds(engine: Any) -> list[float]:
    """Seconds of each step that has events, until all requests are finished."""
    seconds = []
    while engine.has_unfinished():
        began_s = time.perf_counter()
        if engine.step():
            seconds.append(time.perf_counter() - began_s)
    return seconds


def caches(place: Place) -> None:
    """Seconds of a decode step at two contexts, for keys and values of each type, which gives the
    slope; and of a turn of 30 tokens after each context.
    """
    from localllm.bench.speed import run_decode, run_prefill

    for kind in ("auto", "int8", "fp8"):
        subject = place.open(
            LARGE, "int4", 33_000, max_num_seqs=1, kv_cache_dtype=kind, max_num_batched_tokens=8192
        )
        prompt = [i % 1000 for i in range(place.size(32_000, 300))]
        run_prefill(subject.engine, prompt)
        found: dict[str, Any] = {}
        for depth in (place.size(1_000, 10), place.size(32_000, 300)):
            steps = run_decode(subject.engine, [prompt[:depth]], place.size(48, 4))
            turns = []
            for i in range(place.size(5, 1)):
                turn = [(7 * j + i) % 900 for j in range(30)]
                turns.append(run_prefill(subject.engine, prompt[:depth] + turn).seconds)
            found[str(depth)] = {"step_s": steps, "turn_s": turns}
            place.keep(kind, found)
        del subject


def windows(place: Place) -> None:
    """Seconds of a decode step after 16,000 tokens, with a window of 1,024 and without one."""
    from localllm.bench.speed import run_decode, run_prefill
    from localllm.engine.chosen_device import select_device
    from localllm.engine.loaded_decoder import build_decoder
    from localllm.engine.loading import build_engine
    from localllm.hub.catalog_shape import catalog_shape
    from localllm.model.families.table import architecture_of
    from localllm.model.random_weights import RandomWeights

    _, raw = catalog_shape("mistral-7b")
    if place.rehearses:
        raw = {**raw, "num_hidden_layers": 1, "vocab_size": 1000, "intermediate_size": 512}
    for window in (1024, None):
        fields = {**raw, "architectures": ["MistralForCausalLM"], "sliding_window": window}
        architecture = architecture_of(fields)
        engine_config = place.config(max_model_len=place.size(17_000, 400), max_num_seqs=1)
        drawn = RandomWeights(architecture, "int4", select_device(engine_config))
        decoder = build_decoder(drawn, drawn.resident_bytes, architecture, engine_config)
        engine = build_engine(decoder, engine_config, frozenset(), "drawn").beside()
        prompt = [i % 1000 for i in range(place.size(16_000, 300))]
        prefill = run_prefill(engine, prompt)
        steps = run_decode(engine, [prompt], place.size(48, 4))
        place.keep(str(window), {"prefill_s": prefill.seconds, "step_s": steps})
        del engine, decoder


def prefill(place: Place) -> None:
    """Prompts of 512, 2,000 and 8,000 tokens, by kind of weights."""
    from localllm.bench.speed import SpeedSuite, SpeedTests

    for kind in ("bf16", "int4"):
        subject = place.open(LARGE, kind, 8200, max_num_seqs=1)
        rows: list[Any] = []
        for count in (512, 2000, 8000):
            tests = SpeedTests(place.size(count, 16), 0, repeats=place.size(3, 1))
            suite = SpeedSuite(subject, tests)
            suite.run(say)
            rows += rows_of(suite)
            place.keep(kind, rows)
        del subject


def drafts(place: Place) -> None:
    """What drafts gain on copied text and cost elsewhere, and whether texts stay the same."""
    from localllm.bench.speculation import SpeculationSuite
    from localllm.bench.verify import VerifySuite

    batches = (1, place.size(64, 2))
    longest = place.size(1536, 100)
    subject = place.open(LARGE, "int4", longest, max_num_seqs=batches[1])
    sizes = (place.size(128, 8), place.size(6, 1))
    place.run(
        subject,
        SpeculationSuite(subject, batches, *sizes, seed=0),
        VerifySuite(subject, place.size(48, 2), seed=0),
    )


def kernels(place: Place) -> None:
    """Each kernel against torch's, at the sizes of an 8B model; both kinds of int4 products."""
    from localllm.bench.kernels import WHOLE, KernelInputs, kernel_suite
    from localllm.bench.operators import Clock
    from localllm.cost.rates import Rates
    from localllm.engine.chosen_device import select_device
    from localllm.hub.catalog_shape import catalog_shape
    from localllm.model.families.table import architecture_of
    from localllm.operators.graph_timer import GraphTimer

    architecture, raw = catalog_shape(LARGE)
    device, inputs = select_device(place.config()), WHOLE
    if place.rehearses:
        place.cannot("times of kernels: each is interpreted once")
        architecture = architecture_of({**raw, **TINY})
        clock = Clock(interpreted_once(), 1, Rates(1.0, {"fp32": 1.0, "bf16": 1.0, "int8": 1.0}))
        inputs = KernelInputs(rows=(2,), decode_context=16, prefill_tokens=48)
    else:
        clock = Clock(GraphTimer(device), 1)
    suite = kernel_suite(architecture, device, clock, inputs)

    def progress(what: str) -> None:
        say(what)
        place.keep("rows", rows_of(suite))

    suite.run(progress)
    progress("done")


def interpreted_once() -> Callable[[Callable[[], object]], float]:
    """A timer that runs a call the first time alone, and says that each takes a second."""
    seen = set[Callable[[], object]]()

    def timer(call: Callable[[], object]) -> float:
        if call not in seen:
            seen.add(call)
            call()
        return 1.0

    return timer


def profiled(place: Place) -> None:
    """NVIDIA's profiler on the kernels of a step, if it is installed."""
    if place.rehearses:
        place.cannot("NVIDIA's profiler; the steps that it looks at were run")
        some_steps(place)
        return
    tool = shutil.which("ncu")
    if tool is None:
        place.keep("skipped", "ncu is not installed")
        return
    command = [tool, "--csv", "--metrics", _METRICS, "--kernel-name", f"regex:{_PROFILED}"]
    command += ["--launch-skip", "200", "--launch-count", "40"]
    done = subprocess.run(
        [*command, sys.executable, "tools/gpu_suite.py", "--steps"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    place.keep("csv", done.stdout[-12_000:])
    place.keep("exit_code", done.returncode)


def some_steps(place: Place) -> None:
    """Run a few steps of an 8B model in 4 bits, for a profiler."""
    from localllm.schedule.sampling_params import SamplingParams

    subject = place.open(LARGE, "int4", 2048, max_num_seqs=1)
    params = SamplingParams(temperature=0.7, top_k=20, top_p=0.95, max_tokens=6, ignore_eos=True)
    subject.engine.add_request(list(range(place.size(1024, 16))), params)
    step_seconds(subject.engine)


def tuned(place: Place) -> None:
    """Batch 1 in 4 bits before and after tuning, in one process, alternating."""
    from localllm.bench.speed import run_decode

    subject = place.open(LARGE, "int4", 1024, max_num_seqs=1)
    started, trials = time.monotonic(), 0
    while time.monotonic() - started < 110 and subject.engine.work_ahead():
        trials += 1
    place.keep("trials", trials)
    if place.rehearses:
        place.cannot("trials of tiles: torch's operators have none")
    place.keep("seconds", time.monotonic() - started)
    again = place.open(LARGE, "int4", 1024, max_num_seqs=1)
    pairs = []
    for _ in range(place.size(5, 1)):
        steps = [run_decode(each.engine, [[1]], place.size(64, 4)) for each in (subject, again)]
        pairs.append([sum(each) / len(each) for each in steps])
        place.keep("step_s", pairs)
