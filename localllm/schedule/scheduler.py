"""Decides which tokens of which requests are computed in the next step.

There is no prefill phase and no decode phase. A request has `num_tokens` tokens, of which
`num_computed_tokens` have their keys and values in the cache. Every step gives requests some
tokens, within one token budget, until they have caught up; a request that has caught up gets its
next token sampled. A long prompt is computed in chunks, a prefix found in the cache is a head
start, a preempted request starts again from 0: all the same thing with other numbers. A draft,
proposed next tokens, is computed after the newest token, and each of its positions is sampled:
tokens that agree with it are accepted, and the rest was computed for nothing.

Ownership: a request holds one reference to each block in its `tables`, one table per cache group,
from admission until it ends, is preempted, or the block falls out of a window. Blocks before
`num_computed_tokens // block_size` are full and may be shared; the block that is written next
belongs to its request alone, or is copied first.
"""

from __future__ import annotations

import sys
from array import array
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from localllm.errors import RequestError, StepMemoryError
from localllm.schedule.block_group import BlockGroup
from localllm.schedule.block_pool import NULL_BLOCK_ID
from localllm.schedule.logprobs import TokenLogprobs
from localllm.schedule.prefix_cache import Prefix, PrefixCache, PrefixStore
from localllm.schedule.request import (
    FinishReason,
    Request,
    RequestStatus,
    TokenEvent,
)
from localllm.schedule.snapshots import Snapshots, positions

if TYPE_CHECKING:
    from torch import Tensor

# When memory runs out, a request's steps are not made smaller than this many tokens.
MIN_CHUNK = 64


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Limits of one step, and of the cache."""

    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    enable_prefix_caching: bool
    cache_root: bytes


class ScheduledRequest(NamedTuple):
    """`num_scheduled_tokens` tokens of a request, from position `start` on, its `draft` last.

    `catches_up`: whether they include its newest token, so that the next can be sampled; otherwise
    there is no draft. `stands`: where the states of recurrences stand, see StateSlots; with
    `keeps_state` they are left there. `num_skipped`: blocks at the front of its tables that are not
    seen; the model's positions begin behind them. `num_seen`: where the tokens have no entries in
    the cache, how many they see there; they stand behind these.
    """

    request: Request
    start: int
    num_scheduled_tokens: int
    catches_up: bool
    draft: Sequence[int] = ()
    stands: int = 0
    keeps_state: bool = False
    num_skipped: int = 0
    num_seen: int | None = None

    @property
    def end(self) -> int:
        """One past the last scheduled token, draft included."""
        return self.start + self.num_scheduled_tokens

    @property
    def known_end(self) -> int:
        """One past the last scheduled token, draft excluded: the first position that is sampled."""
        return self.end - len(self.draft)

    @property
    def token_ids(self) -> list[int]:
        """The ids of the scheduled tokens, without the newest if that is still pending."""
        return [*self.request.token_ids[self.start : self.known_end], *self.draft]

    @property
    def num_samples(self) -> int:
        """The number of sampled positions: after the newest token, and after each drafted one."""
        return 1 + len(self.draft) if self.catches_up else 0

    @property
    def num_scored(self) -> int:
        """How many of the tokens, from the first on, tell how likely the next of the prompt is."""
        if self.request.scores is None:
            return 0
        return max(0, min(self.end, self.request.num_prompt_tokens - 1) - self.start)


class BlockCopy(NamedTuple):
    """A copy of a block to another block of the same cache group."""

    group: int
    source: int
    target: int


@dataclass(frozen=True, slots=True)
class StateLoad:
    """The snapshot that a request starts from: `values` are of the tokens before `position`."""

    slot: int
    position: int
    values: Tensor


@dataclass(slots=True)
class StateSave:
    """A snapshot of the state of the batch's request `index` at `position`, within a step, which
    copies it to `slot`; the runner then fills in `values`. `rolls`: see snapshots.py.
    """

    index: int
    position: int
    slot: int
    rolls: bool
    values: Tensor | None = None


@dataclass(frozen=True, slots=True)
class ScheduledBatch:
    """One step's work. `block_copies` and `state_loads` must be done first, in order."""

    requests: list[ScheduledRequest] = field(default_factory=list)
    block_copies: list[BlockCopy] = field(default_factory=list)
    state_loads: list[StateLoad] = field(default_factory=list)
    state_saves: list[StateSave] = field(default_factory=list)

    @property
    def scores_prompts(self) -> bool:
        """Whether the states after the last norm of all its tokens are wanted."""
        return any(entry.num_scored for entry in self.requests)


