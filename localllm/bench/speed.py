"""Prefill and decode on their own, each with a fixed number of tokens."""

import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from localllm.bench.results import Result, Spread, Suite, percentile
from localllm.bench.subject import Subject
from localllm.cost.rates import Rates, Roofline, measure_rates
from localllm.engine.engine import Engine
from localllm.errors import RequestError
from localllm.schedule.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class SpeedTests:
    """The tests to run: prefill of `num_prompt` tokens at every depth, and decode of `num_decode`
    tokens at every depth and batch size; 0 leaves a test out.
    """

    num_prompt: int = 512
    num_decode: int = 128
    depths: tuple[int, ...] = (0,)
    batches: tuple[int, ...] = (1,)
    repeats: int = 5
    seed: int = 0

    def check(self, context_length: int, max_num_seqs: int) -> None:
        """Raises: RequestError for a test that cannot run."""
        for name, values, low in (
            ("prompt-tokens", (self.num_prompt,), 0),
            ("decode-tokens", (self.num_decode,), 0),
            ("depth", self.depths, 0),
            ("batch", self.batches, 1),
            ("repeats", (self.repeats,), 1),
        ):
            for value in values:
                if value < low:
                    raise RequestError(f"--{name} must be at least {low}, found {value}")
        longest = max(self.depths) + max(self.num_prompt, self.num_decode) + 2
        if longest > context_length:
            raise RequestError(
                f"the longest test has {longest:,} tokens, the context only {context_length:,}",
                hint="a smaller --depth, -p or -n, or a larger --ctx",
            )
        if max(self.batches) > max_num_seqs:
            raise RequestError(
                f"--batch {max(self.batches)} exceeds the limit of {max_num_seqs} requests a step",
                hint=f"--max-num-seqs {max(self.batches)}",
            )


@dataclass(frozen=True, slots=True)
class Prefill:
    """One prefill: the tokens computed, the cached ones before them, seconds to the first token."""

    num_tokens: int
    depth: int
    seconds: float


def run_prefill(engine: Engine, prompt: Sequence[int]) -> Prefill:
    """Compute the uncached part of a prompt, up to its first token."""
    started = time.perf_counter()
    engine.add_request(prompt, SamplingParams(temperature=0.0, max_tokens=1))
    while True:
        events = engine.step()
        if events:
            seconds = time.perf_counter() - started
            cached = events[0].num_cached_tokens
            return Prefill(len(prompt) - cached, cached, seconds)


def run_decode(engine: Engine, prompts: Sequence[Sequence[int]], num_tokens: int) -> list[float]:
    """Seconds of each decode step in which every request got a token, `num_tokens` steps or fewer.

    There are fewer if the prefill takes several steps: then some requests start earlier.
    """
    params = SamplingParams(temperature=0.0, max_tokens=num_tokens + 1, ignore_eos=True)
    for prompt in prompts:
        engine.add_request(prompt, params)
    waiting = len(prompts)
    seen: set[int] = set()
    while len(seen) < waiting:
        seen.update(event.request_id for event in engine.step())
    steps = []
    while engine.has_unfinished():
        started = time.perf_counter()
        events = engine.step()
        if len(events) == len(prompts):
            steps.append(time.perf_counter() - started)
    return steps


