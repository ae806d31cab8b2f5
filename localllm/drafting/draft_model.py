"""Drafts from a smaller model with the same vocabulary.

Its keys and values live in the blocks of a full cache group: it has a smaller cache of its own, and
uses the same block ids there as the target model. So prefixes, shared blocks, copies and preemption
work as without it, and no second bookkeeping is needed. For each slot it remembers the token whose
keys and values it computed; when a block has been reused for other tokens, these differ, and the
slot is computed again.

It samples with the same noise as the target model (see sampler.py), so both choose the same token
wherever their distributions allow it (Leviathan et al. 2022, "Fast Inference from Transformers via
Speculative Decoding", accept at random instead).
"""

from collections import deque
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace

import numpy as np

from localllm.drafting.draft_steps import UnderWay
from localllm.drafting.drafter import NOT_KNOWN, Drafter, Proposal
from localllm.model.paged_kv_cache import PagedKVCache
from localllm.schedule.request import Request
from localllm.schedule.rows import slots_of
from localllm.schedule.runner import Runner
from localllm.schedule.scheduler import ScheduledBatch, ScheduledRequest

# The draft model catches up with a request when it lacks this many tokens, or when it drafts for
# it.
_CHUNK = 256
# The draft model computes as many tokens during each step as the step itself, and this many more.
_WORK_TOKENS = 256
_NOTHING = -1


@dataclass(slots=True)
class _Follower:
    """The draft model's copy of a request, which includes drafted tokens.

    `num_known`: the number of its tokens whose keys and values are computed; `admission`: the
    admission of the request that its blocks belong to. Of a model with recurrences, `stands`: where
    their states stand, behind tokens that were not drafted; `reached`: how far it has computed.
    """

    request: Request
    admission: int
    num_known: int = 0
    stands: int = 0
    reached: int = 0


