"""Drafters for tests: one that knows the answers and errs at times, a policy that never learns."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random

import torch

from localllm.drafting.draft_model import DraftModel
from localllm.drafting.draft_policy import DraftPolicy, Plan, Proposals
from localllm.drafting.drafter import Drafter, Proposal
from localllm.drafting.ngram import NgramDrafter
from localllm.drafting.speculator import PlannedStep, Proposer, Speculator
from localllm.engine.device_runner import DeviceRunner
from localllm.engine.model_runner import ModelRunner
from localllm.model.architecture import SlotSizes
from localllm.model.decoder import DecoderModel
from localllm.model.paged_kv_cache import PagedKVCache
from localllm.operators.device import Device
from localllm.schedule.request import Request
from localllm.schedule.runner import HeadRunner
from localllm.schedule.scheduler import ScheduledBatch, SchedulerConfig
from localllm.schedule.step_clock import StepClock

VOCAB_SIZE = 259


class EagerPolicy(DraftPolicy):
    """Whole proposals, whatever becomes of them, of the drafter with the longest one."""

    is_asking = True

    def __init__(self, is_cheap: Sequence[bool], clock: StepClock) -> None:
        super().__init__(is_cheap, clock)
        for account in self.accounts:
            account.is_used = True  # so that its drafter sees all hidden states

    def asked(self, *, is_measured: bool = True) -> list[int]:
        return list(range(len(self.accounts))) if self.is_asking else []

    def idle_steps(self) -> int:
        return 0

    def plan(
        self, size: int, proposals: Proposals, most: int, *, is_measured: bool = True
    ) -> Plan | None:
        # Of who proposes the most for one request.
        longest = {
            number: max(len(each.token_ids) for each in own.values())
            for number, own in proposals.items()
            if own
        }
        if not longest or not max(longest.values()):
            return None
        number, lengths = max(longest, key=lambda each: (longest[each], each)), dict[Request, int]()
        for request, proposal in proposals[number].items():
            count = min(len(proposal.token_ids), most)
            if count:
                lengths[request] = count
            most -= count
        return Plan(number, lengths, 0.0, 1.0)


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
        clock: StepClock | None = None,
        now: Callable[[], float] = time.perf_counter,
    ) -> None:
        super().__init__(proposers, max_draft, clock, now)
        self._policy: EagerPolicy = EagerPolicy([False] * len(proposers), StepClock(len(proposers)))
        self._random = Random(0)

    def plan(
        self, running: Sequence[Request], *, is_ahead: bool = False
    ) -> Mapping[Request, Sequence[int]] | None:
        self._policy.is_asking = not is_ahead or self._random.random() < 0.8
        return super().plan(running, is_ahead=is_ahead)


class KeptDrafts(EagerSpeculator):
    """Keeps what was drafted, by the text before it."""

    drafts: dict[tuple[int, ...], list[int]]

    def fill(self, batch: ScheduledBatch) -> PlannedStep | None:
        planned = super().fill(batch)
        self.drafts = getattr(self, "drafts", {})
        for entry in batch.requests:
            if entry.draft:
                self.drafts[tuple(entry.request.token_ids)] = list(entry.draft)
        return planned


def eager(drafter: Drafter, max_draft: int) -> EagerSpeculator:
    """With one drafter."""
    return EagerSpeculator([Proposer("test", drafter)], max_draft)


def ngram_speculator(max_draft: int, min_match: int = 1) -> Speculator:
    """Whatever has stood before is drafted, as long as allowed."""
    drafter = NgramDrafter(min_match, 6)
    return eager(drafter, max_draft)


def oracle_speculator(
    answer: Callable[[Request], Sequence[int]], error_rate: float, max_draft: int
) -> Speculator:
    return eager(Oracle(answer, error_rate), max_draft)


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
    dtype = draft.embedding.dtype
    # A slot for each request that an engine of the tests may run at once.
    slots = SlotSizes(64, max_draft)
    kv_cache = PagedKVCache.allocate(draft.architecture, counts, block_size, dtype, cpu, slots)
    tables = [table] * len(groups)
    runner: HeadRunner = ModelRunner(draft, kv_cache, tables=tables)
    if device is not None:
        limits = SchedulerConfig(block_size, 64, max_tokens, False, b"")
        runner = DeviceRunner(draft, kv_cache, device, limits, 256, tables=tables)
    drafter = DraftModel(runner, kv_cache, 256, max_tokens, table)
    return eager(drafter, max_draft)


def together(*speculators: Speculator) -> Speculator:
    """One speculator with the drafters of several."""
    proposers = [each for one in speculators for each in one._proposers]
    return EagerSpeculator(proposers, max(one._max_draft for one in speculators))
