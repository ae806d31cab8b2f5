"""Prefill and decode behind more and more tokens: localllm and installed peers in turns.

    python tools/bench/at_depths.py MODEL [--llama-bin FOLDER --gguf FILE.gguf]
        [--openvino PYTHON --gguf FILE.gguf] [--onnx PYTHON --onnx-model FOLDER]
        [--depths 0 2048 8192] [--rounds 5] [--cache int8|int4] [--json FILE]

MODEL is what localllm runs; llama.cpp and OpenVINO GenAI run FILE.gguf, ONNX Runtime GenAI what its
model builder made in FOLDER. llama.cpp is measured by its own llama-bench from FOLDER, the others
by the interpreter of an environment that has them, OpenVINO's prefill as the difference between the
first tokens behind a depth with 512 tokens more and without them. With `--cache`, localllm and
llama.cpp keep keys and values in that many bits, llama.cpp in blocks of its own.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

from localllm.bench.environment import describe_environment

PROMPT, DECODED = 512, 32
# llama.cpp's types of cache by localllm's.
CACHES = {"int8": "q8_0", "int4": "q4_0"}
# Tokens a second of both tests, or none where a program has no such test.
Speeds = dict[str, float]
_OPENVINO = """
import json, sys, time
import numpy, openvino, openvino_genai
path, depth, prompt, decoded, threads = sys.argv[1], *map(int, sys.argv[2:])
pipe = openvino_genai.LLMPipeline(path, "CPU", INFERENCE_NUM_THREADS=threads)
drawn = numpy.random.default_rng(0)  # no prompt twice: it keeps what it has read
def seconds(count, new):
    ids = drawn.integers(1000, 40000, (1, count))
    asked = openvino_genai.GenerationConfig(max_new_tokens=new, ignore_eos=True, do_sample=False)
    tokens = openvino_genai.TokenizedInputs(
        openvino.Tensor(ids.astype(numpy.int64)),
        openvino.Tensor(numpy.ones_like(ids, dtype=numpy.int64)),
    )
    began = time.perf_counter()
    pipe.generate(tokens, asked)
    return time.perf_counter() - began
seconds(prompt, 2)
short = seconds(depth, 1) if depth else 0.0
whole = seconds(depth + prompt, 1)
longer = seconds(depth + prompt, 1 + decoded)
print(json.dumps({"prefill": prompt / (whole - short), "decode": decoded / (longer - whole)}))
"""

_ONNX = """
import json, sys, time
import numpy, onnxruntime_genai
path, depth, prompt, decoded, threads = sys.argv[1], *map(int, sys.argv[2:])
config = onnxruntime_genai.Config(path)
session = {"session_options": {"intra_op_num_threads": threads}}
config.overlay(json.dumps({"model": {"decoder": session}}))
model = onnxruntime_genai.Model(config)
drawn = numpy.random.default_rng(0)
def read(generator, count):
    generator.append_tokens(drawn.integers(1000, 40000, count).astype(numpy.int32))
def speeds(depth, prompt, decoded):
    asked = onnxruntime_genai.GeneratorParams(model)
    total = depth + prompt + decoded + 2
    asked.set_search_options(max_length=total, min_length=total, do_sample=False)
    generator = onnxruntime_genai.Generator(model, asked)
    if depth:
        read(generator, depth)
    began = time.perf_counter()
    read(generator, prompt)
    generator.generate_next_token()
    first = time.perf_counter()
    for _ in range(decoded):
        generator.generate_next_token()
    return prompt / (first - began), decoded / (time.perf_counter() - first)
