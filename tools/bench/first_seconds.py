"""The first seconds, localllm and installed peers in turns: first token, memory, a 4-bit copy.

    python tools/bench/first_seconds.py MODEL [MODEL ...] [--llama-server PATH] [--rounds 10]
        [--checkpoint FOLDER] [--copy METHOD ...] [--llama-quantize PATH --whole FILE.gguf]
        [--json FILE]

For each model: the whole command `localllm chat MODEL "Say hi." -n 1` with no engine running, and
again with the one that stays; llama.cpp's server from its start to its first token, for models that
are GGUF files, and its next answer; transformers for CHECKPOINT, likewise. Resident memory is the
highest that the process with the weights has had. With --copy, the time that `localllm quantize
CHECKPOINT --method METHOD` takes; with --whole, llama-quantize's from that file to Q4_K_M.

Files are in the page cache: each program opens the model once before it is timed.
"""

import argparse
import json
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from localllm.bench.environment import describe_environment

CONTEXT = 2048
_FIRST, _SECOND = "Say hi.", "Say hello."
_WAITS_S = 120.0
# Prints a line when its first token is there, and then answers each line that it reads.
_TRANSFORMERS = """
import sys
from transformers import AutoModelForCausalLM, AutoTokenizer
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype="auto")
question = sys.argv[2]
while question:
    asked = [{"role": "user", "content": question.strip()}]
    ids = tokenizer.apply_chat_template(
        asked, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    answer = model.generate(**ids, max_new_tokens=1, do_sample=False)
    print(repr(tokenizer.decode(answer[0, -1])), flush=True)
    question = sys.stdin.readline()
"""

Times = dict[str, list[float]]


