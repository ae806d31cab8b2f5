"""Drafts for the requests of a step: what the engine asks of those who draft, in five calls.

`plan` says what the next step should verify, `fill` puts in the ids that are not known before it,
`beside` prepares for later steps while it is computed, `learn` takes what became of it, and
`forget` drops a request that has ended. Drafts cannot change the text (see sampler.py), only its
speed; so decisions rest on measurements (draft_policy.py).
"""

import time
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from localllm.drafting.acceptance import Draft
from localllm.drafting.asking import MAX_DRAFTED_TOKENS, ask, find_forced, room_of
from localllm.drafting.draft_policy import DraftPolicy, Plan, PolicyOutcome
from localllm.drafting.drafter import Drafter, Proposal
from localllm.schedule.request import DraftCount, Request
from localllm.schedule.scheduler import SampledToken, ScheduledBatch, ScheduledRequest
from localllm.schedule.step_clock import StepClock

if TYPE_CHECKING:
    from torch import Tensor

# Who proposes what a grammar forces.
_GRAMMAR = "grammar"
# So many steps before it may draft, a drafter begins to see hidden states.
_SEEN_STEPS = 32
# While nobody is to be asked, one step in so many is timed.
_NAP = 16


class Proposer(NamedTuple):
    """A drafter with its name."""

    name: str
    drafter: Drafter


@dataclass(slots=True)
class PlannedStep:
    """What the speculator remembers of a step until it has been computed.

    `drafter`: whose the drafts are, but those that grammars force, and `matches`: of each of these
    the number of tokens before it that matched; for the rest see PolicyOutcome.
    """

    size: int
    drafter: int | None = None
    matches: Mapping[Request, int] = field(default_factory=dict)
    looks: dict[int, float] = field(default_factory=dict)
    has_waited: bool = False
    is_usual: bool = True


class StepOutcome(NamedTuple):
    """What became of a step: the tokens of its requests that have caught up, and its seconds from
    beginning to end. `planned`: what `fill` returned.
    """

    batch: ScheduledBatch
    sampled: Sequence[Sequence[SampledToken]]
    seconds: float
    planned: PlannedStep | None


