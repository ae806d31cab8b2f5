"""Drafts for the requests of a step: who proposes them, how long they are, whether they pay off.

Drafts cannot change the text (see sampler.py), only its speed; so decisions rest on measurements.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import ceil
from typing import TYPE_CHECKING, Protocol

from localllm.engine.draft_lengths import Candidate, DraftHistory, DraftLengths
from localllm.engine.matcher import Matcher
from localllm.engine.ngram import NOT_KNOWN, Proposal
from localllm.engine.request import Request
from localllm.engine.scheduler import SampledToken, ScheduledBatch

if TYPE_CHECKING:
    from torch import Tensor

# When drafts have cost _MOST_LOST steps' time more than they saved, drafting pauses; each pause is
# twice as long as the last, within these bounds. Earlier savings count for at most _MOST_SAVED
# steps.
_MOST_LOST, _MOST_SAVED = 8.0, 16.0
_SHORTEST_REST, _LONGEST_REST = 64, 1024
# After _QUIET_LOOKS looks for drafts that saved nothing, looks take at most _LOOK_SHARE of the
# time, but there is at least one every _LONGEST_INTERVAL steps. A look whose match has at least
# _PROMISING_LENGTH tokens counts only as _PROMISING_WEIGHT of a quiet look.
_PROMISING_LENGTH, _PROMISING_WEIGHT = 4, 0.25
_QUIET_LOOKS, _LOOK_SHARE, _LONGEST_INTERVAL = 4, 0.002, 32
# Weight of the newest value in a moving average.
_NEWEST = 0.1
# Where steps overlap: each of the _HOT_STEPS steps after a draft that saved time waits for the ids
# of the previous step; otherwise one step in _COLD_STEPS does.
_HOT_STEPS, _COLD_STEPS = 4, 24

# The most drafted tokens of all requests in a step; the memory plan has room for their logits.
MAX_DRAFTED_TOKENS = 64


class Drafter(Protocol):
    """Proposes tokens."""

    def renewed(self) -> "Drafter":
        """A drafter of the same kind that has seen no text yet."""

    def add(self, request: Request) -> None:
        """Note a new request."""

    @property
    def has_work(self) -> bool:
        """Whether `work` has anything to do."""

    def work(self, batch: ScheduledBatch) -> None:
        """Prepare for later steps while a batch is being computed, with about as many tokens of
        work as the batch has.
        """

    def propose(self, request: Request, count: int) -> Proposal | None:
        """Up to `count` tokens to follow the request's."""

    def complete(self, batch: ScheduledBatch) -> None:
        """Put ids into drafts that were proposed without them, now that they have blocks."""

    def forget(self, request: Request) -> None:
        """Drop a request that has ended."""

    @property
    def taps(self) -> Sequence[int]:
        """The hidden states that it needs, see `DecoderModel.forward_tapped`; may be empty."""

    def see(self, batch: ScheduledBatch, hidden: "Sequence[Tensor]") -> None:
        """Take the hidden states of all tokens of a batch, prompt tokens included: one tensor per
        tap, rows in token order, on the device and computed in the order of its work. A batch that
        fails is seen too, and computed again.
        """

    @property
    def is_warm(self) -> bool:
        """See Runner."""

    def work_ahead(self) -> bool:
        """See Runner."""


@dataclass(slots=True)
class _Drafted:
    """What is known about the drafts of one request."""

    history: DraftHistory = field(default_factory=DraftHistory)
    match_length: int = 0


