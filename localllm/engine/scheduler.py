"""Which tokens of which requests are computed in the next step.

There is no prefill phase and no decode phase. A request has `num_tokens` tokens, of which
`num_computed_tokens` have their keys and values in the cache; every step gives requests some
tokens, within one token budget, until they have caught up, and a request that has caught up gets
its next token sampled. A long prompt is computed in chunks, a prefix found in the cache is a head
start, a preempted request starts again from 0: all the same thing with other numbers. A draft,
tokens that somebody proposes to come next, is computed behind the newest token, and each of its
positions is sampled: what agrees with it is accepted, and the rest was computed for nothing.

Who owns what: a request owns one use of each block in its `blocks`, from admission until it ends
or is preempted. Blocks before `num_computed_tokens // block_size` are full and may be shared; the
block that is written next belongs to its request alone, else it is copied first.
"""

from array import array
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from localllm.engine.block_pool import BlockPool
from localllm.engine.prefix_cache import PrefixCache, PrefixStore
from localllm.engine.request import (
    FinishReason,
    Request,
    RequestStatus,
    TokenEvent,
    TokenLogprobs,
)
from localllm.errors import RequestError, StepMemoryError

# Tokens of a step below which a request is not cut when memory runs out.
MIN_CHUNK = 64


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Limits of one step, and of the cache."""

    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    enable_prefix_caching: bool
    cache_root: bytes


@dataclass(frozen=True, slots=True)
class ScheduledRequest:
    """`num_scheduled_tokens` tokens of a request, from `start` on, the last of them its `draft`.

    `catches_up`: whether its newest token is among them, so that the next can be sampled; without
    that there is no draft.
    """

    request: Request
    start: int
    num_scheduled_tokens: int
    catches_up: bool
    draft: Sequence[int] = ()

    @property
    def end(self) -> int:
        """Behind its last token, those of the draft among them."""
        return self.start + self.num_scheduled_tokens

    @property
    def known_end(self) -> int:
        """Behind its newest token: the first position that is sampled."""
        return self.end - len(self.draft)

    @property
    def token_ids(self) -> list[int]:
        """Its tokens' ids; without the newest where that is still on its way."""
        return [*self.request.token_ids[self.start : self.known_end], *self.draft]

    @property
    def num_samples(self) -> int:
        """Positions that are sampled: behind the newest token, and behind each of the draft's."""
        return 1 + len(self.draft) if self.catches_up else 0


