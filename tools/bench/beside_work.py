"""How much decode speed remains beside other work, for every way that localllm decodes on a CPU.

    python tools/bench/beside_work.py [-n 300] [-r 20] [--ways NAME ...] [--json FILE]

The built-in model runs with the C library, with torch's operators, with a draft model, and behind a
server; each alone and right afterwards beside one and two busy processes. Then two servers answer
at the same time, each beside the other.
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch

from localllm import LLM, SamplingParams
from localllm.bench.contended import LOADS, busy_processes, contended_row
from localllm.bench.environment import describe_environment
from localllm.bench.report import Report
from localllm.bench.results import Result
from localllm.drafting.speculation_config import SpeculationConfig

PROMPT = "Once upon a time there was a king who"
OPTIONS = {
    "C library": {"speculation": SpeculationConfig("off")},
    "torch's operators": {"backend": "torch", "speculation": SpeculationConfig("off")},
    "draft model": {"speculation": SpeculationConfig("draft:pocket-draft")},
}
SERVER, TWO_SERVERS = "server", "two servers"
Measure = Callable[[], float]


def measured_here(way: str, num_tokens: int) -> Measure:
    """Tokens a second of an engine in this process."""
    llm = LLM("pocket", **OPTIONS[way])
    params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
    return lambda: llm.generate(PROMPT, params)[0].decode_tokens_per_s


@contextmanager
def server() -> Iterator[str]:
    """Run a server of the built-in model; yields its address."""
    command = [sys.executable, "-m", "localllm", "serve", "pocket", "--port", "0", "--spec", "off"]
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(command, stderr=log, stdout=log)
        try:
            deadline = time.monotonic() + 60
            while time.monotonic() < deadline and process.poll() is None:
                log.seek(0)
                found = re.search(r"http://127\.0\.0\.1:\d+", log.read().decode())
                if found:
                    yield found[0]
                    return
                time.sleep(0.1)
            raise SystemExit("the server did not start")
        finally:
            process.terminate()
            process.wait()


def measured_there(url: str, num_tokens: int) -> Measure:
    """Tokens a second of a whole request to a server."""
    body = {
        "model": "pocket",
        "prompt": PROMPT,
        "max_tokens": num_tokens,
        "temperature": 0,
        "ignore_eos": True,
    }

    def measure() -> float:
        request = urllib.request.Request(
            f"{url}/v1/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        began = time.perf_counter()
        with urllib.request.urlopen(request) as answer:
            count = json.load(answer)["usage"]["completion_tokens"]
        return float(count / (time.perf_counter() - began))

    return measure


def beside_busy(name: str, measure: Measure, repeats: int) -> list[Result]:
    """A row for each load."""
    pairs: dict[int, list[tuple[float, float]]] = {load: [] for load in LOADS}
    for repeat in range(repeats + 1):  # the first warms up
        for load in LOADS:
            alone = measure()
            with busy_processes(load):
                beside = measure()
            if repeat:
                pairs[load].append((alone, beside))
    return [contended_row(name, load, pairs[load]) for load in LOADS]


def beside_each_other(name: str, measures: list[Measure], repeats: int) -> list[Result]:
    """A row for two that answer at the same time; the other counts as one busy process."""
    pairs = []
    with ThreadPoolExecutor() as pool:
        for repeat in range(repeats + 1):
            alone = measures[0]()
            both = [pool.submit(measure) for measure in measures]
            beside = [future.result() for future in both]
            if repeat:
                pairs.append((alone, beside[0]))
    return [contended_row(name, 1, pairs)]


def main() -> None:
    """Measure, and print the rows."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    names = (*OPTIONS, SERVER, TWO_SERVERS)
    parser.add_argument("-n", type=int, default=300)
    parser.add_argument("-r", type=int, default=20)
    parser.add_argument("--ways", nargs="*", choices=names, default=names)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    rows: list[Result] = []
    for way in args.ways:
        with ExitStack() as opened:
            if way in OPTIONS:
                found = beside_busy(way, measured_here(way, args.n), args.r)
            elif way == SERVER:
                measure = measured_there(opened.enter_context(server()), args.n)
                found = beside_busy(way, measure, args.r)
            else:
                urls = [opened.enter_context(server()) for _ in range(2)]
                measures = [measured_there(url, args.n) for url in urls]
                found = beside_each_other(way, measures, args.r)
        for row in found:
            kept, alone = row.found["kept"], row.found["alone_tokens_per_s"]
            sys.stdout.write(
                f"{row.test}: {row.verdict} ({kept.min:.2f} to {kept.max:.2f}); "
                f"alone {alone.median:.0f} tokens/s\n"
            )
            sys.stdout.flush()
        rows += found
    if args.json is not None:
        place = describe_environment(torch.device("cpu"))
        Report(place, {"name": "pocket"}, None, 0, rows).write(args.json)


if __name__ == "__main__":
    main()
