"""Many requests against one engine: throughput, latencies, and the gain from batching."""

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from localllm.bench.results import ListedSuite, Result, percentile
from localllm.bench.subject import Subject
from localllm.bench.workload import LoadRequest, Mix
from localllm.engine.engine import Engine
from localllm.schedule.sampling_params import SamplingParams

CONCURRENCIES = (1, 2, 4, 8, 16, 32, 64)
# Poisson arrivals at these shares of the throughput that the engine reaches with a full queue.
LOADS = (0.5, 0.8)


@dataclass(slots=True)
class Timeline:
    """When a request arrived and when its tokens came, in seconds from the start of the run.

    `reported_tokens`: the server's count, since one chunk may carry several tokens.
    """

    arrival_s: float
    token_s: list[float] = field(default_factory=list)
    reported_tokens: int | None = None

    @property
    def num_tokens(self) -> int:
        """Generated tokens."""
        return len(self.token_s) if self.reported_tokens is None else self.reported_tokens

    @property
    def ttft_s(self) -> float:
        """Time to first token."""
        return self.token_s[0] - self.arrival_s

    @property
    def total_s(self) -> float:
        """Time to last token."""
        return self.token_s[-1] - self.arrival_s

    @property
    def time_per_token_s(self) -> float | None:
        """Mean time between tokens; None for a single token."""
        count = self.num_tokens - 1
        return (self.token_s[-1] - self.token_s[0]) / count if count else None


@dataclass(frozen=True, slots=True)
class LoadRun:
    """The answered requests, the seconds from start to end, and how many got no answer."""

    timelines: list[Timeline]
    seconds: float
    num_failed: int = 0

    @property
    def num_tokens(self) -> int:
        """Generated tokens."""
        return sum(each.num_tokens for each in self.timelines)

    @property
    def tokens_per_s(self) -> float:
        """Generated tokens per second of the whole run."""
        return self.num_tokens / self.seconds

    def latencies(self) -> dict[str, dict[str, float]]:
        """Percentiles of time to first token, time per token and time to the end."""
        paces = [each.time_per_token_s for each in self.timelines]
        series = {
            "ttft_s": [each.ttft_s for each in self.timelines],
            "time_per_token_s": [pace for pace in paces if pace is not None],
            "total_s": [each.total_s for each in self.timelines],
        }
        return {
            name: {"p50": percentile(values, 0.5), "p99": percentile(values, 0.99)}
            for name, values in series.items()
            if values
        }


def run_requests(
    engine: Engine, requests: Sequence[LoadRequest], max_at_once: int | None = None
) -> LoadRun:
    """Submit each request when it arrives, at most `max_at_once` at a time, and step the engine.

    The time that a request waits to be submitted counts towards its latency.
    """
    started = time.perf_counter()
    waiting = deque(requests)
    timelines: dict[int, Timeline] = {}
    num_open = 0
    while waiting or num_open:
        now = time.perf_counter() - started
        while (
            waiting
            and waiting[0].arrival_s <= now
            and (max_at_once is None or num_open < max_at_once)
        ):
            request = waiting.popleft()
            params = SamplingParams(temperature=0.0, max_tokens=request.num_new, ignore_eos=True)
            request_id = engine.add_request(request.prompt, params)
            timelines[request_id] = Timeline(request.arrival_s)
            num_open += 1
        if not num_open:
            time.sleep(max(0.0, waiting[0].arrival_s - now))
            continue
        events = engine.step()
        now = time.perf_counter() - started
        for event in events:
            if event.token_id is not None:
                timelines[event.request_id].token_s.append(now)
            if event.finish_reason is not None:
                num_open -= 1
    answered = [each for each in timelines.values() if each.token_s]
    seconds = time.perf_counter() - started
    return LoadRun(answered, seconds, num_failed=len(timelines) - len(answered))


def run_static(engine: Engine, requests: Sequence[LoadRequest], batch: int) -> float:
    """Seconds for the requests in fixed batches, as a plain generation loop runs them.

    A batch starts when the previous one has ended. Its prompts are padded to the longest, and
    every row is computed until the longest answer is complete.
    """
    started = time.perf_counter()
    for first in range(0, len(requests), batch):
        together = requests[first : first + batch]
        num_prompt = max(len(request.prompt) for request in together)
        num_new = max(request.num_new for request in together)
        padded = [
            LoadRequest((*request.prompt, *[i] * (num_prompt - len(request.prompt))), num_new)
            for i, request in enumerate(together)
        ]
        run_requests(engine, padded)
    return time.perf_counter() - started


