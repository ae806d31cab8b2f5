"""Compare with llama.cpp: the same shape with random 4-bit weights in both, alternating.

    pip install llama-cpp-python gguf          (it compiles; some minutes)
    python tools/bench/against_llama_cpp.py [--model qwen3-0.6b] [--contended] [--json FILE]

Prefill of one prompt, and decode in batches, in each round ours and then theirs; with `--contended`
decode alone and beside busy processes instead. Both run with as many threads as torch has.
llama.cpp repacks its weights for this processor, as it does by default. Our head is int8, theirs
the Q6_K head that Q4_0 files have.
"""

import argparse
import random
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import llama_cpp as llama
import torch

from llama_cpp_model import write_gguf
from localllm.bench.compare import ratio_row
from localllm.bench.contended import LOADS, busy_processes, contended_row
from localllm.bench.environment import describe_environment
from localllm.bench.report import Report, describe_model
from localllm.bench.results import Result
from localllm.bench.speed import run_decode, run_prefill
from localllm.bench.subject import Subject, open_random
from localllm.engine.config import EngineConfig

CONTEXT = 1024


class TheirModel:
    """A llama.cpp context, driven through its batches as llama.cpp's own bench does."""

    def __init__(self, path: Path, max_batch: int) -> None:
        llama.llama_backend_init()
        model_params = llama.llama_model_default_params()
        self._model = llama.llama_model_load_from_file(str(path).encode(), model_params)
        params = llama.llama_context_default_params()
        params.n_ctx = CONTEXT * max_batch
        params.n_batch = params.n_ubatch = 512
        params.n_seq_max = max_batch
        params.n_threads = params.n_threads_batch = torch.get_num_threads()
        self._context = llama.llama_init_from_model(self._model, params)
        self._batch = llama.llama_batch_init(512, 0, 1)
        if not self._model or not self._context:
            raise SystemExit("llama.cpp cannot load the model")

    def prefill(self, token_ids: list[int]) -> float:
        """Seconds to compute the logits after a prompt."""
        self._clear()
        started = time.perf_counter()
        self._decode([(token, i, 0) for i, token in enumerate(token_ids)], [len(token_ids) - 1])
        return time.perf_counter() - started

    def decode(self, prompts: list[int], num_tokens: int) -> float:
        """Average seconds of a step, after prompts of one token."""
        self._clear()
        rows = list(range(len(prompts)))
        tokens = self._likeliest([(token, 0, seq) for seq, token in enumerate(prompts)], rows)
        started = time.perf_counter()
        for position in range(1, num_tokens + 1):
            tokens = self._likeliest(
                [(token, position, seq) for seq, token in enumerate(tokens)], rows
            )
        return (time.perf_counter() - started) / num_tokens

    def _clear(self) -> None:
        llama.llama_memory_clear(llama.llama_get_memory(self._context), True)

    def _decode(self, tokens: list[tuple[int, int, int]], outputs: list[int]) -> None:
        batch = self._batch
        batch.n_tokens = len(tokens)
        for i, (token, position, seq) in enumerate(tokens):
            batch.token[i], batch.pos[i] = token, position
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, seq
            batch.logits[i] = 0
        for i in outputs:
            batch.logits[i] = 1
        if llama.llama_decode(self._context, batch) != 0:
            raise SystemExit("llama.cpp failed")
        llama.llama_synchronize(self._context)

    def _likeliest(self, tokens: list[tuple[int, int, int]], outputs: list[int]) -> list[int]:
        """Stand-ins for the next tokens, so that llama.cpp pays for no search in Python."""
        self._decode(tokens, outputs)
        return [(token * 31 + 7) % 50_000 for token, _, _ in tokens]


def compare_speeds(
    subject: Subject, theirs: TheirModel, args: argparse.Namespace
) -> Iterator[Result]:
    """Rows of speeds side by side; each is also printed."""
    rng = random.Random(0)
    tests = [("pp", args.p, 1), *(("tg", args.n, batch) for batch in args.batch)]
    found: dict[tuple[str, int, int], list[tuple[float, float]]] = {test: [] for test in tests}
    for repeat in range(args.r + 1):  # the first warms up
        for test in tests:
            kind, count, batch = test
            if kind == "pp":
                ids = [rng.randrange(50_000) for _ in range(count)]
                pair = (
                    count / run_prefill(subject.engine, ids).seconds,
                    count / theirs.prefill(ids),
                )
            else:
                prompts = [rng.randrange(50_000) for _ in range(batch)]
                steps = run_decode(subject.engine, [[token] for token in prompts], count)
                pair = (batch / statistics.mean(steps), batch / theirs.decode(prompts, count))
            if repeat:
                found[test].append(pair)
    for (kind, count, batch), pairs in found.items():
        row = ratio_row(f"{kind}{count}", batch, pairs, "llama.cpp Q4_0")
        ours, their, times = (
            row.found[name] for name in ("tokens_per_s", "their_tokens_per_s", "times")
        )
        sys.stdout.write(
            f"{kind}{count} batch {batch}: ours {ours.median:.1f}, llama.cpp {their.median:.1f} "
            f"tokens/s; {times.median:.2f} times ({times.min:.2f} to {times.max:.2f})\n"
        )
        yield row


def compare_beside_work(
    subject: Subject, theirs: TheirModel, args: argparse.Namespace
) -> Iterator[Result]:
    """Rows of the decode speed that each keeps beside other work, batch 1; each is also printed."""
    engines = {
        "localllm": lambda: 1 / statistics.mean(run_decode(subject.engine, [[1]], args.n)),
        "llama.cpp": lambda: 1 / theirs.decode([1], args.n),
    }
    pairs: dict[tuple[str, int], list[tuple[float, float]]] = defaultdict(list)
    for repeat in range(args.r + 1):  # the first warms up
        for load in LOADS:
            for name, measure in engines.items():
                alone = measure()
                with busy_processes(load):
                    beside = measure()
                if repeat:
                    pairs[name, load].append((alone, beside))
    for (name, load), measured in sorted(pairs.items()):
        row = contended_row(f"{name} tg{args.n}", load, measured)
        kept, alone_speed = row.found["kept"], row.found["alone_tokens_per_s"]
        sys.stdout.write(
            f"{row.test}: {row.verdict} ({kept.min:.2f} to {kept.max:.2f}); "
            f"alone {alone_speed.median:.1f} tokens/s\n"
        )
        yield row


def main() -> None:
    """Alternate, and print the rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="qwen3-0.6b")
    parser.add_argument("-p", type=int, default=512)
    parser.add_argument("-n", type=int, default=64)
    parser.add_argument("-r", type=int, default=5)
    parser.add_argument("--batch", type=int, nargs="*", default=[1, 4, 16])
    parser.add_argument("--contended", action="store_true")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    config = EngineConfig(max_num_seqs=max(args.batch))
    subject = open_random(args.model, "int4", config, CONTEXT, seed=0)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.gguf"
        write_gguf(path, subject.architecture)
        theirs = TheirModel(path, max(args.batch))
    compare = compare_beside_work if args.contended else compare_speeds
    rows = list(compare(subject, theirs, args))
    if args.json is not None:
        place = describe_environment(subject.device)
        place["versions"]["llama-cpp-python"] = llama.__version__
        Report(place, describe_model(subject), None, 0, rows).write(args.json)


if __name__ == "__main__":
    main()