@dataclass(frozen=True, slots=True)
class ScheduledBatch:
    """One step's work. `block_copies`: (from, to) block ids, to be done in order before it."""

    requests: list[ScheduledRequest] = field(default_factory=list)
    block_copies: list[tuple[int, int]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class SampledToken:
    """A token that a caught-up request got, or None where its logits were not finite, or where
    there is an `error`.
    """

    token_id: int | None
    logprobs: TokenLogprobs | None = None
    error: RequestError | None = None


class Scheduler:
    """Requests in order of arrival, over one pool of blocks."""

    def __init__(
        self, config: SchedulerConfig, pool: BlockPool, store: PrefixStore | None = None
    ) -> None:
        """`store` keeps prefixes longer than the pool does."""
        self.config = config
        self.pool = pool
        self._prefixes = PrefixCache(
            pool,
            config.block_size,
            config.cache_root,
            by_content=config.enable_prefix_caching,
            store=store,
        )
        self._waiting: deque[Request] = deque()
        self._running: list[Request] = []
        self._free_slots = list(reversed(range(config.max_num_seqs)))
        self._num_admissions = 0
        self.num_preemptions = 0

    @property
    def max_request_tokens(self) -> int:
        """The longest request that the whole cache can hold."""
        return self.pool.num_usable_blocks * self.config.block_size

    @property
    def running(self) -> Sequence[Request]:
        """The requests that have blocks, in order of arrival."""
        return self._running

    def has_unfinished(self) -> bool:
        """Whether another step has work."""
        return bool(self._waiting or self._running)

    def unfinished(self) -> list[Request]:
        """All requests; may be asked from another thread."""
        return [*self._running, *self._waiting]

    def add(self, request: Request) -> None:
        """Queue a request; it must fit into the empty cache (`max_request_tokens`)."""
        assert request.max_total_tokens <= self.max_request_tokens
        self._waiting.append(request)

    def abort(self, request_id: int, sample: int | None = None) -> list[Request]:
        """End a request's samples, or one, and free their blocks; returns those that lived."""
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
        """Whether a running request has its prompt behind it: the next step brings it a token."""
        return any(_is_decoding(request) for request in self._running)

    def schedule(
        self,
        drafts: Mapping[Request, Sequence[int]] | None = None,
        max_prompt_tokens: int | None = None,
        resting: Collection[Request] = (),
    ) -> ScheduledBatch:
        """Choose the next step's tokens and reserve their blocks; they count as computed.

        `drafts`: proposals for running requests. As much of them is verified as tokens and blocks
        are left for; nobody waits or is preempted for one. `max_prompt_tokens`: so many tokens of
        requests that are not answered yet, where others are. `resting`: running requests that this
        step leaves out.
        """
        drafts = drafts or {}
        batch = ScheduledBatch()
        budget = self.config.max_num_batched_tokens
        of_prompts = budget if max_prompt_tokens is None else max_prompt_tokens
        preempted_any = False
        index = 0
        # `index` passes each running request once; a victim is always behind it.
        while index < len(self._running) and budget > 0:
            request = self._running[index]
            if request.waits_for_ids or request in resting:
                index += 1
                continue
            is_decoding = _is_decoding(request)
            count = _count(request, budget if is_decoding else min(budget, of_prompts))
            if count == 0:
                index += 1
                continue
            if not self._reserve(request, count, batch):
                self._preempt(self._running[-1])
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
        for entry in batch.requests:
            entry.request.num_computed_tokens = entry.end
            entry.request.num_pending += entry.num_samples
        return batch

    def update(self, batch: ScheduledBatch, sampled: list[list[SampledToken]]) -> list[TokenEvent]:
        """Book a computed batch; `sampled` belongs to its caught-up requests, in order: of each as
        much of its draft as is accepted, and one token more.
        """
        events = []
        rows = iter(sampled)
        for entry in batch.requests:
            request = entry.request
            tokens = next(rows) if entry.catches_up else []
            if request.status is RequestStatus.FINISHED:
                continue  # it ended while this was computed
            events += self._book(entry, tokens)
        assert next(rows, None) is None
        return events

    def roll_back(self, batch: ScheduledBatch) -> None:
        """Undo the last scheduled batch that is not undone yet, none of which may be computed.

        What earlier batches computed stays.
        """
        targets = {target for _, target in batch.block_copies}
        for entry in reversed(batch.requests):
            request = entry.request
            request.num_pending -= entry.num_samples
            if request.status is RequestStatus.RUNNING:
                request.num_computed_tokens = entry.start
                self._trim(request)
                if targets.intersection(request.block_table):
                    self._preempt(request)

    def relieve(self, batch: ScheduledBatch) -> list[TokenEvent]:
        """After a batch that memory did not suffice for, and that is rolled back: its largest
        request starts again in smaller steps, and ends if it was that already.
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
                where=f"{largest.num_scheduled_tokens:,} tokens behind {largest.start:,}",
                hint="a smaller --gpu-memory-utilization, or a larger --reserve",
            )
            return [_error_event(request, error)]
        request.max_chunk = max(MIN_CHUNK, largest.num_scheduled_tokens // 2)
        self._preempt(request)
        return []

    def check_invariants(self) -> None:
        """Assert that the books balance; for tests, after every step."""
        self.pool.check_invariants(request.block_table for request in self._running)
        size = self.config.block_size
        for request in self._running:
            assert request.status is RequestStatus.RUNNING
            assert request.num_computed_tokens <= len(request.block_table) * size
            assert request.num_computed_tokens < request.num_tokens <= request.max_total_tokens
            assert request.num_pending >= 0
            # Nothing is held beyond the block of the newest token.
            assert len(request.block_table) <= -(-request.num_tokens // size)
        for request in self._waiting:
            assert request.status is RequestStatus.WAITING
            assert not request.block_table
            assert request.num_computed_tokens == request.num_pending == 0
        slots = [request.slot for request in self._running]
        assert sorted(slots + self._free_slots) == list(range(self.config.max_num_seqs))

    def _reserve(self, request: Request, count: int, batch: ScheduledBatch) -> bool:
        """Own blocks for the next `count` tokens, or change nothing and say no."""
        size = self.config.block_size
        table, start = request.block_table, request.num_computed_tokens
        num_new = -(-(start + count) // size) - len(table)
        first = start // size
        copies = first < len(table) and self.pool.is_shared(table[first])
        if num_new + copies > self.pool.num_free_blocks:
            return False
        if copies:
            [own] = self.pool.allocate(1)
            batch.block_copies.append((table[first], own))
            self.pool.free([table[first]])
            table[first] = own
        if num_new > 0:
            table.extend(self.pool.allocate(num_new))
        return True

    def _preempt(self, request: Request) -> None:
        """Take a running request's blocks; it goes to the front of the queue and starts again."""
        self._running.remove(request)
        self._release(request)
        request.status = RequestStatus.WAITING
        request.num_computed_tokens = 0
        request.num_preemptions += 1
        self.num_preemptions += 1
        self._waiting.appendleft(request)

    def _trim(self, request: Request) -> None:
        """Give back the blocks behind its newest token."""
        num_blocks = -(-request.num_tokens // self.config.block_size)
        self.pool.free(reversed(request.block_table[num_blocks:]))
        del request.block_table[num_blocks:]

    def _add_drafts(
        self, batch: ScheduledBatch, drafts: Mapping[Request, Sequence[int]], budget: int
    ) -> None:
        """Verify drafts of the batch's requests too, with what is left of budget and blocks."""
        for i, entry in enumerate(batch.requests):
            request, size = entry.request, self.config.block_size
            # The last token is the one that is sampled behind the draft.
            room = request.max_total_tokens - request.num_tokens - 1
            held = len(request.block_table) * size - entry.end
            free = self.pool.num_free_blocks * size
            count = min(len(drafts.get(request, ())), budget, room, held + free)
            if request.max_chunk is not None:
                count = min(count, request.max_chunk - entry.num_scheduled_tokens)
            if count <= 0 or not entry.catches_up:
                continue
            num_new = -(-(entry.end + count) // size) - len(request.block_table)
            request.block_table.extend(self.pool.allocate(max(0, num_new)))
            batch.requests[i] = replace(
                entry,
                num_scheduled_tokens=entry.num_scheduled_tokens + count,
                draft=drafts[request][:count],
            )
            budget -= count

    def _admit(self, batch: ScheduledBatch, budget: int) -> int:
        """Start waiting requests in order, as far as budget, places and blocks go; how many tokens
        of them.
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
            self.pool.share(prefix.block_ids)
            # All of its tokens must fit, not only the first chunk: a prompt that is preempted
            # half-way was computed for nothing. One more block may go to a copy.
            needed = -(-request.num_tokens // self.config.block_size) - len(prefix.block_ids)
            if needed + prefix.ends_in_shared_block > self.pool.num_free_blocks:
                self.pool.free(reversed(prefix.block_ids))
                self._waiting.appendleft(request)
                break
            request.block_table = array("i", prefix.block_ids)
            request.num_computed_tokens = prefix.num_tokens
            request.num_registered_blocks = prefix.num_tokens // self.config.block_size
            if request.num_preemptions == 0:
                request.num_cached_tokens = prefix.num_tokens
            request.slot = self._free_slots.pop()
            self._num_admissions += 1
            request.admission = self._num_admissions
            count = _count(request, budget)
            reserved = self._reserve(request, count, batch)
            assert reserved
            request.status = RequestStatus.RUNNING
            self._running.append(request)
            batch.requests.append(_scheduled(request, count))
            budget -= count
        self._waiting.extendleft(reversed(deferred))
        return given - budget

    def _waits_for_parent(self, request: Request) -> bool:
        """Whether the blocks of the same prompt are about to be there for sharing."""
        parent = request.parent
        return (
            parent is not None
            and parent.status is not RequestStatus.FINISHED
            and parent.num_computed_tokens < parent.num_prompt_tokens
        )

    def _book(self, entry: ScheduledRequest, tokens: Sequence[SampledToken]) -> list[TokenEvent]:
        """The events of one request's tokens, to its end at most; all but the last were drafted."""
        request = entry.request
        request.num_pending -= entry.num_samples
        request.num_drafted_tokens += len(entry.draft)
        events: list[TokenEvent] = []
        for i, token in enumerate(tokens):
            if token.token_id is None:
                # Keys and values of such a request are not to be found by others.
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
            self._prefixes.register(request, min(num_computed, len(request.token_ids)))
            if entry.draft:
                request.num_computed_tokens = num_computed
                self._trim(request)
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
        self.pool.free(reversed(request.block_table))
        request.block_table = array("i")
        if request.slot >= 0:
            self._free_slots.append(request.slot)
            request.slot = -1


def _is_decoding(request: Request) -> bool:
    return request.num_tokens - request.num_computed_tokens <= 1


def _count(request: Request, budget: int) -> int:
    """How many of its tokens are computed next."""
    missing = request.num_tokens - request.num_computed_tokens
    return min(missing, budget, request.max_chunk or missing)


def _scheduled(request: Request, count: int) -> ScheduledRequest:
    start = request.num_computed_tokens
    return ScheduledRequest(request, start, count, start + count == request.num_tokens)


def _complete(last: TokenEvent) -> TokenEvent:
    """The end behind a token that is the answer's last by its grammar."""
    return replace(last, token_id=None, logprobs=None, finish_reason=FinishReason.STOP)


def _not_finite(request: Request) -> RequestError:
    return RequestError(
        "the model's output is not finite (NaN or infinity)",
        where=f"at token {len(request.token_ids)} of the request",
        hint="--dtype float32; if it stays, the checkpoint is damaged",
    )


def _error_event(request: Request, error: RequestError) -> TokenEvent:
    return TokenEvent(request.request_id, request.sample, None, FinishReason.ERROR, error=error)