class LoadSuite(ListedSuite):
    """A full queue, Poisson arrivals, static batches, and fixed numbers of requests at once."""

    def __init__(self, subject: Subject, mix: Mix, static_batch: int = 16) -> None:
        self._subject, self._mix, self._static_batch = subject, mix, static_batch
        super().__init__()

    def run(self, progress: Callable[[str], None]) -> None:
        """Measure everything, the full queue first: its throughput sets the arrival rates."""
        engine, mix = self._subject.engine, self._mix
        progress("warming up")
        run_requests(engine, mix.draw()[:4])
        progress("full queue")
        full = run_requests(engine, _fresh(mix, 1).draw())
        self._results.append(load_row("full queue", {"requests": mix.num_requests}, full))
        rate = mix.num_requests / full.seconds
        for i, load in enumerate(LOADS):
            progress(f"arrivals at {load:.0%} of that rate")
            run = run_requests(engine, _fresh(mix, 6 + i).draw(rate * load))
            conditions = {"requests": mix.num_requests, "requests_per_s": rate * load}
            self._results.append(load_row(f"load {load:.0%}", conditions, run))
        progress("static batches")
        requests = _fresh(mix, 3).draw()
        static_s = run_static(engine, requests, self._static_batch)
        progress("the same with continuous batching")
        # The same lengths with other tokens: the earlier ones are cached.
        others = [
            replace(each, prompt=tuple((token + 1) % mix.vocab_size for token in each.prompt))
            for each in requests
        ]
        self._compare_static(static_s, run_requests(engine, others, self._static_batch))
        self._at_once(progress)

    def _compare_static(self, static_s: float, continuous: LoadRun) -> None:
        ratio = static_s / continuous.seconds
        self._results.append(
            Result(
                "batching",
                f"against static batches of {self._static_batch}",
                {"at_once": self._static_batch, "requests": self._mix.num_requests},
                {"tokens_per_s": continuous.tokens_per_s, "times": ratio},
                f"{ratio:.1f} times the throughput of static batches on the same lengths",
            )
        )

    def _at_once(self, progress: Callable[[str], None]) -> None:
        """Decoding alone: the prompts are cached, so that a step computes one token per request."""
        engine = self._subject.engine
        alone: float | None = None
        size = engine.scheduler.config.block_size
        requests = [
            # All but the last token fill whole blocks, so that only the last is left to compute.
            replace(each, prompt=(*each.prompt[: len(each.prompt) // size * size], 0))
            for each in _fresh(self._mix, 5).draw()
        ]
        run_requests(engine, [replace(each, num_new=1) for each in requests])
        for count in CONCURRENCIES:
            if count > engine.scheduler.config.max_num_seqs:
                break
            progress(f"{count} at once")
            # Small batches are slow, and need no large sample.
            sample = requests[: 4 * count]
            speed = run_requests(engine, sample, count).tokens_per_s
            alone = alone or speed
            self._results.append(
                Result(
                    "batching",
                    f"{count} at once",
                    {"at_once": count, "requests": len(sample)},
                    {"tokens_per_s": speed, "times": speed / alone},
                    f"{speed / alone:.1f} times the speed of one at a time",
                )
            )


def load_row(test: str, conditions: Mapping[str, float], run: LoadRun) -> Result:
    """The row of a run."""
    latencies = run.latencies()
    first = latencies["ttft_s"]
    failed = f"{run.num_failed} got no answer; " if run.num_failed else ""
    return Result(
        "load",
        test,
        dict(conditions),
        {"tokens_per_s": run.tokens_per_s, "failed": run.num_failed, **latencies},
        f"{failed}half wait under {first['p50']:.2f} s for their first token, 99 % under "
        f"{first['p99']:.2f} s",
    )


def _fresh(mix: Mix, number: int) -> Mix:
    """The same kind of requests with other tokens, so that none of them is cached."""
    return replace(mix, seed=mix.seed * 1000 + number)
