"""Schedulers and requests for tests, without a model."""

from collections.abc import Sequence

from localllm.schedule.block_group import BlockGroup
from localllm.schedule.block_pool import BlockPool
from localllm.schedule.prefix_cache import PrefixStore
from localllm.schedule.request import Request
from localllm.schedule.sampling_params import SamplingParams
from localllm.schedule.scheduler import (
    ScheduledBatch,
    ScheduledRequest,
    Scheduler,
    SchedulerConfig,
)


def make_scheduler(
    num_blocks: int,
    budget: int = 64,
    seqs: int = 8,
    size: int = 4,
    store: PrefixStore | None = None,
    windows: Sequence[int | None] = (None,),
) -> Scheduler:
    """`num_blocks`: of each group, one for each of `windows`, without the null block."""
    config = SchedulerConfig(size, seqs, budget, enable_prefix_caching=True, cache_root=b"r")
    groups = [BlockGroup(BlockPool(num_blocks + 1), size, window) for window in windows]
    return Scheduler(config, groups, store)


def make_request(request_id: int, num_prompt: int, max_tokens: int = 4, base: int = 0) -> Request:
    return Request(
        request_id=request_id,
        sample=0,
        num_prompt_tokens=num_prompt,
        token_ids=[base + i for i in range(num_prompt)],
        params=SamplingParams(),
        seed=0,
        stop_token_ids=frozenset(),
        max_total_tokens=num_prompt + max_tokens,
    )


def caught_up(request: Request, draft: Sequence[int] = ()) -> ScheduledRequest:
    """All of a request's tokens in one step, and a draft."""
    count = len(request.token_ids) + len(draft)
    return ScheduledRequest(request, 0, count, catches_up=True, draft=draft)


def counts(batch: ScheduledBatch) -> dict[int, int]:
    return {entry.request.request_id: entry.num_scheduled_tokens for entry in batch.requests}
