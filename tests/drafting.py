"""Drafters for tests: one that knows the answers and errs at times, lengths that never learn."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random

import torch

from localllm.drafting.draft_lengths import Candidate, DraftLengths, Offer
from localllm.drafting.draft_model import DraftModel
from localllm.drafting.drafter import Drafter, Proposal
from localllm.drafting.ngram import NgramDrafter
from localllm.drafting.speculation import Proposer, Speculator
from localllm.engine.device_runner import DeviceRunner
from localllm.engine.model_runner import ModelRunner
from localllm.model.architecture import SlotSizes
from localllm.model.decoder import DecoderModel
from localllm.model.paged_kv_cache import PagedKVCache
from localllm.operators.device import Device
from localllm.schedule.request import Request
from localllm.schedule.runner import HeadRunner
from localllm.schedule.scheduler import ScheduledBatch, SchedulerConfig

VOCAB_SIZE = 259


class FullLengths(DraftLengths):
    """Whole proposals, whatever becomes of them."""

    def offer(
        self,
        num_rows: int,
        num_decoding: int,
        candidates: Sequence[Candidate | None],
        most: int,
        *,
        goes_on: bool = False,
    ) -> Offer:
        counts = [0 if each is None else each.num_tokens for each in candidates]
        # The same chance for all, so that the dearest drafter with a proposal wins.
        ranked = [(1.0, i) for i, count in enumerate(counts) for _ in range(count)]
        return Offer([[1.0] * count for count in counts], ranked, len(ranked), len(ranked))

    def plain_seconds(self, num_rows: int) -> float | None:
        return None

    def knows_enough(self, num_rows: int) -> bool:
        return True


@dataclass
class Oracle(Drafter):
    """Proposes what a request will say, with errors; `answers`: by prompt and seed, or any text."""

    answer: Callable[[Request], Sequence[int]]
    error_rate: float
    random: Random = field(default_factory=lambda: Random(0))

    @property
    def is_cheap(self) -> bool:
        return True

    def propose(self, request: Request, count: int) -> Proposal | None:
        said = request.num_generated_tokens
        tokens = list(self.answer(request)[said : said + self.random.randint(0, count)])
        # Beyond the end, and now and then within, something else.
        tokens += [self.random.randrange(VOCAB_SIZE) for _ in range(self.random.randint(0, 2))]
        for i in range(len(tokens)):
            if self.random.random() < self.error_rate:
                tokens[i] = self.random.randrange(VOCAB_SIZE)
        return Proposal(tokens[:count], 0) if tokens else None


class EagerSpeculator(Speculator):
    """Looks at every step, and where steps overlap, waits for the ids of most of them."""

    def __init__(
        self,
        proposers: Sequence[Proposer],
        max_draft: int,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        super().__init__(proposers, max_draft, clock)
        self._random = Random(0)

    def propose(self, running: Sequence[Request], budget: int) -> Mapping[Request, Sequence[int]]:
        self._num_quiet = 0
        return super().propose(running, budget)

    def wants_ids(self) -> bool:
        return self._random.random() < 0.8


class Proposals(EagerSpeculator):
    """Keeps what was drafted, by the text before it."""

    drafts: dict[tuple[int, ...], list[int]]

    def complete(self, batch: ScheduledBatch) -> None:
        super().complete(batch)
        self.drafts = getattr(self, "drafts", {})
        for entry in batch.requests:
            if entry.draft:
                self.drafts[tuple(entry.request.token_ids)] = list(entry.draft)


def eager(drafter: Drafter, lengths: DraftLengths, max_draft: int) -> EagerSpeculator:
    """With one drafter."""
    return EagerSpeculator([Proposer("test", drafter, lengths)], max_draft)


def ngram_speculator(max_draft: int, min_match: int = 1) -> Speculator:
    """Whatever has stood before is drafted, as long as allowed."""
    drafter = NgramDrafter(min_match, 6)
    return eager(drafter, FullLengths(7), max_draft)


def oracle_speculator(
    answer: Callable[[Request], Sequence[int]], error_rate: float, max_draft: int
) -> Speculator:
    return eager(Oracle(answer, error_rate), FullLengths(1), max_draft)


def model_speculator(
    draft: DecoderModel,
    num_blocks: int,
    block_size: int,
    max_draft: int,
    max_tokens: int,
    device: Device | None = None,
    table: int = 0,
) -> Speculator:
    """`draft` drafts for a model whose cache has `num_blocks` blocks, without the null block, and
    whose full group is the one of number `table`; on a `device`, if there is one.
    """
    groups, cpu = draft.architecture.cache_groups, torch.device("cpu")
    counts = [num_blocks + 1] * len(groups)
    dtype = draft.embedding.table.dtype
    # A slot for each request that an engine of the tests may run at once.
    slots = SlotSizes(64, max_draft)
    kv_cache = PagedKVCache.allocate(draft.architecture, counts, block_size, dtype, cpu, slots)
    tables = [table] * len(groups)
    runner: HeadRunner = ModelRunner(draft, kv_cache, tables=tables)
    if device is not None:
        limits = SchedulerConfig(block_size, 64, max_tokens, False, b"")
        runner = DeviceRunner(draft, kv_cache, device, limits, 256, tables=tables)
    drafter = DraftModel(runner, kv_cache, 256, max_tokens, table)
    return eager(drafter, FullLengths(1), max_draft)


def together(*speculators: Speculator) -> Speculator:
    """One speculator with the drafters of several."""
    proposers = [each for one in speculators for each in one._proposers]
    return EagerSpeculator(proposers, max(one._max_draft for one in speculators))
