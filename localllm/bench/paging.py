"""How much of the KV cache blocks waste, and how many more requests fit than in contiguous memory.

Counted with the engine's own scheduler, without a model.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from localllm.bench.prefix import new_request
from localllm.bench.results import ListedSuite, Result
from localllm.bench.workload import Mix
from localllm.schedule.block_group import BlockGroup
from localllm.schedule.block_pool import BlockPool
from localllm.schedule.scheduler import SampledToken, Scheduler, SchedulerConfig

MIX = Mix(num_requests=256, mean_prompt=400, mean_new=200)  # about 500 tokens in the cache
BLOCK_SIZES = (16, 32)
CACHE_TOKENS = 65536


class PagingSuite(ListedSuite):
    """A full queue of requests of 500 tokens on average, against a cache of 65,536."""

    def __init__(self, seed: int) -> None:
        self._mix = replace(MIX, seed=seed)
        super().__init__()

    def run(self, progress: Callable[[str], None]) -> None:
        for block_size in BLOCK_SIZES:
            progress(f"counting blocks of {block_size}")
            self._results.append(self._count(block_size))

    def _count(self, block_size: int) -> Result:
        usage = count_usage(self._mix, block_size, CACHE_TOKENS)
        # Contiguous memory would have to reserve room for the longest request.
        contiguous = CACHE_TOKENS // self._mix.max_tokens
        times = usage.mean_running / contiguous
        return Result(
            "paging",
            f"blocks of {block_size}",
            {
                "cache_tokens": CACHE_TOKENS,
                "mean_tokens": usage.mean_tokens,
                "longest": self._mix.max_tokens,
            },
            {
                "waste": usage.waste,
                "running": usage.mean_running,
                "running_contiguous": contiguous,
                "times": times,
            },
            f"{usage.waste:.1%} of the allocated memory is empty; {times:.1f} times the requests "
            f"of contiguous memory with {self._mix.max_tokens:,} tokens each",
        )


@dataclass(frozen=True, slots=True)
class Usage:
    """Averages over the steps in which the queue was not empty.

    `waste`: share of the slots in allocated blocks that hold no token; `mean_tokens`: cached
    tokens of a running request.
    """

    waste: float
    mean_running: float
    mean_tokens: float


def count_usage(mix: Mix, block_size: int, cache_tokens: int) -> Usage:
    """Run the scheduler alone over a full queue of `mix`."""
    group = BlockGroup(BlockPool(cache_tokens // block_size + 1), block_size)
    config = SchedulerConfig(block_size, mix.num_requests, 1 << 30, False, b"root")
    scheduler = Scheduler(config, [group])
    for i, request in enumerate(mix.draw()):
        scheduler.add(new_request(i, list(request.prompt), request.num_new))
    slots = tokens = running = steps = 0
    while scheduler.has_unfinished():
        batch = scheduler.schedule()
        slots += sum(len(each.request.tables[0]) * block_size for each in batch.requests)
        tokens += sum(each.end for each in batch.requests)
        running += len(batch.requests)
        steps += 1
        scheduler.update(batch, [[SampledToken(0)] for _ in batch.requests])
    return Usage(1 - tokens / slots, running / steps, tokens / running)