speeds(0, prompt, 2)
print(json.dumps(dict(zip(("prefill", "decode"), speeds(depth, prompt, decoded)))))
"""


def output_of(command: list[str]) -> str:
    """What a command prints; it must succeed."""
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if done.returncode:
        raise SystemExit(f"{command[0]} failed:\n{done.stderr}")
    return done.stdout


def ours(model: str, cache: str | None, depth: int) -> Speeds:
    """One round of localllm."""
    tests = ["-p", str(PROMPT), "-n", str(DECODED), "--depth", str(depth), "-r", "1"]
    tests += [] if cache is None else ["--kv-cache-dtype", cache]
    command = [sys.executable, "-m", "localllm", "bench", model, *tests]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "report.json"
        output_of([*command, "-c", str(depth + PROMPT + 128), "--json", str(path)])
        report = json.loads(path.read_text())
    speeds = [row for row in report["results"] if "tokens_per_s" in row]
    found = {row["test"]: row["tokens_per_s"]["median"] for row in speeds}
    return {
        "prefill": next(speed for test, speed in found.items() if test.startswith("pp")),
        "decode": next(speed for test, speed in found.items() if test.startswith("tg")),
    }


def llama_cpp(folder: Path, gguf: Path, cache: str | None, threads: int, depth: int) -> Speeds:
    """One round of llama.cpp."""
    tests = ["-p", str(PROMPT), "-n", str(DECODED), "-d", str(depth), "-r", "1"]
    if cache is not None:
        tests += ["-fa", "on", "-ctk", CACHES[cache], "-ctv", CACHES[cache]]
    command = [str(folder / "llama-bench"), "-m", str(gguf), *tests]
    rows = json.loads(output_of([*command, "-t", str(threads), "-o", "json"]))
    return {"prefill" if row["n_prompt"] else "decode": row["avg_ts"] for row in rows}


def in_python(python: Path, program: str, model: Path, threads: int, depth: int) -> Speeds:
    """One round of a program above."""
    numbers = map(str, (depth, PROMPT, DECODED, threads))
    printed = output_of([str(python), "-c", program, str(model), *numbers])
    speeds: Speeds = json.loads(printed.splitlines()[-1])
    return speeds


def main() -> None:
    """Alternate, and print the rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--llama-bin", type=Path)
    parser.add_argument("--openvino", type=Path)
    parser.add_argument("--gguf", type=Path)
    parser.add_argument("--onnx", type=Path)
    parser.add_argument("--onnx-model", type=Path)
    parser.add_argument("--depths", type=int, nargs="*", default=[0, 2048, 8192])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--cache", choices=CACHES)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    threads = len(os.sched_getaffinity(0))
    peers: dict[str, Callable[[int], Speeds]] = {
        "localllm": lambda d: ours(args.model, args.cache, d)
    }
    if args.llama_bin is not None:
        peers["llama.cpp"] = lambda d: llama_cpp(args.llama_bin, args.gguf, args.cache, threads, d)
    if args.openvino is not None:
        peers["OpenVINO GenAI"] = lambda d: in_python(
            args.openvino, _OPENVINO, args.gguf, threads, d
        )
    if args.onnx is not None:
        peers["ONNX Runtime GenAI"] = lambda d: in_python(
            args.onnx, _ONNX, args.onnx_model, threads, d
        )
    rows = []
    for depth in args.depths:
        found: dict[tuple[str, str], list[float]] = defaultdict(list)
        for _ in range(args.rounds):
            for name, measure in peers.items():
                for test, speed in measure(depth).items():
                    found[test, name].append(speed)
        for test in ("prefill", "decode"):
            medians = {name: statistics.median(found[test, name]) for name in peers}
            own = found[test, "localllm"]
            times = {
                name: statistics.median(a / b for a, b in zip(own, found[test, name], strict=True))
                for name in peers
            }
            rows.append({"depth": depth, "test": test, "tokens_per_s": medians, "times": times})
            shown = ", ".join(
                f"{name} {medians[name]:.1f} ({times[name]:.2f} times)" for name in peers
            )
            sys.stdout.write(f"{test} behind {depth:,}: {shown}\n")
            sys.stdout.flush()
    if args.json is not None:
        place = describe_environment(None)
        of_peers = [str(path.name) for path in (args.gguf, args.onnx_model) if path is not None]
        models = {"model": Path(args.model).name, "models of peers": of_peers}
        told = {"environment": place, **models, "cache": args.cache, "rows": rows}
        args.json.write_text(json.dumps(told, indent=2) + "\n")


if __name__ == "__main__":
    main()
