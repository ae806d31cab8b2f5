"""What requests see: waiting for each other, compilation on their way, the start of a process."""

import json
import os
import random
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from gpu_parts.place import LARGE, ROOT, SMALL, Part, Place


def pacer(kind: str) -> Part:
    """A prompt of 2,000 tokens, alone and beside a running answer: the time to its first token, and
    the longest gap in the answer.
    """

    def run(place: Place) -> None:
        from localllm.schedule.pacing import Pacer
        from localllm.schedule.sampling_params import SamplingParams

        subject = place.open(LARGE, kind, 4096, max_num_seqs=8)
        count = place.size(2000, 60)
        engine = subject.engine.beside(pacer=Pacer())
        answer = SamplingParams(temperature=0.0, max_tokens=place.size(400, 40), ignore_eos=True)
        one = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
        found: dict[str, list[float]] = {"alone_s": [], "beside_s": [], "gap_s": [], "step_s": []}
        for i in range(place.size(5, 1)):
            rng = random.Random(i)
            prompts = [subject.random_tokens(rng, count) for _ in range(2)]
            began_s = time.perf_counter()
            engine.add_request(prompts[0], one)
            while engine.has_unfinished():
                engine.step()
            found["alone_s"].append(time.perf_counter() - began_s)
            first = engine.add_request([i + 1], answer)
            times = [time.perf_counter()]
            for _ in range(20):
                engine.step()
                times.append(time.perf_counter())
            found["step_s"].append((times[-1] - times[5]) / 15)
            began_s = last_s = time.perf_counter()
            second = engine.add_request(prompts[1], one)
            waits, gaps = True, []
            while waits:
                for event in engine.step():
                    now_s = time.perf_counter()
                    waits = waits and event.request_id != second
                    if event.request_id == first:
                        gaps.append(now_s - last_s)
                        last_s = now_s
            found["beside_s"].append(time.perf_counter() - began_s)
            found["gap_s"].append(max(gaps, default=0.0))
            place.keep("seconds", found)
            engine.abort(first)
            while engine.has_unfinished():
                engine.step()

    return run


def compilations(place: Place) -> None:
    """What Triton compiles ahead, and then for each kind of request, which should be nothing."""
    import triton

    from localllm.schedule.sampling_params import SamplingParams

    subject = place.open(LARGE, "int4", 4096, max_num_seqs=16)
    names: list[str] = []

    def note(*, fn: Any, **more: Any) -> None:
        names.append(str(fn.name))

    began_s = time.monotonic()
    triton.knobs.runtime.jit_cache_hook = note
    pieces = 0
    while not subject.engine.is_warm:
        subject.engine.work_ahead()
        pieces += 1
    warm = {"seconds": time.monotonic() - began_s, "pieces": pieces, "kernels": len(names)}
    place.keep("ahead", warm)
    short = SamplingParams(max_tokens=4, ignore_eos=True)
    rich = SamplingParams(
        max_tokens=4, ignore_eos=True, repetition_penalty=1.1, logit_bias={3: 1.0}
    )
    late: dict[str, list[str]] = {}
    lengths = (1, 2, 3, 5, 9, 15, 17, 37, 63, 64, 65, 80, 100, 130, 192, 193, 300, 700, 2047, 3000)
    for params, what in ((short, "plain"), (rich, "penalties and biases")):
        for length in lengths if not place.rehearses else (1, 5):
            names.clear()
            subject.engine.add_request([(7 * i) % 900 for i in range(length)], params)
            while subject.engine.has_unfinished():
                subject.engine.step()
            if names:
                late[f"{what}, {length} tokens"] = list(names)
    place.keep("late", late)
    place.keep("exit_code", int(bool(late)))
    if place.rehearses:
        place.cannot("compilation: torch's operators are used")


def prefix(place: Place) -> None:
    """Time to the first token of a prompt of which nine tenths are cached."""
    from localllm.bench.prefix import PrefixSuite

    subject = place.open(LARGE, "int4", 8192, max_num_seqs=16)
    suite = PrefixSuite(subject, place.size(8000, 200), place.size(5, 1), seed=0)
    place.run(subject, suite)