def localllm(*arguments: str) -> str:
    """What the command prints; it must succeed."""
    command = [sys.executable, "-m", "localllm", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if done.returncode:
        raise SystemExit(done.stderr)
    return done.stdout


def seconds(run: Callable[[], object]) -> float:
    """How long a call takes."""
    began_s = time.perf_counter()
    run()
    return time.perf_counter() - began_s


def highest_mb(pid: int) -> float:
    """The most memory that a process has had resident, in MB."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024 / 1e6
    raise ValueError(f"process {pid} has no VmHWM")


def ours(model: str, times: Times) -> None:
    """One round of localllm with no engine running, and with the one that stays."""
    localllm("stop")

    def ask(question: str) -> str:
        return localllm(
            *("chat", model, question, "-n", "1", "--greedy"),
            *("-c", str(CONTEXT), "--keepalive", "5m"),
        )

    times["first token, cold"].append(seconds(lambda: ask(_FIRST)))
    times["first token, warm"].append(seconds(lambda: ask(_SECOND)))
    engine = json.loads(localllm("ps", "--json"))
    times["resident, MB"].append(highest_mb(engine["pid"]))
    localllm("stop")


def llama_cpp(server: Path, model: str, times: Times) -> None:
    """One round of llama.cpp's server, from its start on."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [server, "-m", model, "-c", str(CONTEXT), "--port", str(port)]

    def ask(question: str) -> None:
        body = {"messages": [{"role": "user", "content": question}], "max_tokens": 1}
        deadline = time.monotonic() + _WAITS_S
        while True:
            request = urllib.request.Request(
                f"http://127.0.0.1:{port}/v1/chat/completions",
                json.dumps(body).encode(),
                {"Content-Type": "application/json"},
            )
            try:
                urllib.request.urlopen(request, timeout=_WAITS_S).read()
            except (urllib.error.URLError, ConnectionError) as error:  # it is still loading
                code = getattr(error, "code", 503)
                if code != 503 or time.monotonic() > deadline:
                    raise
                time.sleep(0.01)
            else:
                return

    began_s = time.perf_counter()
    with ended(
        subprocess.Popen(command, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    ) as its:
        ask(_FIRST)
        times["first token, cold"].append(time.perf_counter() - began_s)
        times["first token, warm"].append(seconds(lambda: ask(_SECOND)))
        times["resident, MB"].append(highest_mb(its.pid))


def transformers(checkpoint: Path, times: Times) -> None:
    """One round of transformers, in a process of its own."""
    command = [sys.executable, "-c", _TRANSFORMERS, str(checkpoint), _FIRST]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    began_s = time.perf_counter()
    with ended(subprocess.Popen(command, text=True, **pipes)) as its:
        read(its)
        times["first token, cold"].append(time.perf_counter() - began_s)

        def ask() -> None:
            its.stdin.write(f"{_SECOND}\n")
            its.stdin.flush()
            read(its)

        times["first token, warm"].append(seconds(ask))
        times["resident, MB"].append(highest_mb(its.pid))


def read(process: "subprocess.Popen[str]") -> None:
    """Wait for a line of a process, which must write one."""
    if not process.stdout.readline():
        raise SystemExit("transformers has ended; does its script run?")


@contextmanager
def ended(process: "subprocess.Popen[str]") -> "Iterator[subprocess.Popen[str]]":
    """The process, which is ended afterwards."""
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def copies(asked: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Seconds of each 4-bit copy, and of ours its KL divergence and its highest memory."""
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for method in asked.copy:
            out = f"{folder}/{method}"
            told = json.loads(
                localllm("quantize", str(asked.checkpoint), out, "--method", method, "--json")
            )
            found[f"localllm, {method}"] = {
                "seconds": told["seconds"],
                "kl_mean": told["quality"]["against"]["kl_mean"],
                "peak_mb": told["peak_bytes"] / 1e6,
            }
        if asked.whole is not None:
            command = [asked.llama_quantize, asked.whole, f"{folder}/out.gguf", "Q4_K_M"]
            taken_s = seconds(lambda: subprocess.run(command, check=True, capture_output=True))
            found["llama.cpp, Q4_K_M"] = {"seconds": taken_s}
    return found


def main() -> None:
    """Measure, print, and write."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("models", nargs="+")
    parser.add_argument("--llama-server", type=Path)
    parser.add_argument("--llama-quantize", type=Path)
    parser.add_argument("--checkpoint", type=Path)
    parser.add_argument("--whole", type=Path)
    parser.add_argument("--copy", nargs="*", default=[])
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    if asked.whole is not None and asked.llama_quantize is None:
        parser.error("--whole needs --llama-quantize")
    subjects: dict[str, Callable[[Times], None]] = {}
    for model in asked.models:
        subjects[f"localllm, {Path(model).name}"] = lambda times, model=model: ours(model, times)
        if asked.llama_server and model.endswith(".gguf"):
            subjects[f"llama.cpp, {Path(model).name}"] = lambda times, model=model: llama_cpp(
                asked.llama_server, model, times
            )
    if asked.checkpoint is not None:
        subjects[f"transformers, {asked.checkpoint.name}"] = lambda times: transformers(
            asked.checkpoint, times
        )
    measured: dict[str, Times] = {name: defaultdict(list) for name in subjects}
    for number in range(asked.rounds + 1):
        for name, run in subjects.items():
            run(measured[name] if number else defaultdict(list))  # the first round only warms
    what = ["first token, cold", "first token, warm", "resident, MB"]
    sys.stdout.write(f"{'':44}{''.join(f'{each:>20}' for each in what)}" + "\n")
    for name, times in measured.items():
        sys.stdout.write(
            f"{name:44}{''.join(f'{statistics.median(times[each]):20.2f}' for each in what)}" + "\n"
        )
    made = copies(asked)
    for name, figures in made.items():
        sys.stdout.write(f"{name:44}{figures}" + "\n")
    if asked.json is not None:
        told = {"environment": describe_environment(None), "rounds": measured, "copies": made}
        asked.json.write_text(json.dumps(told, indent=1, default=str) + "\n")


if __name__ == "__main__":
    main()
