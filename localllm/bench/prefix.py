"""What the prefix cache gains and costs: a prompt whose prefix was computed before, and the
cache's own time in a step.
"""

import random
import time
from collections.abc import Callable
from functools import partial

from localllm.bench.results import Result, Spread, Suite
from localllm.bench.speed import run_decode, run_prefill
from localllm.bench.subject import Subject
from localllm.schedule.block_group import BlockGroup
from localllm.schedule.block_pool import BlockPool
from localllm.schedule.request import Request
from localllm.schedule.sampling_params import SamplingParams
from localllm.schedule.scheduler import SampledToken, Scheduler, SchedulerConfig

SHARED = 0.9


class PrefixSuite(Suite):
    """Prompts of `num_tokens` tokens of which the first nine tenths are shared."""

    def __init__(self, subject: Subject, num_tokens: int, repeats: int, seed: int) -> None:
        self._subject, self._num_tokens, self._repeats = subject, num_tokens, repeats
        self._tokens = partial(subject.random_tokens, random.Random(seed))
        self._ratios: list[float] = []
        self._warm: list[float] = []
        self._cost: Result | None = None

    def results(self) -> list[Result]:
        rows = []
        if self._ratios:
            times = Spread.of(self._ratios)
            rows.append(
                Result(
                    "prefix",
                    f"{SHARED:.0%} of {self._num_tokens:,} shared",
                    {"prompt_tokens": self._num_tokens, "shared": SHARED},
                    {"ttft_s": Spread.of(self._warm), "times": times},
                    f"first token {times.median:.1f} times sooner",
                )
            )
        return rows + ([self._cost] if self._cost is not None else [])

    def run(self, progress: Callable[[str], None]) -> None:
        """Alternate prompts that share nothing with prompts that share a prefix."""
        engine = self._subject.engine
        num_shared = int(self._num_tokens * SHARED)
        shared = self._tokens(num_shared)
        run_prefill(engine, shared)
        for _ in range(self._repeats):
            progress("nothing shared")
            cold = run_prefill(engine, self._tokens(self._num_tokens))
            progress("prefix shared")
            warm = run_prefill(engine, shared + self._tokens(self._num_tokens - num_shared))
            self._warm.append(warm.seconds)
            self._ratios.append(cold.seconds / warm.seconds)
        progress("the cache's own time")
        prompts = [self._tokens(64) for _ in range(min(16, self._max_num_seqs))]
        steps = run_decode(engine, prompts, 32)
        self._cost = self._own_time(sum(steps) / len(steps), len(prompts))

    @property
    def _max_num_seqs(self) -> int:
        return self._subject.engine.scheduler.config.max_num_seqs

    def _own_time(self, step_s: float, batch: int) -> Result:
        """The time to hash, register and look up blocks, as a share of a decode step.

        The scheduler runs without a model, with the cache and without it; the difference is the
        cache's time.
        """
        with_cache, without = (
            min(scheduling_time(is_enabled, batch) for _ in range(5))
            for is_enabled in (True, False)
        )
        own_s = max(0.0, with_cache - without)
        return Result(
            "prefix",
            f"the cache's own time, batch {batch}",
            {"batch": batch},
            {"own_s": own_s, "step_s": step_s, "share_of_step": own_s / step_s},
            f"{own_s / step_s:.2%} of a step",
        )


def scheduling_time(enable_prefix_caching: bool, batch: int, num_steps: int = 256) -> float:
    """Average seconds that the scheduler takes for a decode step of `batch` requests."""
    config = SchedulerConfig(16, batch, 4096, enable_prefix_caching, b"root")
    pool = BlockPool(batch * (64 + num_steps) // 16 + batch + 1)
    scheduler = Scheduler(config, [BlockGroup(pool, config.block_size)])
    for i in range(batch):
        scheduler.add(new_request(i, [i] * 64, num_steps + 1))
    started = 0.0
    for step in range(num_steps):
        if step == 1:  # prefill is done
            started = time.perf_counter()
        scheduled = scheduler.schedule()
        scheduler.update(scheduled, [[SampledToken(step)] for _ in scheduled.requests])
    return (time.perf_counter() - started) / (num_steps - 1)


def new_request(request_id: int, prompt: list[int], num_new: int) -> Request:
    """A greedy request as the engine would queue it."""
    params = SamplingParams(temperature=0.0, max_tokens=num_new)
    return Request(
        request_id=request_id,
        sample=0,
        num_prompt_tokens=len(prompt),
        token_ids=prompt,
        params=params,
        seed=0,
        stop_token_ids=frozenset(),
        max_total_tokens=len(prompt) + num_new,
        parent=None,
    )
