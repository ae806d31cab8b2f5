"""Drafts for the requests of a step: who proposes them, how long they are, whether they pay off.

Drafts cannot change the text (see sampler.py), only its speed; so decisions rest on measurements.
"""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from math import ceil
from typing import TYPE_CHECKING, NamedTuple

from localllm.drafting.asking import MAX_DRAFTED_TOKENS, ask, find_forced, room_of
from localllm.drafting.draft_choice import MOST_LOST_AT_ONCE, DraftChoice
from localllm.drafting.draft_lengths import Candidate, DraftHistory, DraftLengths
from localllm.drafting.draft_trials import STEPS_UNASKED
from localllm.drafting.drafter import Drafter, Proposal
from localllm.schedule.request import DraftCount, Request, RequestStatus
from localllm.schedule.scheduler import SampledToken, ScheduledBatch, ScheduledRequest
from localllm.schedule.step_times import StepTimes

if TYPE_CHECKING:
    from torch import Tensor

# After _QUIET_LOOKS looks that found no drafts worth verifying, looks take at most _LOOK_SHARE of
# the time, but there is at least one every _LONGEST_INTERVAL steps, or where no look is cheap every
# STEPS_UNASKED. A look that finds a match counts only as _SHORT_WEIGHT of a quiet look, and one
# whose match has at least _PROMISING_LENGTH tokens as _PROMISING_WEIGHT: a copy begins with short
# ones. A look at several requests says as much as one at each, but counts for at most _MOST_WEIGHT;
# one at an answer's first tokens says nothing, since a copy matches only behind them.
_SHORT_WEIGHT, _PROMISING_LENGTH, _PROMISING_WEIGHT = 0.5, 4, 0.25
_FIRST_TOKENS, _MOST_WEIGHT, _QUIET_LOOKS, _LOOK_SHARE, _LONGEST_INTERVAL = 4, 2, 4, 0.002, 32
# While a drafter has matches and accepted drafts of so many tokens in every request, those behind
# it are not asked: text is copied, and what they might say is not as long.
_COPYING_LENGTH = 8
# Where nothing is to be done or seen for so many steps, not even that is looked at; at most for
# _LONGEST_NAP.
_SHORTEST_NAP, _LONGEST_NAP = 4, 256
# So many steps without drafts are slower after those with them, the first ones most of all; see
# plain_rest.py.
_FIRST_STEPS, _SLOW_STEPS = 2, 16
# Weight of the newest value in a moving average.
_NEWEST = 0.1
# Where steps overlap: each of the _HOT_STEPS steps after a draft that saved time waits for the ids
# of the previous step; otherwise one step in _COLD_STEPS does.
_HOT_STEPS, _COLD_STEPS = 4, 24


class Proposer(NamedTuple):
    """A drafter with its name, and the lengths of its drafts."""

    name: str
    drafter: Drafter
    lengths: DraftLengths


# Who proposes what a grammar forces.
_GRAMMAR = "grammar"


@dataclass(slots=True)
class _Known:
    """What is known about one drafter's drafts for one request."""

    history: DraftHistory = field(default_factory=DraftHistory)
    match_length: int = 0


@dataclass(slots=True)
class _Drafted:
    """What is known about the drafts of one request: of each drafter by its number, and the counts
    of drafted and accepted tokens by its name.
    """

    known: dict[int, _Known] = field(default_factory=dict)
    counts: dict[str, tuple[int, int]] = field(default_factory=dict)

    def of(self, drafter: int) -> _Known:
        """What is known about a drafter's."""
        if drafter not in self.known:
            self.known[drafter] = _Known()
        return self.known[drafter]

    def count(self, name: str, num_drafted: int, num_accepted: int) -> None:
        """Add a draft to the counts."""
        drafted, accepted = self.counts.get(name, (0, 0))
        self.counts[name] = drafted + num_drafted, accepted + num_accepted