class Speculator:
    """Drafts for the running requests, within `max_draft` tokens each."""

    def __init__(
        self,
        proposers: Sequence[Proposer],
        max_draft: int,
        clock: StepClock | None = None,
        now: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`proposers`: from the cheapest to the dearest; `clock`: measures steps, with as many
        drafters; `now`: tells how long looks for drafts take.
        """
        self._proposers, self._max_draft, self._now = tuple(proposers), max_draft, now
        self._drafters = [each.drafter for each in self._proposers]
        are_cheap = [each.is_cheap for each in self._drafters]
        self._policy = DraftPolicy(are_cheap, clock or StepClock(len(are_cheap)))
        # The numbers of the drafters that see hidden states, and the places of theirs among all.
        self._seeing, first = list[tuple[int, int, int]](), 0
        for number, drafter in enumerate(self._drafters):
            end = first + len(drafter.taps)
            if end > first:
                self._seeing.append((number, first, end))
            first = end
        # Of each request that runs, the counts of drafted and accepted tokens by drafter.
        self._counts: dict[Request, dict[str, tuple[int, int]]] = {}
        # The newest step; None if there is nothing to learn from it.
        self._newest: PlannedStep | None = None
        self._has_waited = False
        # The steps that are left in which nobody is asked, and those that have passed like that.
        self._nap = self._slept = 0
        self._last: Request | None = None  # of the running requests

    @property
    def proposers(self) -> Sequence[Proposer]:
        """Who drafts."""
        return self._proposers

    @property
    def taps(self) -> list[int]:
        """The hidden states that the drafters need, of one after the other."""
        return [tap for drafter in self._drafters for tap in drafter.taps]

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
        other._counts, other._newest, other._last = {}, None, None
        return other

    def parts(self) -> dict[str, "Speculator"]:
        """Speculators that know nothing yet, by the names of their drafters: with each alone, and
        with all together. They share the drafters, so only one may have requests at a time.
        """
        together = ", ".join(each.name for each in self._proposers)
        groups = {each.name: (each,) for each in self._proposers} | {together: self._proposers}
        found = {}
        for name, proposers in groups.items():
            own = [each._replace(drafter=each.drafter.renewed()) for each in proposers]
            found[name] = type(self)(own, self._max_draft, now=self._now)
        return found

    def plan(
        self, running: Sequence[Request], *, is_ahead: bool = False
    ) -> Mapping[Request, Sequence[int]] | None:
        """Drafts for the next step; None if it should wait for the ids of the one before, which
        `is_ahead` says are not there yet.
        """
        self._newest = None
        follows_grammars = any(request.matcher is not None for request in running)
        last = running[-1] if running else None
        if self._nap and last is self._last and not follows_grammars:
            self._nap, self._slept = self._nap - 1, self._slept + 1
            return {}
        self._nap, self._last = 0, last
        forced = find_forced(running, self._max_draft) if follows_grammars else {}
        missing = [request.num_tokens - request.num_computed_tokens for request in running]
        size, is_measured = missing.count(1), not forced and set(missing) == {1}
        asked = self._policy.asked(is_measured=is_measured)
        if is_ahead:
            self._has_waited = bool(asked)
            if asked:
                return None
        self._policy.pass_steps(1 + self._slept)
        self._slept = 0
        self._newest = PlannedStep(
            size, has_waited=self._has_waited and not is_ahead, is_usual=is_measured
        )
        self._has_waited = False
        if asked:
            return {**self._look(self._newest, running, asked, forced), **forced}
        if not forced:
            self._nap = self._possible_nap()
        return forced

    def fill(self, batch: ScheduledBatch) -> PlannedStep | None:
        """Put ids into drafts that were proposed without them. Returns what `learn` needs to know
        of the step; None if there is nothing to learn from it.
        """
        step = self._newest
        if step is not None:
            for number, drafter in enumerate(self._drafters):
                drafter.complete(batch, [*step.matches] if number == step.drafter else [])
        return step

    def beside(self, batch: ScheduledBatch, hidden: "Sequence[Tensor]") -> None:
        """Let the drafters see a step's hidden states, those of all `taps`, and prepare for later
        steps while it is computed.
        """
        if self._newest is None:
            return
        for entry in batch.requests:
            if entry.request not in self._counts:
                self._counts[entry.request] = {}
                for drafter in self._drafters:
                    drafter.add(entry.request)
        for number, first, end in self._seeing:
            if self._policy.accounts[number].steps_to_ask <= _SEEN_STEPS:
                self._drafters[number].see(batch, hidden[first:end])
        for number, drafter in enumerate(self._drafters):
            if drafter.has_work:
                began_s = self._now()
                drafter.work(batch)
                if not drafter.is_cheap:  # its trials have to pay for it
                    looks = self._newest.looks
                    looks[number] = looks.get(number, 0.0) + self._now() - began_s
            self._newest.is_usual &= not drafter.took_more

    def learn(self, outcome: StepOutcome) -> None:
        """Learn from what became of a step."""
        batch, sampled, seconds, planned = outcome
        if planned is None or not sampled:
            return
        began_s = self._now()
        decoding = [entry for entry in batch.requests if entry.catches_up]
        num_rows = sum(entry.known_end - entry.start for entry in batch.requests)
        drafts = list[Draft]()
        for entry, tokens in zip(decoding, sampled, strict=True):
            # Of one that was aborted nothing is remembered.
            if not entry.draft or entry.request not in self._counts:
                continue
            match = planned.matches.get(entry.request)
            by = None if match is None else planned.drafter
            self._count(entry, by, len(tokens) - 1)
            if match is not None:
                drafts.append(Draft(entry.request, match, len(entry.draft), len(tokens) - 1))
        self._policy.learn(
            PolicyOutcome(
                size=len(decoding),
                num_tokens=sum(map(len, sampled)),
                seconds=seconds,
                drafter=planned.drafter if drafts else None,
                drafts=drafts,
                looks=planned.looks,
                has_waited=planned.has_waited,
                is_usual=planned.is_usual and num_rows == len(decoding) == planned.size,
            )
        )
        # The time of learning counts as the next step's; where that has no drafts, it is theirs.
        for number in () if drafts else planned.looks:
            seconds = (self._now() - began_s) / len(planned.looks)
            self._policy.charge(number, seconds)

    def forget(self, request: Request) -> tuple[DraftCount, ...]:
        """Drop a request that has ended; returns its drafts, of each who proposed any."""
        self._policy.forget(request)
        for drafter in self._drafters:
            drafter.forget(request)
        counts = self._counts.pop(request, {})
        return tuple(DraftCount(name, *each) for name, each in counts.items())

    def _look(
        self,
        step: PlannedStep,
        running: Sequence[Request],
        asked: Sequence[int],
        forced: Mapping[Request, Sequence[int]],
    ) -> Mapping[Request, Sequence[int]]:
        """What the policy chooses of the drafts that those who are asked propose."""
        rooms = {
            request: room
            for request in running
            if request not in forced and (room := room_of(request, self._max_draft))
        }
        proposals, looks, began_s = dict[int, dict[Request, Proposal]](), {}, self._now()
        for number in asked:
            drafter = self._drafters[number]
            proposals[number] = {
                request: found
                for request, room in rooms.items()
                if (found := ask(drafter, request, room)) is not None
            }
            looks[number] = self._now() - began_s
            began_s += looks[number]
        most = MAX_DRAFTED_TOKENS - sum(map(len, forced.values()))
        plan = self._policy.plan(step.size, proposals, most, is_measured=step.is_usual)
        drafts: Mapping[Request, Sequence[int]] = {}
        if plan is not None:
            own = proposals[plan.drafter]
            step.drafter, drafts = plan.drafter, self._ready(plan, own)
            step.matches = {request: own[request].match_length for request in drafts}
        looks[asked[0]] += self._now() - began_s
        step.looks = looks
        return drafts

    def _ready(
        self, plan: Plan, proposals: Mapping[Request, Proposal]
    ) -> Mapping[Request, Sequence[int]]:
        """The planned drafts of requests that their drafter is ready for; the others are got ready,
        and a trial waits for all of them.
        """
        drafts = dict[Request, Sequence[int]]()
        for request, count in plan.lengths.items():
            if proposals[request].is_ready:
                drafts[request] = proposals[request].token_ids[:count]
            else:
                self._drafters[plan.drafter].prepare(request, is_trial=plan.is_trial)
        if plan.is_trial and len(drafts) < len(plan.lengths):
            self._policy.accounts[plan.drafter].trial_left += 1
            return {}
        return drafts

    def _possible_nap(self) -> int:
        """For how many steps from the next one there is nothing to do, to see, or to measure."""
        if any(drafter.has_work for drafter in self._drafters):
            return 0
        seen = (self._policy.accounts[number].steps_to_ask for number, _, _ in self._seeing)
        idle = min(self._policy.idle_steps(), *(each - _SEEN_STEPS for each in seen), _NAP)
        return max(0, idle - 1)

    def _count(self, entry: ScheduledRequest, by: int | None, num_accepted: int) -> None:
        """Count a draft and what was accepted of it; not what is behind the end of an answer.
        `by`: the drafter; None if a grammar forced it.
        """
        counts = self._counts[entry.request]
        name = _GRAMMAR if by is None else self._proposers[by].name
        in_answer = min(num_accepted, len(entry.request.token_ids) - entry.known_end)
        drafted, accepted = counts.get(name, (0, 0))
        counts[name] = drafted + len(entry.draft), accepted + in_answer