class DraftModel(Drafter):
    """Drafts with a runner of the smaller model; `kv_cache` has the target cache's block ids."""

    _runner: Runner

    def __init__(
        self,
        runner: Runner,
        kv_cache: PagedKVCache,
        max_model_len: int,
        max_tokens: int,
        table: int = 0,
    ) -> None:
        """`max_model_len`: the draft model's positions; `max_tokens`: the most tokens in one of its
        steps; `table`: the index of the request's table that it uses, that of a full group.
        """
        self._runner, self._kv_cache, self._table = runner, kv_cache, table
        self._max_model_len, self._max_tokens = max_model_len, max_tokens
        self._block_size = kv_cache.block_size
        # By slot: the token whose keys and values are there.
        self._computed = np.full(kv_cache.num_blocks(0) * self._block_size, _NOTHING, np.int32)
        self._followers: dict[Request, _Follower] = {}

    @property
    def has_work(self) -> bool:
        """See Drafter."""
        return True

    def work(self, batch: ScheduledBatch) -> None:
        """See Drafter: computes tokens of long prompts that it still lacks."""
        num_tokens = _WORK_TOKENS + sum(entry.num_scheduled_tokens for entry in batch.requests)
        num_tokens = min(num_tokens, self._max_tokens)
        step = []
        for request in [entry.request for entry in batch.requests]:
            known = min(len(request.token_ids), request.num_computed_tokens)
            seen = self._followers.get(request)
            if known > self._max_model_len or known - (seen.num_known if seen else 0) < _CHUNK:
                continue
            follower = self._follow(request)
            count = min(known - follower.num_known, num_tokens)
            if count <= 0:
                continue
            start, stands = follower.num_known, follower.stands
            entry = ScheduledRequest(follower.request, start, count, False, stands=stands)
            step.append((follower, entry))
            num_tokens -= count
        if step:
            self._runner.launch(ScheduledBatch([entry for _, entry in step])).wait()
        for follower, entry in step:
            self._book(follower, entry.end)
            follower.stands = follower.reached = entry.end

    def propose(self, request: Request, count: int) -> Proposal | None:
        """See Drafter: up to `count` tokens whose ids are not known yet."""
        follower = self._follow(request)
        num_tokens = len(request.token_ids)
        room = self._max_model_len - num_tokens
        if num_tokens - follower.num_known > _CHUNK or room <= 0:
            return None
        return Proposal([NOT_KNOWN] * min(count, room), 0)

    def complete(self, batch: ScheduledBatch, own: Collection[Request]) -> None:
        """See Drafter: runs one step of the draft model for each token of the longest draft."""
        self._copy_blocks(batch)
        asked = [each for each in batch.requests if each.draft and each.request in own]
        drafting = [(entry, self._follow(entry.request)) for entry in asked]
        # Drafts follow the request's grammar, since a token that it forbids would be rejected.
        for entry, follower in drafting:
            matcher = entry.request.matcher
            follower.request.matcher = None if matcher is None else matcher.copy()
        waits = not self._runner.overlaps or any(each.request.matcher for each in asked)
        launched: deque[UnderWay] = deque()
        for depth in range(max((len(entry.draft) for entry, _ in drafting), default=0)):
            going_on = [
                (follower, entry.known_end + depth)
                for entry, follower in drafting
                if depth < len(entry.draft)
            ]
            for step in self._steps(going_on, depth):
                runs = self._runner.launch(ScheduledBatch([each for _, each in step]))
                launched.append(UnderWay(runs, [follower.request for follower, _ in step]))
                # A device that overlaps keeps the newest tokens, so one step may be in flight.
                if waits or len(launched) > 1:
                    launched.popleft().take()
        for last in launched:
            last.take()
        drafts = {}
        for entry, follower in drafting:
            drafts[entry.request] = follower.request.token_ids[entry.known_end :]
            self._book(follower, len(follower.request.token_ids) - 1)
        for i, entry in enumerate(batch.requests):
            if entry.request in drafts:
                batch.requests[i] = entry._replace(draft=drafts[entry.request])

    def forget(self, request: Request) -> None:
        """See Drafter."""
        self._followers.pop(request, None)

    def _steps(
        self, followers: list[tuple[_Follower, int]], depth: int
    ) -> Iterator[list[tuple[_Follower, ScheduledRequest]]]:
        """Steps that sample a token after each follower's end; at depth 0 they also catch up."""
        step: list[tuple[_Follower, ScheduledRequest]] = []
        num_tokens = 0
        for follower, end in followers:
            start = end - 1 if depth else min(follower.num_known, end - 1)
            if start < follower.stands:  # a state cannot go back
                start = follower.stands = 0
            if step and num_tokens + end - start > self._max_tokens:
                yield step
                step, num_tokens = [], 0
            # What is drafted may be rejected, so the state stays behind what is known.
            stands, is_drafted = follower.stands, depth > 0
            entry = ScheduledRequest(
                follower.request, start, end - start, True, stands=stands, keeps_state=is_drafted
            )
            step.append((follower, entry))
            follower.reached = end
            if not is_drafted:
                follower.stands = end
            num_tokens += end - start
        if step:
            yield step

    def _follow(self, request: Request) -> _Follower:
        """The follower of a request, updated to the request's tokens and blocks."""
        follower = self._followers.get(request)
        if follower is None or follower.admission != request.admission:
            params = replace(request.params, logprobs=None)
            own = replace(request, token_ids=[], params=params, matcher=None, scores=None)
            follower = self._followers[request] = _Follower(own, request.admission)
        own, known = follower.request, follower.num_known
        own.token_ids[known:] = request.token_ids[known:]
        own.tables, own.slot = request.tables, request.slot
        table = np.array(request.tables[self._table], np.int32)
        end = min(len(request.token_ids), len(table) * self._block_size)
        computed = self._computed[slots_of(np.arange(known, end), table, self._block_size)]
        differs = (computed != request.token_ids[known:end]).nonzero()[0]
        follower.num_known = known + int(differs[0]) if len(differs) else end
        if self._kv_cache.recurrent:
            # Keys and values of others serve it too, but their states do not.
            follower.num_known = min(follower.num_known, follower.reached)
        return follower

    def _book(self, follower: _Follower, end: int) -> None:
        """Record that the follower's tokens before `end` are computed."""
        own, start = follower.request, follower.num_known
        table = np.array(own.tables[self._table], np.int32)
        slots = slots_of(np.arange(start, end), table, self._block_size)
        self._computed[slots] = own.token_ids[start:end]

    def _copy_blocks(self, batch: ScheduledBatch) -> None:
        copies = [copy for copy in batch.block_copies if copy.group == self._table]
        self._kv_cache.copy_blocks([self._table] * len(self._kv_cache.stacks), copies)
        by_block = self._computed.reshape(-1, self._block_size)
        for copy in copies:
            by_block[copy.target] = by_block[copy.source]