class Speculator:
    """Drafts for the running requests, within `max_draft` tokens each."""

    def __init__(
        self,
        proposers: Sequence[Proposer],
        max_draft: int,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`proposers`: from the cheapest to the dearest; their lengths share the times of steps
        without drafts. `clock` measures the seconds that looking for drafts takes.
        """
        self._proposers, self._max_draft = tuple(proposers), max_draft
        self._drafters = [each.drafter for each in self._proposers]
        self._lengths = [each.lengths for each in self._proposers]
        self._choice = DraftChoice(self._lengths)
        has_cheap = any(drafter.is_cheap for drafter in self._drafters)
        self._longest_interval = _LONGEST_INTERVAL if has_cheap else STEPS_UNASKED
        # The numbers of the drafters that see hidden states, and the places of theirs among all.
        self._seeing = list[tuple[int, int, int]]()
        first = 0
        for number, drafter in enumerate(self._drafters):
            end = first + len(drafter.taps)
            if end > first:
                self._seeing.append((number, first, end))
            first = end
        self._clock = clock
        # Whose the drafts of the newest step are.
        self._by: dict[Request, int] = {}
        # Seconds of the last look, learning included, and those of a look on average.
        self._spent_s = self._look_s = 0.0
        self._requests: dict[Request, _Drafted] = {}
        self._hot, self._cold = 0, 0
        # While looks find nothing, there is one in so many steps.
        self._interval = 1
        self._num_quiet, self._since_look = 0.0, 0
        self._num_running = 0  # requests in the newest step
        # The steps that are left of a nap, and those that have passed and are not counted yet.
        self._nap, self._slept = 0, 0
        # Whether there was a look for drafts in the newest step.
        self.is_looking = False
        self._looks_next = False
        # The number of steps so far, and at the last one with drafts of each drafter that could
        # draft always.
        self._num_steps, self._drafted_at = 0, [-_SLOW_STEPS - 1] * len(self._proposers)
        # Drafts of the newest step that were forced by a grammar: nothing is learned from them.
        self._forced: dict[Request, list[int]] = {}

    @property
    def is_warm(self) -> bool:
        """See Runner: of the drafters."""
        return all(drafter.is_warm for drafter in self._drafters)

    def work_ahead(self) -> bool:
        """See Runner: for the drafters."""
        return any(drafter.work_ahead() for drafter in self._drafters)

    def renewed(self) -> "Speculator":
        """A speculator that has seen no text yet, and goes on with what was learned about speed;
        this one is not used any more.
        """
        other = copy(self)
        other._drafters = [drafter.renewed() for drafter in self._drafters]
        other._requests, other._by, other._forced = {}, {}, {}
        return other

    def parts(self) -> dict[str, "Speculator"]:
        """Speculators that know nothing yet, by the names of their drafters: with each alone, and
        with all together. They share the drafters, so only one may have requests at a time.
        """
        together = ", ".join(each.name for each in self._proposers)
        groups = {each.name: (each,) for each in self._proposers} | {together: self._proposers}
        found = {}
        for name, proposers in groups.items():
            plain = StepTimes()
            own = [
                Proposer(each.name, each.drafter.renewed(), each.lengths.fresh(plain))
                for each in proposers
            ]
            found[name] = type(self)(own, self._max_draft, self._clock)
        return found

    def add(self, request: Request) -> None:
        """Note a new request."""
        self._choice.trials.begin()
        self._looks_next, self._nap = True, 0
        # Its text may be of another kind, but looks are for all requests.
        others = 1 - 1 / max(1, self._num_running)
        self._num_quiet = min(self._num_quiet, _QUIET_LOOKS * others)
        for drafter in self._drafters:
            drafter.add(request)

    @property
    def taps(self) -> list[int]:
        """The hidden states that the drafters need, of one after the other."""
        return [tap for drafter in self._drafters for tap in drafter.taps]

    @property
    def is_watching(self) -> bool:
        """Whether the step of the last `propose` call matters; otherwise `complete`, `work` and
        `learn` are not called for it.
        """
        if self._nap:
            return False
        if self._forced:
            return True
        if self._choice.all_pause:
            return False
        if self.is_looking or self._since_look <= 1 or not self._is_settled:
            return True
        return any(drafter.has_work for drafter in self._drafters)

    def wants_ids(self) -> bool:
        """Whether the next step should wait for the previous one's ids, to draft from them."""
        if self._nap or self._choice.all_pause or self._choice.is_resting:
            return False
        if not self._would_look():
            return False
        self._cold += 1 + self._slept
        # A trial needs steps in a row, and a head must not fall behind again while it is prepared.
        is_trying = self._choice.trials.is_trying
        if is_trying or self._hot > 0 or self._cold >= _COLD_STEPS:
            self._hot, self._cold = max(0, self._hot - 1), 0
            self._looks_next = True  # once the ids are here
            return True
        return False

    def propose(self, running: Sequence[Request], budget: int) -> Mapping[Request, Sequence[int]]:
        """Drafts for the next step, which computes at most `budget` tokens in all."""
        self._num_steps, self._num_running = self._num_steps + 1, len(running)
        follows_grammars = any(request.matcher is not None for request in running)
        if self._nap and not follows_grammars:
            self._nap, self._slept = self._nap - 1, self._slept + 1
            return {}
        self._forced = find_forced(running, self._max_draft) if follows_grammars else {}
        drafts = self._propose(running, budget)
        self._nap = 0 if follows_grammars or drafts else self._possible_nap()
        return {**drafts, **self._forced} if self._forced else drafts

    def _propose(self, running: Sequence[Request], budget: int) -> Mapping[Request, Sequence[int]]:
        self.is_looking = False
        self._by = {}
        num_steps, self._slept = self._slept + 1, 0
        for ledger in self._choice.ledgers:
            ledger.pass_steps(num_steps)
        if self._choice.all_pause:
            return {}
        if self._choice.rests():
            return {}
        self._since_look += num_steps
        is_due = self._looks_next or self._num_quiet < _QUIET_LOOKS
        if not is_due and self._since_look < self._interval:
            return {}
        num_steps, self._since_look, self.is_looking = self._since_look, 0, True
        self._looks_next = False
        self._look_s += _NEWEST * (self._spent_s - self._look_s)
        began_s = self._clock()
        drafts = self._look(running, budget, num_steps)
        self._spent_s = self._clock() - began_s
        if self.is_looking:
            self._interval = self._next_interval()
        else:
            left = self._choice.trials.steps_to_ask(self._active())
            self._interval = min(left, self._longest_interval)
        return drafts

    def complete(self, batch: ScheduledBatch) -> None:
        """Put ids into drafts that were proposed without them, and a name to each draft."""
        for i, entry in enumerate(batch.requests):
            if entry.draft and entry.request in self._by:
                batch.requests[i] = entry._replace(proposer=self._by[entry.request])
        for number, drafter in enumerate(self._drafters):
            drafter.complete(batch, [each for each, by in self._by.items() if by == number])

    def work(self, batch: ScheduledBatch) -> None:
        """See Drafter."""
        for drafter in self._drafters:
            if drafter.has_work:
                drafter.work(batch)

    @property
    def took_more(self) -> bool:
        """See Drafter: of any drafter."""
        return any(drafter.took_more for drafter in self._drafters)

    def see(self, batch: ScheduledBatch, hidden: "Sequence[Tensor]") -> None:
        """Show a batch's hidden states to the drafters that may soon need them; `hidden`: of all
        `taps`.
        """
        if self._nap:
            return
        for number, first, end in self._seeing:
            if not self._choice.is_far(number, self._since_look):
                self._drafters[number].see(batch, hidden[first:end])

    def learn(
        self,
        batch: ScheduledBatch,
        sampled: Sequence[Sequence[SampledToken]],
        seconds: float,
        has_waited: bool,
        *,
        is_usual: bool = True,
        has_looked: bool = False,
    ) -> None:
        """Learn from a batch's tokens and the seconds it took from beginning to end; `has_waited`:
        it waited for the previous one's ids, because `wants_ids` said so; `is_usual`, `has_looked`:
        see InFlight.
        """
        began_s = self._clock()
        num_rows = sum(entry.num_scheduled_tokens for entry in batch.requests)
        num_drafted = sum(len(entry.draft) for entry in batch.requests)
        # The time of a step that has waited says nothing about steps without drafts.
        proposers = [entry.proposer for entry in batch.requests if entry.draft]
        dearest = max((each for each in proposers if each is not None), default=0)
        tells = None not in proposers and self._tells(dearest, num_rows, num_drafted)
        if has_looked and not num_drafted and self._lengths[0].knows_plain(num_rows):
            tells = False  # the look is in its time
        is_plain = not (num_drafted or has_waited)
        if is_plain and is_usual and self._choice.is_resting:
            self._learn_rest(num_rows, self._choice.rested(num_rows, seconds))
        elif is_usual and tells:
            self._lengths[dearest].add_step(num_rows, seconds, num_drafted, is_plain=is_plain)
            if is_plain and self._is_settled:
                self._choice.timed_plain()
        plain = self._lengths[0].plain_seconds(num_rows)
        if plain is not None and num_drafted == 0:
            more = min(max(0.0, seconds / plain - 1), MOST_LOST_AT_ONCE)
            if not is_usual:
                self._choice.trials.prepared(more)
            elif is_plain and not self._is_settled:
                newest = self._drafted_at.index(max(self._drafted_at))
                self._choice.trials.slowed(newest, more)
        decoding = [entry for entry in batch.requests if entry.catches_up]
        for entry, tokens in zip(decoding, sampled, strict=True):
            if entry.draft:
                self._learn_outcome(entry, len(tokens) - 1)
        if is_usual and sampled and (num_drafted or has_waited) and None not in proposers:
            by = [dearest] if num_drafted else self._active()
            self._book_saving(num_rows - num_drafted, sampled, seconds, by)
        self._spent_s += self._clock() - began_s

    def _learn_rest(self, num_rows: int, settled: Sequence[float]) -> None:
        """Learn from the steps that tell what a rest has found, if it is over."""
        if not settled:
            return
        for each in settled:
            self._lengths[0].add_step(num_rows, each, 0, is_plain=True)
        for lengths in self._lengths:
            lengths.rested(num_rows, settled)
        self._choice.timed_plain()

    def forget(self, request: Request) -> None:
        """Drop a request that has ended."""
        self._requests.pop(request, None)
        for drafter in self._drafters:
            drafter.forget(request)

    def counts(self, request: Request) -> tuple[DraftCount, ...]:
        """A request's drafts so far, of each who proposed any."""
        found = self._requests.get(request)
        if found is None:
            return ()
        return tuple(DraftCount(name, *counts) for name, counts in found.counts.items())

    def _possible_nap(self) -> int:
        """For how many steps from the next one there is nothing to do or to see."""
        if not self._is_settled:
            return 0
        if self._choice.all_pause:
            nap = min(ledger.left for ledger in self._choice.ledgers) - 1
        else:
            if self.is_looking or self._choice.is_resting:
                return 0
            if self._looks_next or self._since_look <= 1:
                return 0
            if any(drafter.has_work for drafter in self._drafters):
                return 0
            nap = self._interval - self._since_look - 1
        nap = min(nap, _LONGEST_NAP)
        since = self._since_look
        while nap >= _SHORTEST_NAP:
            if all(self._choice.is_far(number, since, nap) for number, _, _ in self._seeing):
                return nap
            nap //= 2
        return 0

    @property
    def _is_settled(self) -> bool:
        """Whether steps without drafts take what they would if nobody had drafted."""
        return self._num_steps - max(self._drafted_at) > _SLOW_STEPS

    def _active(self) -> list[int]:
        """The drafters that do not pause."""
        return [number for number, each in enumerate(self._choice.ledgers) if not each.pauses]

    def _would_look(self) -> bool:
        """Whether the next look would ask some drafter."""
        return any(
            self._drafters[number].is_cheap
            or self._choice.trials.would_ask(number, self._since_look + self._slept + 1)
            for number in self._active()
        )

    def _learn_outcome(self, entry: ScheduledRequest, num_accepted: int) -> None:
        if entry.request not in self._requests and entry.request.status is RequestStatus.FINISHED:
            return  # it was aborted, and forgotten
        drafted, by, num_drafted = self._of(entry.request), entry.proposer, len(entry.draft)
        # What is accepted behind the end of an answer is not in it.
        in_answer = min(num_accepted, len(entry.request.token_ids) - entry.known_end)
        drafted.count(self._name(by), num_drafted, in_answer)
        if by is None:
            return
        known = drafted.of(by)
        lengths = self._lengths[by]
        lengths.add_outcome(known.history, known.match_length, num_drafted, num_accepted)
        if num_accepted:
            self._choice.trials.accepted(by, is_whole=num_accepted == num_drafted)

    def _name(self, by: int | None) -> str:
        return _GRAMMAR if by is None else self._proposers[by].name

    def _next_interval(self) -> int:
        """The number of steps to the next look for drafts, if the newest ones found nothing."""
        step_s = self._lengths[0].plain_seconds(max(1, self._num_running))
        if step_s is None:
            return 1
        needed = ceil(self._look_s / (_LOOK_SHARE * step_s))
        return min(max(1, needed), self._longest_interval)

    def _look(
        self, running: Sequence[Request], budget: int, num_steps: int
    ) -> Mapping[Request, Sequence[int]]:
        asks = [self._asks(number, num_steps) for number in range(len(self._drafters))]
        self.is_looking = any(asks)
        if not self.is_looking:
            self._num_quiet += 1.0
            return {}
        rooms = {
            request: room
            for request in running
            if request not in self._forced and (room := room_of(request, self._max_draft))
        }
        proposals = list[list[Proposal | None]]()
        is_copying = False
        for number, drafter in enumerate(self._drafters):
            asks[number] &= not is_copying
            is_asked = asks[number]
            proposals.append([ask(drafter, *each) if is_asked else None for each in rooms.items()])
            is_copying |= self._copies(number, rooms, proposals[-1])
        for number, own in enumerate(proposals):
            if rooms and asks[number] and not any(own):
                self._choice.trials.asked_in_vain(number)
        are_later = (each.num_tokens - each.num_prompt_tokens > _FIRST_TOKENS for each in rooms)
        looked_at = min(sum(are_later), _MOST_WEIGHT)
        if not any(map(any, proposals)):
            self._num_quiet += looked_at
            return {}
        missing = [request.num_tokens - request.num_computed_tokens for request in running]
        most = MAX_DRAFTED_TOKENS - sum(map(len, self._forced.values()))
        chosen = self._choice.again(missing.count(1), proposals, most)
        num_rows = min(sum(missing), budget)
        if chosen is None:
            chosen = self._choice.choose(
                num_rows,
                missing.count(1),
                [
                    [self._candidate(request, i, own[k]) for k, request in enumerate(rooms)]
                    for i, own in enumerate(proposals)
                ],
                most,
                num_steps,
            )
        drafts, unready = {}, set[int]()
        for k, (request, (number, count, is_trial)) in enumerate(zip(rooms, chosen, strict=True)):
            proposal = proposals[number][k]
            if count and proposal is not None and not proposal.is_ready:
                is_guess = is_trial or not self._lengths[number].knows_enough(num_rows)
                self._drafters[number].prepare(request, is_trial=is_guess)
                unready.add(number)
            elif count and proposal is not None:
                self._of(request).of(number).match_length = proposal.match_length
                self._by[request] = number
                drafts[request] = proposal.token_ids[:count]
        for number in unready:
            self._choice.trials.try_again(number)
        if unready and chosen[0].is_trial:
            # The time of a step in which only some draft tells little.
            drafts, self._by = {}, {}
        self._looks_next |= bool(unready) or self._choice.trials.is_trying
        # Whether drafts pay is the ledger's business, see draft_ledger.py.
        if not any(each.num_tokens for each in chosen):
            longest = max(each.match_length for own in proposals for each in own if each)
            is_promising = longest >= _PROMISING_LENGTH
            self._num_quiet += looked_at * (_PROMISING_WEIGHT if is_promising else _SHORT_WEIGHT)
        return drafts

    def _copies(
        self, number: int, requests: Iterable[Request], own: Sequence[Proposal | None]
    ) -> bool:
        """Whether a drafter's proposals copy long passages in all requests."""
        if self._choice.drafting != number:
            return False
        for request, proposal in zip(requests, own, strict=True):
            if proposal is None or proposal.match_length < _COPYING_LENGTH:
                return False
            if self._of(request).of(number).history.longest < _COPYING_LENGTH:
                return False
        return True

    def _asks(self, number: int, num_steps: int) -> bool:
        if self._choice.ledgers[number].pauses:
            return False
        return self._drafters[number].is_cheap or self._choice.trials.asks(number, num_steps)

    def _candidate(
        self, request: Request, number: int, proposal: Proposal | None
    ) -> Candidate | None:
        if proposal is None:
            return None
        history = self._of(request).of(number).history
        return Candidate(history, proposal.match_length, len(proposal.token_ids))

    def _of(self, request: Request) -> _Drafted:
        if request not in self._requests:
            self._requests[request] = _Drafted()
        return self._requests[request]

    def _tells(self, drafter: int, num_rows: int, num_drafted: int) -> bool:
        """Whether a step's time tells what later ones will take: not that of the first ones of
        their kind, where a drafter could draft always. If nothing is known of steps without drafts
        of about so many rows, somewhat slow ones tell more than none.
        """
        if not num_drafted:
            is_first = self._num_steps - max(self._drafted_at) <= _FIRST_STEPS
            is_new = not self._lengths[0].knows_plain(num_rows)
            return self._is_settled or (is_new and not is_first)
        if not self._lengths[drafter].drafts_always:
            return True
        before, own = max(self._drafted_at), self._drafted_at[drafter]
        if self._num_steps - own > _SLOW_STEPS:
            self._lengths[drafter].begin_anew()
        self._drafted_at[drafter] = self._num_steps
        return self._num_steps - before == 1

    def _book_saving(
        self,
        num_rows: int,
        sampled: Sequence[Sequence[SampledToken]],
        seconds: float,
        drafters: Sequence[int],
    ) -> None:
        """Compare a step's time with that of steps without drafts; look again if tokens were
        accepted, and more often if that saved time.
        """
        plain = self._lengths[0].plain_seconds(num_rows)
        if plain is None:
            return
        tokens_each = sum(map(len, sampled)) / len(sampled)
        for drafter in drafters:
            now = self._lengths[drafter].slowness * plain
            self._choice.book(drafter, seconds / now, tokens_each, len(sampled))
        if tokens_each > seconds / plain:
            self._hot, self._num_quiet = _HOT_STEPS, 0.0
        elif tokens_each > 1.0:
            # The first steps of a kind are slow, so one alone does not tell that it never pays.
            self._hot, self._looks_next = max(1, self._hot), True