class Speculator:
    """Drafts for the running requests, within `max_draft` tokens each."""

    @property
    def is_warm(self) -> bool:
        """See Runner: of the drafter."""
        return self._drafter.is_warm

    def work_ahead(self) -> bool:
        """See Runner: for the drafter."""
        return self._drafter.work_ahead()

    def __init__(
        self,
        drafter: Drafter,
        lengths: DraftLengths,
        max_draft: int,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`clock` measures the seconds that looking for drafts takes."""
        self._drafter, self._lengths, self._max_draft = drafter, lengths, max_draft
        self._clock = clock
        # Seconds of the last look, learning included; and the averages of a look and of a step.
        self._spent_s = self._look_s = self._step_s = 0.0
        self._requests: dict[Request, _Drafted] = {}
        self._saved, self._rest, self._next_rest = 0.0, 0, _SHORTEST_REST
        self._hot, self._cold = 0, 0
        self._num_quiet, self._since_look = 0.0, 0
        self._is_looking = False
        # Drafts of the newest step that were forced by a grammar: nothing is learned from them.
        self._forced: dict[Request, list[int]] = {}

    def renewed(self) -> "Speculator":
        """A speculator that has seen no text yet, and shares what was learned about speed."""
        return Speculator(self._drafter.renewed(), self._lengths, self._max_draft, self._clock)

    def add(self, request: Request) -> None:
        """Note a new request."""
        self._drafter.add(request)

    @property
    def is_watching(self) -> bool:
        """Whether the step of the last `propose` call matters; otherwise `complete`, `work` and
        `learn` are not called for it.
        """
        if self._rest > 0:
            return False
        return self._is_looking or self._since_look <= 1 or self._drafter.has_work

    def wants_ids(self) -> bool:
        """Whether the next step should wait for the previous one's ids, to draft from them."""
        if self._rest > 0:
            return False
        self._cold += 1
        if self._hot > 0 or self._cold >= _COLD_STEPS:
            self._hot, self._cold = max(0, self._hot - 1), 0
            self._since_look = _LONGEST_INTERVAL  # look for drafts once the ids are here
            return True
        return False

    def propose(self, running: Sequence[Request], budget: int) -> Mapping[Request, Sequence[int]]:
        """Drafts for the next step, which computes at most `budget` tokens in all."""
        self._forced = self._find_forced(running)
        return {**self._propose(running, budget), **self._forced}

    def _propose(self, running: Sequence[Request], budget: int) -> Mapping[Request, Sequence[int]]:
        self._is_looking = False
        if self._rest > 0:
            self._rest -= 1
            return {}
        self._since_look += 1
        if self._num_quiet >= _QUIET_LOOKS and self._since_look < self._interval():
            return {}
        self._since_look, self._is_looking = 0, True
        self._look_s += _NEWEST * (self._spent_s - self._look_s)
        began_s = self._clock()
        drafts = self._look(running, budget)
        self._spent_s = self._clock() - began_s
        return drafts

    def complete(self, batch: ScheduledBatch) -> None:
        """See Drafter."""
        self._drafter.complete(batch)

    def work(self, batch: ScheduledBatch) -> None:
        """See Drafter."""
        if self._drafter.has_work:
            self._drafter.work(batch)

    def see(self, batch: ScheduledBatch, hidden: "Sequence[Tensor]") -> None:
        """Show a batch's hidden states to the drafter, if it needs any."""
        if self._drafter.taps:
            self._drafter.see(batch, hidden)

    def learn(
        self,
        batch: ScheduledBatch,
        sampled: Sequence[Sequence[SampledToken]],
        seconds: float,
        has_waited: bool,
    ) -> None:
        """Learn from a batch's tokens and the seconds it took from beginning to end; `has_waited`:
        it waited for the previous one's ids, because `wants_ids` said so.
        """
        began_s = self._clock()
        self._step_s += _NEWEST * (seconds - self._step_s)
        num_rows = sum(entry.num_scheduled_tokens for entry in batch.requests)
        num_drafted = sum(len(entry.draft) for entry in batch.requests)
        # The time of a step that has waited says nothing about steps without drafts.
        self._lengths.add_step(num_rows, seconds, is_plain=not (num_drafted or has_waited))
        decoding = [entry for entry in batch.requests if entry.catches_up]
        for entry, tokens in zip(decoding, sampled, strict=True):
            if entry.draft and entry.request not in self._forced:
                known = self._of(entry.request)
                self._lengths.add_outcome(
                    known.history, known.match_length, len(entry.draft), len(tokens) - 1
                )
        if sampled and (num_drafted or has_waited) and not self._forced:
            tokens_each = sum(map(len, sampled)) / len(sampled)
            self._book_saving(num_rows - num_drafted, tokens_each, seconds)
        self._spent_s += self._clock() - began_s

    def forget(self, request: Request) -> None:
        """Drop a request that has ended."""
        self._requests.pop(request, None)
        self._drafter.forget(request)

    def _interval(self) -> int:
        """The number of steps per look for drafts while looks find nothing."""
        if self._step_s == 0.0:
            return 1
        needed = ceil(self._look_s / (_LOOK_SHARE * self._step_s))
        return min(max(1, needed), _LONGEST_INTERVAL)

    def _find_forced(self, running: Sequence[Request]) -> dict[Request, list[int]]:
        """For each request, the next tokens if its grammar allows no others."""
        found, left = dict[Request, list[int]](), MAX_DRAFTED_TOKENS
        for request in running:
            room = min(left, self._room(request)) if request.matcher is not None else 0
            if request.matcher is not None and room:
                tokens = request.matcher.forced(room)
                left -= len(tokens)
                if tokens:
                    found[request] = tokens
        return found

    def _room(self, request: Request) -> int:
        """How many tokens may be drafted for a request now."""
        is_decoding = request.num_tokens - request.num_computed_tokens == 1
        if request.num_pending or not is_decoding:
            return 0
        left = request.max_total_tokens - request.num_tokens - 1
        return max(0, min(self._max_draft, left))

    def _look(self, running: Sequence[Request], budget: int) -> Mapping[Request, Sequence[int]]:
        proposals: dict[Request, Proposal] = {}
        for request in running:
            room = self._room(request)
            if room == 0 or request in self._forced:
                continue
            proposal = self._drafter.propose(request, room)
            if proposal is not None and request.matcher is not None:
                proposal = _allowed(proposal, request.matcher)
            if proposal is not None:
                proposals[request] = proposal
        longest = max((found.match_length for found in proposals.values()), default=0)
        self._num_quiet += 1.0 if longest < _PROMISING_LENGTH else _PROMISING_WEIGHT
        if not proposals:
            return {}
        missing = [request.num_tokens - request.num_computed_tokens for request in running]
        counts = self._lengths.choose(
            min(sum(missing), budget),
            missing.count(1),
            [
                Candidate(self._of(request).history, found.match_length, len(found.token_ids))
                for request, found in proposals.items()
            ],
            MAX_DRAFTED_TOKENS - sum(map(len, self._forced.values())),
        )
        drafts = {}
        for (request, found), count in zip(proposals.items(), counts, strict=True):
            if count:
                self._of(request).match_length = found.match_length
                drafts[request] = found.token_ids[:count]
        return drafts

    def _of(self, request: Request) -> _Drafted:
        return self._requests.setdefault(request, _Drafted())

    def _book_saving(self, num_rows: int, tokens_each: float, seconds: float) -> None:
        """Compare a step's time with that of steps without drafts; look more often if drafting
        saves time, and pause it if it loses time.
        """
        plain = self._lengths.plain_seconds(num_rows)
        if plain is None:
            return
        saved = tokens_each - seconds / plain
        if saved > 0:
            self._hot, self._num_quiet = _HOT_STEPS, 0.0
        self._saved = min(_MOST_SAVED, self._saved + saved)
        if self._saved < -_MOST_LOST:
            self._saved, self._rest = 0.0, self._next_rest
            self._next_rest = min(2 * self._next_rest, _LONGEST_REST)
        elif self._saved == _MOST_SAVED:
            self._next_rest = _SHORTEST_REST


def _allowed(proposal: Proposal, matcher: Matcher) -> Proposal | None:
    """The part of a proposal that the grammar allows; all of it if its ids are not known yet."""
    if NOT_KNOWN in proposal.token_ids:
        return proposal
    count = matcher.count_allowed(proposal.token_ids)
    return replace(proposal, token_ids=proposal.token_ids[:count]) if count else None