def load(place: Place) -> None:
    """Many requests, arrivals, static batches."""
    from localllm.bench.load import LoadSuite
    from localllm.bench.workload import Mix

    subject = place.open(SMALL, "bf16", 2048, max_num_seqs=64)
    mix = Mix.within(subject.engine.context_length, subject.architecture.vocab_size, 0)
    place.run(subject, LoadSuite(subject, replace(mix, num_requests=place.size(64, 3))))


def compare(place: Place) -> None:
    """The forward passes of transformers, alternating with ours."""
    from localllm.bench.compare import CompareSuite
    from localllm.bench.speed import SpeedTests

    batches = (1, 8)
    subject = place.open(SMALL, "bf16", 1024, max_num_seqs=8)
    tests = SpeedTests(
        place.size(512, 16), place.size(64, 3), batches=batches, repeats=place.size(3, 1)
    )
    place.run(subject, CompareSuite(subject, tests))


def serving(alias: str, num_requests: int, num_prompt: int, num_new: int) -> Part:
    """Mixed prompts at once, against the continuous batching of transformers."""

    def run(place: Place) -> None:
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
        place.keep("tokens", count * new)
        place.keep("ours_s", ours.seconds)
        theirs = TheirModel(subject)
        theirs.generate_batch([each[:50] for each in prompts], 8)
        theirs_s = theirs.generate_batch(prompts, new)
        place.keep("theirs_s", theirs_s)
        place.keep("times", theirs_s / ours.seconds)

    return run


def start(alias: str) -> Part:
    """Time from process start to the first token, weights from files: with compilation, without."""

    def run(place: Place) -> None:
        with tempfile.TemporaryDirectory() as folder:
            model = Path(folder) / "model"
            _write_checkpoint(place, alias, model)
            environment = {**os.environ, "TRITON_CACHE_DIR": f"{folder}/triton"}
            for name in ("kernels compiled", "warm", "warm again"):
                command = [sys.executable, "tools/gpu_suite.py", "--first-token", str(model)]
                started = time.monotonic()
                process = subprocess.run(
                    [*command, *place.flags],
                    cwd=ROOT,
                    env=environment,
                    check=False,
                    capture_output=True,
                    text=True,
                )
                if process.returncode:
                    raise RuntimeError(process.stderr[-2000:])
                place.keep(name, time.monotonic() - started)

    return run


def first_token(place: Place, model: Path) -> None:
    """Load a checkpoint without its tokenizer, and compute one token."""
    from localllm.bench.speed import run_prefill
    from localllm.engine.loading import load_engine
    from localllm.model.families.table import read_architecture

    architecture = read_architecture(model)
    engine = load_engine(
        model, architecture, place.config(max_num_seqs=1, max_model_len=2048), frozenset()
    )
    run_prefill(engine, list(range(64)))
    os._exit(0)  # the time after the token does not count


def _write_checkpoint(place: Place, alias: str, folder: Path) -> None:
    """Write a 4-bit checkpoint with random weights."""
    import torch
    from safetensors.torch import save_file

    from localllm.engine.chosen_device import select_device
    from localllm.hub.catalog_shape import catalog_shape
    from localllm.model.architecture import HEAD
    from localllm.model.families.table import architecture_of
    from localllm.model.random_weights import RandomWeights
    from localllm.quantize.recipe import Recipe

    architecture, raw = catalog_shape(alias)
    if place.rehearses:
        raw = {**raw, "num_hidden_layers": 2, "vocab_size": 1000, "intermediate_size": 1024}
        architecture = architecture_of(raw, alias)
    recipe, device = Recipe("rtn", group_size=128), select_device(place.config())
    linears = [name for name in architecture.linears() if name != HEAD]
    tensors = {}
    drawn = RandomWeights(architecture, "int4", device, 0)
    for name in linears:
        weight = drawn.quantized(name, torch.device("cpu"))
        for suffix, part in recipe.scheme.write(weight).items():
            tensors[f"{name}.{suffix}"] = part.contiguous()
    drawn = RandomWeights(architecture, "bf16", device, 0)
    for name in architecture.tensors():
        if name.removesuffix(".weight") not in linears:
            tensors[name] = drawn.plain(name).to("cpu", torch.bfloat16).contiguous()
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    described = {
        **raw,
        "architectures": [architecture.name],
        "quantization_config": recipe.quantization_config([HEAD], {}),
    }
    (folder / "config.json").write_text(json.dumps(described))