class SpeedSuite(Suite):
    """Runs every test once a round, so that all of them see the same noise."""

    def __init__(self, subject: Subject, tests: SpeedTests) -> None:
        self._subject, self._tests = subject, tests
        self._tokens = partial(subject.random_tokens, random.Random(tests.seed))
        depth = max(tests.depths)
        # Every depth is a prefix of these; once computed they are cached.
        self._prefixes = [self._tokens(depth) for _ in range(max(tests.batches))]
        self._limits: list[Rates] = []
        self._prefills: dict[int, list[Prefill]] = {depth: [] for depth in tests.depths}
        self._decodes: dict[tuple[int, int], list[list[float]]] = {
            (depth, batch): [] for depth in tests.depths for batch in tests.batches
        }

    def run(self, progress: Callable[[str], None]) -> None:
        self._warm_up()
        for _ in range(self._tests.repeats):
            self._limits.append(measure_rates(self._subject.device))
            for depth in self._prefills if self._tests.num_prompt else ():
                progress(self._name("pp", self._tests.num_prompt, depth, 1))
                prompt = self._prefixes[0][:depth] + self._tokens(self._tests.num_prompt)
                self._prefills[depth].append(run_prefill(self._subject.engine, prompt))
            for depth, batch in self._decodes if self._tests.num_decode else ():
                progress(self._name("tg", self._tests.num_decode, depth, batch))
                self._decodes[depth, batch].append(self._decode(depth, batch))

    def results(self) -> list[Result]:
        if not self._limits:
            return []
        limits = Rates.median(self._limits)
        rows = [
            self._prefill_row(depth, runs, limits) for depth, runs in self._prefills.items() if runs
        ]
        for (depth, batch), runs in self._decodes.items():
            if runs:
                rows.append(self._decode_row(depth, batch, runs, limits))
        return rows

    @property
    def limits(self) -> Rates | None:
        """The machine's rates, the median of all rounds; None before the first."""
        return Rates.median(self._limits) if self._limits else None

    def _warm_up(self) -> None:
        """Fill the cache that the tests rely on, and run every kernel once."""
        engine = self._subject.engine
        run_prefill(engine, self._tokens(max(1, self._tests.num_prompt)))
        for prefix in self._prefixes:
            run_decode(engine, [prefix or [0]], 2)

    def _decode(self, depth: int, batch: int) -> list[float]:
        prompts = [prefix[:depth] or [i] for i, prefix in enumerate(self._prefixes[:batch])]
        return run_decode(self._subject.engine, prompts, self._tests.num_decode)

    def _prefill_row(self, depth: int, runs: list[Prefill], limits: Rates) -> Result:
        work = self._subject.work
        seconds = Spread.of([run.seconds for run in runs])
        run = runs[-1]
        moved = work.weight_bytes(run.num_tokens)
        operations = work.prefill_operations(run.num_tokens, run.depth)
        roofline = Roofline.of(moved, operations, limits, self._subject.arithmetic)
        return Result(
            "speed",
            f"pp{self._tests.num_prompt}",
            {"batch": 1, "depth": depth},
            {
                "tokens_per_s": Spread.of([run.num_tokens / run.seconds for run in runs]),
                "ttft_s": seconds,
                **self._against_limit(roofline, moved, operations, seconds.median),
            },
            roofline.verdict(seconds.median),
        )

    def _decode_row(self, depth: int, batch: int, runs: list[list[float]], limits: Rates) -> Result:
        num_tokens, work = self._tests.num_decode, self._subject.work
        # Half-way through the test; the cost is linear in the context.
        contexts = [max(depth, 1) + (num_tokens + 1) // 2] * batch
        moved, operations = work.decode_bytes(contexts), work.decode_operations(contexts)
        roofline = Roofline.of(moved, operations, limits, self._subject.arithmetic)
        step_s = Spread.of([statistics.mean(steps) for steps in runs])
        steps = [step for run in runs for step in run]
        return Result(
            "speed",
            f"tg{num_tokens}",
            {"batch": batch, "depth": depth},
            {
                "tokens_per_s": Spread.of([batch / statistics.mean(run) for run in runs]),
                "time_per_token_s": {"p50": percentile(steps, 0.5), "p99": percentile(steps, 0.99)},
                **self._against_limit(roofline, moved, operations, step_s.median),
            },
            roofline.verdict(step_s.median),
        )

    def _against_limit(
        self, roofline: Roofline, num_bytes: int, operations: int, seconds: float
    ) -> dict[str, Any]:
        return {
            "share_of_limit": roofline.seconds / seconds,
            "bound": roofline.bound,
            "arithmetic": self._subject.arithmetic,
            "bytes": num_bytes,
            "operations": operations,
            "intensity": operations / num_bytes,
            "operations_per_s": operations / seconds,
        }

    def _name(self, kind: str, count: int, depth: int, batch: int) -> str:
        return f"{kind}{count} depth {depth:,} batch {batch}"