class SampledToken(NamedTuple):
    """A token sampled for a caught-up request; None if its logits were not finite, or if there is
    an `error`.
    """

    token_id: int | None
    logprobs: TokenLogprobs | None = None
    error: RequestError | None = None


class Scheduler:
    """Schedules requests in order of arrival over the blocks of each cache group."""

    def __init__(
        self,
        config: SchedulerConfig,
        groups: Sequence[BlockGroup],
        store: PrefixStore | None = None,
        snapshots: Snapshots | None = None,
    ) -> None:
        """`store` keeps prefixes longer than the pools do; `snapshots`: None for a model without
        recurrences.
        """
        self._snapshots = snapshots
        self.config = config
        self.groups = groups
        self._prefixes = PrefixCache(
            groups,
            config.block_size,
            config.cache_root,
            by_content=config.enable_prefix_caching,
            store=store,
            snapshots=snapshots,
        )
        self._waiting: deque[Request] = deque()
        self._running: list[Request] = []
        self._free_slots = list(reversed(range(config.max_num_seqs)))
        self._num_admissions = 0
        self.num_preemptions = 0

    @property
    def keeps_states(self) -> bool:
        """Whether prompts that begin alike go on from snapshots."""
        return self._snapshots is not None

    @property
    def max_request_tokens(self) -> int:
        """The longest request, in tokens, that the whole cache can hold."""
        chunk = self.config.max_num_batched_tokens
        longest = [group.longest_request(chunk) for group in self.groups]
        return min((each for each in longest if each is not None), default=sys.maxsize)

    @property
    def num_usable_blocks(self) -> int:
        """The number of usable blocks of all groups together."""
        return sum(group.pool.num_usable_blocks for group in self.groups)

    @property
    def num_free_blocks(self) -> int:
        """The number of those blocks that can be allocated now."""
        return sum(group.pool.num_free_blocks for group in self.groups)

    @property
    def running(self) -> Sequence[Request]:
        """The requests that have blocks, in order of arrival."""
        return self._running

    def has_unfinished(self) -> bool:
        """Whether another step has work to do."""
        return bool(self._waiting or self._running)

    def unfinished(self) -> list[Request]:
        """All requests that have not ended; may be called from another thread."""
        return [*self._running, *self._waiting]

    def add(self, request: Request) -> None:
        """Queue a request; it must fit into the empty cache (`max_request_tokens`)."""
        assert request.max_total_tokens <= self.max_request_tokens
        self._waiting.append(request)

    def abort(self, request_id: int, sample: int | None = None) -> list[Request]:
        """End a request's samples, or one of them, and free their blocks; returns those that had
        not ended yet.
        """
        ended = [
            request
            for request in self.unfinished()
            if request.request_id == request_id and sample in (None, request.sample)
        ]
        for request in ended:
            self._finish(request)
        return ended

    @property
    def answers_somebody(self) -> bool:
        """Whether a running request is decoding, so the next step gives it a token."""
        return any(_is_decoding(request) for request in self._running)

    def schedule(
        self,
        drafts: Mapping[Request, Sequence[int]] | None = None,
        max_prompt_tokens: int | None = None,
        resting: Collection[Request] = (),
    ) -> ScheduledBatch:
        """Choose the next step's tokens and reserve their blocks; they then count as computed.

        `drafts`: proposals for running requests. They are verified as far as tokens and blocks are
        left; no request waits or is preempted for a draft. `max_prompt_tokens`: the most prefill
        tokens in this step; None: only the step's token budget limits them. `resting`: running
        requests that this step leaves out.
        """
        drafts = drafts or {}
        batch = ScheduledBatch()
        budget = self.config.max_num_batched_tokens
        of_prompts = budget if max_prompt_tokens is None else max_prompt_tokens
        preempted_any = False
        index = 0
        # `index` visits each running request once; preemption victims come later in the list.
        while index < len(self._running) and budget > 0:
            request = self._running[index]
            if request.waits_for_ids or request in resting:
                index += 1
                continue
            is_decoding = _is_decoding(request)
            count = self._count(request, budget if is_decoding else min(budget, of_prompts))
            if count == 0:
                index += 1
                continue
            if not self._reserve(request, count, batch):
                last = self._running[-1]
                if last is request and request.steps_under_way:
                    # The step under way gives back what is behind the window once it is booked.
                    index += 1
                    continue
                self._preempt(last)
                preempted_any = True
                continue
            batch.requests.append(_scheduled(request, count))
            budget -= count
            of_prompts -= 0 if is_decoding else count
            index += 1
        if not preempted_any:
            budget -= self._admit(batch, min(budget, of_prompts))
        if drafts:
            self._add_drafts(batch, drafts, budget)
        self._take_snapshots(batch)
        for entry in batch.requests:
            entry.request.num_computed_tokens = entry.end
            entry.request.state_position = entry.known_end
            entry.request.num_pending += entry.num_samples
            entry.request.steps_under_way += 1
        return batch

    def update(self, batch: ScheduledBatch, sampled: list[list[SampledToken]]) -> list[TokenEvent]:
        """Apply the results of a computed batch and return its events.

        `sampled`: for each caught-up request, in order, the accepted part of its draft and one more
        token.
        """
        events = []
        rows = iter(sampled)
        for i, entry in enumerate(batch.requests):
            request = entry.request
            request.steps_under_way -= 1
            tokens = next(rows) if entry.catches_up else []
            if request.status is RequestStatus.FINISHED:
                continue  # it ended while the batch was computed
            saves = [each for each in batch.state_saves if each.index == i]
            events += self._book(entry, tokens, saves)
        assert next(rows, None) is None
        return events

    def roll_back(self, batch: ScheduledBatch) -> None:
        """Undo the latest scheduled batch that is not undone yet; none of it counts as computed.

        Results of earlier batches stay.
        """
        targets = {(copy.group, copy.target) for copy in batch.block_copies}
        for entry in reversed(batch.requests):
            request = entry.request
            request.num_pending -= entry.num_samples
            request.steps_under_way -= 1
            if request.status is RequestStatus.RUNNING:
                request.num_computed_tokens = entry.start
                self._roll_back(request)
                tables = enumerate(request.tables)
                is_written = any(
                    (i, block_id) in targets for i, table in tables for block_id in table
                )
                # A recurrence's state has gone on, and cannot go back.
                if is_written or self._snapshots is not None:
                    self._preempt(request)

    def relieve(self, batch: ScheduledBatch) -> list[TokenEvent]:
        """React to a batch that ran out of memory and was rolled back: its largest request starts
        again in smaller steps, or ends with an error if it already had smaller steps.
        """
        largest = max(
            (each for each in batch.requests if each.request.status is RequestStatus.RUNNING),
            key=lambda each: (each.num_scheduled_tokens, each.end),
            default=None,
        )
        if largest is None:
            return []
        request = largest.request
        if request.max_chunk is not None:
            self._finish(request)
            error = StepMemoryError(
                "memory ran out in a step of this request, and again in a smaller one",
                where=f"{largest.num_scheduled_tokens:,} tokens after the first {largest.start:,}",
                hint="a smaller --gpu-memory-utilization, or a larger --reserve",
            )
            return [_error_event(request, error)]
        request.max_chunk = max(MIN_CHUNK, largest.num_scheduled_tokens // 2)
        self._preempt(request)
        return []

    def check_invariants(self) -> None:
        """Assert that the scheduler's state is consistent; for tests, after every step."""
        for i, group in enumerate(self.groups):
            group.pool.check_invariants(request.tables[i] for request in self._running)
        for request in self._running:
            assert request.status is RequestStatus.RUNNING
            assert request.num_computed_tokens < request.num_tokens <= request.max_total_tokens
            assert request.num_pending >= 0
            for group, table in zip(self.groups, request.tables, strict=True):
                assert request.num_computed_tokens <= len(table) * group.block_size
                # No block is held beyond that of the newest token, and no needed block is missing.
                assert len(table) <= group.blocks_of(request.num_tokens)
                first = group.first_needed(request.num_computed_tokens)
                assert NULL_BLOCK_ID not in table[first:]
        for request in self._waiting:
            assert request.status is RequestStatus.WAITING
            assert not request.tables
            assert request.num_computed_tokens == request.num_pending == 0
        slots = [request.slot for request in self._running]
        assert sorted(slots + self._free_slots) == list(range(self.config.max_num_seqs))

    def _reserve(self, request: Request, count: int, batch: ScheduledBatch) -> bool:
        """Reserve blocks for the next `count` tokens; if they do not fit, change nothing and return
        False.
        """
        start = request.num_computed_tokens
        of_groups = list(zip(self.groups, request.tables, strict=True))
        if not all(group.fits(table, start, count) for group, table in of_groups):
            return False
        for i, (group, table) in enumerate(of_groups):
            if copied := group.reserve(table, start, count):
                batch.block_copies.append(BlockCopy(i, *copied))
        return True

    def _preempt(self, request: Request) -> None:
        """Free a running request's blocks; it goes to the front of the queue and starts again."""
        self._running.remove(request)
        self._release(request)
        request.status = RequestStatus.WAITING
        request.num_computed_tokens = 0
        request.num_preemptions += 1
        self.num_preemptions += 1
        self._waiting.appendleft(request)

    def _roll_back(self, request: Request) -> None:
        """Free the blocks after its newest token."""
        for group, table in zip(self.groups, request.tables, strict=True):
            group.roll_back(table, request.num_tokens)

    def _add_drafts(
        self, batch: ScheduledBatch, drafts: Mapping[Request, Sequence[int]], budget: int
    ) -> None:
        """Add drafts for the batch's requests, as far as token budget and blocks are left."""
        for i, entry in enumerate(batch.requests):
            request, size = entry.request, self.config.block_size
            draft = drafts.get(request, ())
            if not draft or not entry.catches_up:
                continue
            # One token is left for the one sampled after the draft.
            room = request.max_total_tokens - request.num_tokens - 1
            of_groups = list(zip(self.groups, request.tables, strict=True))
            blocks = min(len(table) + group.pool.num_free_blocks for group, table in of_groups)
            count = min(len(draft), budget, room, blocks * size - entry.end)
            if request.max_chunk is not None:
                count = min(count, request.max_chunk - entry.num_scheduled_tokens)
            if count <= 0:
                continue
            for group, table in of_groups:
                group.reserve(table, entry.end, count)
            batch.requests[i] = entry._replace(
                num_scheduled_tokens=entry.num_scheduled_tokens + count, draft=draft[:count]
            )
            budget -= count

    def _count(self, request: Request, budget: int) -> int:
        """How many of a request's tokens to compute next."""
        start = request.num_computed_tokens
        missing = request.num_tokens - start
        count = min(missing, budget, request.max_chunk or missing)
        if self._snapshots is None or count < 2:
            return count
        stay = [
            position for position, rolls in self._positions(request, start + count) if not rolls
        ]
        most = self._snapshots.per_step
        return count if len(stay) <= most else stay[most - 1] - start

    def _positions(self, request: Request, end: int) -> list[tuple[int, bool]]:
        """See `positions`, of a step up to `end`."""
        start, size = request.num_computed_tokens, self.config.block_size
        return positions(start, end, request.borders, size)

    def _take_snapshots(self, batch: ScheduledBatch) -> None:
        """Choose where the batch takes snapshots. If requests together want more than there are
        slots, those that roll are left out first, and then the earliest.
        """
        if self._snapshots is None or not self.config.enable_prefix_caching:
            return
        found = [
            (rolls, -position, index)
            for index, entry in enumerate(batch.requests)
            for position, rolls in self._positions(entry.request, entry.known_end)
        ]
        for i, (rolls, negative, index) in enumerate(sorted(found)[: self._snapshots.per_step]):
            slot = self.config.max_num_seqs + i
            batch.state_saves.append(StateSave(index, -negative, slot, rolls))

    def _admit(self, batch: ScheduledBatch, budget: int) -> int:
        """Start waiting requests in order, as far as budget, slots and blocks allow; returns how
        many of their tokens were scheduled.
        """
        given = budget
        deferred: list[Request] = []
        while self._waiting and budget > 0 and len(self._running) < self.config.max_num_seqs:
            request = self._waiting.popleft()
            if self._waits_for_parent(request):
                deferred.append(request)
                continue
            prefix = self._prefixes.find(request, others_wait=bool(self._running))
            if not prefix.is_whole:
                self._waiting.appendleft(request)
                break
            if not self._share(request, prefix):
                self._waiting.appendleft(request)
                break
            request.tables = [array("i", table) for table in prefix.tables]
            request.num_computed_tokens = request.state_position = prefix.num_tokens
            request.num_registered_blocks = prefix.num_tokens // self.config.block_size
            if request.num_preemptions == 0:
                request.num_cached_tokens = prefix.num_tokens
            request.slot = self._free_slots.pop()
            if self._snapshots is not None and prefix.num_tokens:
                values = self._prefixes.state(request, prefix.num_tokens)
                batch.state_loads.append(StateLoad(request.slot, prefix.num_tokens, values))
            self._num_admissions += 1
            request.admission = self._num_admissions
            count = self._count(request, budget)
            reserved = self._reserve(request, count, batch)
            assert reserved
            request.status = RequestStatus.RUNNING
            self._running.append(request)
            batch.requests.append(_scheduled(request, count))
            budget -= count
        self._waiting.extendleft(reversed(deferred))
        return given - budget

    def _share(self, request: Request, prefix: Prefix) -> bool:
        """Take the blocks of a prefix for a request; take nothing and return False if its other
        blocks do not fit.

        All of its tokens must fit, not only the first chunk: a prompt preempted half-way was
        computed for nothing.
        """
        of_groups = list(zip(self.groups, prefix.tables, strict=True))
        for group, table in of_groups:
            group.share(table)
        chunk = self.config.max_num_batched_tokens
        fits = all(
            # A copy of the shared last block takes one more.
            group.most_held(request.num_tokens, chunk)
            - group.num_held(table)
            + prefix.ends_in_shared_block
            <= group.pool.num_free_blocks
            for group, table in of_groups
        )
        if not fits:
            for group, table in of_groups:
                group.release(table)
        return fits

    def _waits_for_parent(self, request: Request) -> bool:
        """Whether sample 0 is still to compute the prompt, whose blocks can then be shared."""
        parent = request.parent
        return (
            parent is not None
            and parent.status is not RequestStatus.FINISHED
            and (
                parent.num_computed_tokens < parent.num_prompt_tokens
                # Snapshots are found once their step is booked.
                or (self._snapshots is not None and parent.num_generated_tokens == 0)
            )
        )

    def _book(
        self,
        entry: ScheduledRequest,
        tokens: Sequence[SampledToken],
        saves: Sequence[StateSave] = (),
    ) -> list[TokenEvent]:
        """Apply one request's tokens, up to its end, and return their events; all tokens but the
        last were drafted.
        """
        request = entry.request
        request.num_pending -= entry.num_samples
        request.num_drafted_tokens += len(entry.draft)
        events: list[TokenEvent] = []
        for i, token in enumerate(tokens):
            if token.token_id is None:
                # Ends before `register`, so other requests cannot find these keys and values.
                self._finish(request)
                error = token.error or _not_finite(request)
                return [*events, _error_event(request, error)]
            request.append(token.token_id)
            event = TokenEvent(
                request_id=request.request_id,
                sample=request.sample,
                token_id=token.token_id,
                finish_reason=request.finish_reason_after(token.token_id),
                logprobs=token.logprobs,
                num_cached_tokens=request.num_cached_tokens,
                is_draft=i < len(tokens) - 1,
                num_drafted_tokens=request.num_drafted_tokens,
            )
            events.append(event)
            if event.finish_reason is not None:
                break
            if request.matcher is not None and request.matcher.is_finished:
                events.append(_complete(event))
                break
        if request.status is RequestStatus.RUNNING:
            num_computed = entry.known_end + max(0, len(tokens) - 1)
            settled = min(num_computed, len(request.token_ids))
            self._prefixes.register(request, settled)
            for save in saves:
                assert save.values is not None
                self._prefixes.keep_state(request, save.position, save.values, rolls=save.rolls)
            if entry.draft:
                request.num_computed_tokens = num_computed
                self._roll_back(request)
            # No rollback goes back to before `settled`.
            for group, table in zip(self.groups, request.tables, strict=True):
                group.give_back(table, settled)
        if events and events[-1].finish_reason is not None:
            self._finish(request)
        return events

    def _finish(self, request: Request) -> None:
        if request.status is RequestStatus.RUNNING:
            self._running.remove(request)
        else:
            self._waiting.remove(request)
        self._release(request)
        request.status = RequestStatus.FINISHED

    def _release(self, request: Request) -> None:
        self._prefixes.keep(request)
        for group, table in zip(self.groups, request.tables, strict=False):  # no tables if waiting
            group.release(table)
        request.tables = []
        if request.slot >= 0:
            self._free_slots.append(request.slot)
            request.slot = -1


def _is_decoding(request: Request) -> bool:
    return request.num_tokens - request.num_computed_tokens <= 1


def _scheduled(request: Request, count: int) -> ScheduledRequest:
    start = request.num_computed_tokens
    catches_up = start + count == request.num_tokens
    return ScheduledRequest(request, start, count, catches_up, stands=request.state_position)


def _complete(last: TokenEvent) -> TokenEvent:
    """The end event after the last token of an answer whose grammar is complete."""
    return last._replace(token_id=None, logprobs=None, finish_reason=FinishReason.STOP)


def _not_finite(request: Request) -> RequestError:
    return RequestError(
        "the model's output is not finite (NaN or infinity)",
        where=f"at token {len(request.token_ids)} of the request",
        hint="--dtype float32; if it still happens, the checkpoint is damaged",
    )


def _error_event(request: Request, error: RequestError) -> TokenEvent:
    return TokenEvent(request.request_id, request.sample, None, FinishReason.ERROR, error=error)
