"""Who drafts in a step, and how many tokens: one gain and one account for each drafter.

Among `size` requests that decode, D drafted tokens for each multiply the speed of decoding by

    gain(D) = (1 + mean over the requests of the sum of p_i, i = 1..D) / (1 + f + s * D)

p_i: the measured chance that the i-th drafted token and all before it are accepted (acceptance.py);
f, s: the fixed and the marginal cost of verifying drafts, in plain steps (step_model.py). Source:
Leviathan et al. 2023, theorem 3.8, for one request, one chance and f = 0.

What a drafter has gained and lost stands in its account (draft_account.py): looks for drafts,
trials, drafts that seemed to gain, the time of waiting for ids. What is not known is thought likely
as long as there is something in it; who has nothing left drafts what earlier outcomes alone show to
be worth it. So a drafter loses at most ACCOUNT_START, or ACCOUNT_MOST of what it has gained, and
TRICKLE of the time for drafts and half of it for looks; besides, what a trial loses beyond that.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from math import inf
from typing import NamedTuple

from localllm.drafting.acceptance import Draft
from localllm.drafting.draft_account import (
    ACCOUNT_START,
    MOST_CHARGED,
    TRICKLE,
    DraftAccount,
    Owed,
)
from localllm.drafting.drafter import Proposal
from localllm.schedule.request import Request
from localllm.schedule.step_clock import StepClock
from localllm.schedule.step_model import GUESSED_COST, SETTLE_STEPS

# Steps of a trial: the first ones with drafts are slow.
TRIAL_STEPS = 4

# Plain steps that take less than this share of what they ever took are those of another machine.
FAST = 0.7

# By drafter and request.
Proposals = Mapping[int, Mapping[Request, Proposal]]


class Plan(NamedTuple):
    """Who drafts, the number of tokens for each request, and the gain that they promise.

    `accepted`: the tokens that are thought to be accepted, mean over the requests; `is_trial`: they
    are drafted only to learn.
    """

    drafter: int
    lengths: Mapping[Request, int]
    accepted: float
    gain: float
    is_trial: bool = False


@dataclass(frozen=True, slots=True)
class PolicyOutcome:
    """What became of a step in which `size` requests decoded: the tokens of all, and its time.

    `drafter`: whose the drafts are, None if there are none; `looks`: the seconds in which each
    drafter was asked and got ready, which are in the time; `has_waited`: the step waited for the
    one before it, to draft from its ids; `is_usual`: it did nothing else, such as to catch up with
    a prompt.
    """

    size: int
    num_tokens: int
    seconds: float
    drafter: int | None = None
    drafts: Sequence[Draft] = ()
    looks: Mapping[int, float] = field(default_factory=dict)
    has_waited: bool = False
    is_usual: bool = True


class DraftPolicy:
    """Plans the drafts of each step, and learns from what became of them."""

    def __init__(self, is_cheap: Sequence[bool], clock: StepClock) -> None:
        """`is_cheap`: of each drafter, see DraftAccount."""
        share = TRICKLE / len(is_cheap)
        self.accounts = [DraftAccount(each, share) for each in is_cheap]
        self.clock = clock
        self._is_resting = False
        # What would have been gained in the newest step if those that draft had not.
        self._rate = 1.0
        # Whose drafts promised the most in the newest step, if anyone's were worth it.
        self._chosen: int | None = None
        # The last plan of who looks for no matches, and in how many steps it was taken.
        self._held: Plan | None = None
        self._num_held = self._held_size = 0
        # Since plain steps were measured: steps, tokens of a request, and time in plain steps.
        self._num_steps, self._tokens, self._time = 0, 0.0, 0.0
        # The steps of the last rest, and the plain steps that they took.
        self._rest = (2 * SETTLE_STEPS, 2.0 * SETTLE_STEPS)
        # By size, the least and the most that plain steps have taken.
        self._range: dict[int, tuple[float, float]] = {}

    def pass_steps(self, count: int) -> None:
        """Note that so many steps begin."""
        for each in self.accounts:
            each.pass_steps(count)

    def idle_steps(self) -> int:
        """For how many steps there is nothing to measure and nobody to ask, if nothing happens."""
        if not self.clock.is_settled or self.clock.plain_seconds is None:
            return 0
        return min(each.steps_to_ask for each in self.accounts)

    def asked(self, *, is_measured: bool = True) -> list[int]:
        """The drafters whose proposals `plan` needs."""
        if self._is_resting or self.clock.plain_seconds is None:
            return []
        if not is_measured:
            return [number for number, each in enumerate(self.accounts) if each.is_used]
        # While text is copied, what others might say is not as long, as far as is known.
        is_copying = self._chosen is not None and self.accounts[self._chosen].is_cheap
        least = self.accounts[self._chosen].gain if is_copying and self._chosen is not None else 0.0
        return [
            number
            for number, each in enumerate(self.accounts)
            if not each.steps_to_ask and (each.is_cheap or each.gain > least)
        ]

    def plan(
        self, size: int, proposals: Proposals, most: int, *, is_measured: bool = True
    ) -> Plan | None:
        """The drafts of the next step, in which `size` requests decode, of at most `most` tokens in
        all; None for a plain one. `is_measured`: it has nothing else to do, such as a prompt.
        """
        if self._held is not None and is_measured and self._holds(self._held, size, proposals):
            self._num_held += 1
            return self._held
        plans = [
            self._best(number, proposals.get(number, {}), size, most)
            for number in range(len(self.accounts))
        ]
        worth = [plan for plan in plans if plan is not None and plan.gain > 1]
        chosen = max(worth, key=lambda plan: plan.gain, default=None)
        if not is_measured:
            return chosen
        tried = self._tried(plans, chosen, worth, size)
        for number, plan in enumerate(plans):
            if number in proposals:
                self.accounts[number].is_used = plan in worth
                self.accounts[number].gain = 1.0 if plan is None else max(1.0, plan.gain)
                if plan is not None:
                    # What a trial loses, as far as is known.
                    lost = TRIAL_STEPS * (1 + plan.accepted) * (1 / plan.gain - 1)
                    self.accounts[number].needs = min(max(1.0, 1 + lost), ACCOUNT_START / 2)
        self._chosen = None if chosen is None else chosen.drafter
        drafts = tried or chosen
        others = (plan.gain for plan in worth if drafts and plan.drafter != drafts.drafter)
        self._rate = max(others, default=1.0)
        if tried is None and chosen is not None and not self.clock.is_settled:
            self._is_resting = self._rest_is_paid(chosen.gain)
            chosen = None if self._is_resting else chosen
        planned = tried or chosen
        is_steady = planned is chosen is not None and not self.accounts[chosen.drafter].is_cheap
        self._held, self._num_held, self._held_size = planned if is_steady else None, 1, size
        return planned

    def _holds(self, held: Plan, size: int, proposals: Proposals) -> bool:
        """Whether a plan is as good for this step, too: plans take time, and what they rest on
        changes slowly where nobody looks for matches.
        """
        others = any(own for number, own in proposals.items() if number != held.drafter)
        own = proposals.get(held.drafter, {})
        if others or self._num_held >= TRIAL_STEPS or size != self._held_size:
            return False
        if len(own) != len(held.lengths) or self.accounts[held.drafter].balance <= 0:
            return False
        return all(
            request in own and len(own[request].token_ids) >= count
            for request, count in held.lengths.items()
        )

    def _best(
        self, number: int, own: Mapping[Request, Proposal], size: int, most: int
    ) -> Plan | None:
        """A drafter's drafts of the best gain, even if it is a loss; None if there are none."""
        account = self.accounts[number]
        if not own:
            return None
        fixed, marginal = self.clock.model.line(number)
        is_sure = account.balance <= 0 and not account.trial_left
        least = marginal if account.is_used else max(marginal, GUESSED_COST)
        chances = list[list[float]]()
        for request, proposal in islice(own.items(), most):
            # A token that is less likely than what it costs is never worth it.
            count, match = len(proposal.token_ids), proposal.match_length
            chances.append(
                account.acceptance.chances(request, match, count, least, is_sure=is_sure)
            )
        best, promised, total, accepted = Plan(number, {}, 0.0, 0.0), -inf, 0, 0.0
        for length in range(1, 1 + max(map(len, chances))):
            likely = [each[length - 1] for each in chances if len(each) >= length]
            total += len(likely)
            accepted += sum(likely)
            if total > most:
                break
            tokens, steps = 1 + accepted / size, max(1.0, 1 + fixed + marginal * total / size)
            # Where all lose, those that lose the fewest tokens are the ones to try.
            promise = tokens / steps - 1 if tokens > steps else tokens - steps
            if promise > promised:
                lengths = {
                    request: min(length, len(each))
                    for request, each in zip(own, chances, strict=False)
                }
                best, promised = Plan(number, lengths, tokens - 1, tokens / steps), promise
        return best

    def _tried(
        self, plans: Sequence[Plan | None], chosen: Plan | None, worth: Sequence[Plan], size: int
    ) -> Plan | None:
        """The drafts of who is on trial, as is who begins to be used; None if nobody is."""
        on_trial = []
        for each, plan in zip(self.accounts, plans, strict=True):
            begins = not each.is_used if plan is chosen else each.balance >= each.needs
            begins &= plan is chosen or plan not in worth
            if plan is None:
                each.trial_left = 0
            elif begins and not each.trial_left:
                # Several in a row, unless drafts come and go with the text.
                each.trial_left = 1 if each.is_cheap else TRIAL_STEPS
            if each.trial_left and plan is not None:
                on_trial.append(plan)
        # Others experiment between its steps, as while a prompt is computed.
        if not on_trial or not self.clock.begin_experiment(self):
            return None
        tried = chosen if chosen is not None and chosen in on_trial else on_trial[0]
        self.accounts[tried.drafter].trial_left -= 1
        return tried._replace(is_trial=True)

    def _rest_is_paid(self, gain: float) -> bool:
        """Whether to do without drafts until plain steps have settled, to measure them: when that
        loses fewer tokens than have trickled since they were measured.
        """
        rate = max(gain, self._tokens / self._time if self._time else 1.0)
        num_steps, plain_steps = self._rest
        return self._num_steps * TRICKLE > rate * plain_steps - num_steps

    def learn(self, outcome: PolicyOutcome) -> None:
        """Learn from a step in which no prompt was computed."""
        self.clock.end_experiment(self)
        size, before = outcome.size, self.clock.plain_seconds
        seconds = outcome.seconds - sum(outcome.looks.values())
        if outcome.drafter is not None:
            self.accounts[outcome.drafter].acceptance.add(outcome.drafts)
            self.clock.unsettle()
        if seconds <= 0 or self.clock.is_disturbed(self):
            return  # its time tells nothing
        if outcome.drafter is not None:
            if before is not None and outcome.is_usual:
                self._learn_draft(outcome.drafter, outcome, seconds, before)
        elif outcome.has_waited:
            steps = 1.0 if before is None else min(seconds / before, MOST_CHARGED)
            for number in outcome.looks:
                self.accounts[number].charge_look((steps - 1) / len(outcome.looks))
        elif not outcome.is_usual:
            pass
        elif self.clock.is_settled:
            self.clock.add_plain(size, seconds)
            self._note_news(size)
        elif self.clock.add_plain(size, seconds):
            self._settle(self.clock.model.plain_seconds / size)
            self._note_news(size)
        elif before is not None:
            self._count(1.0, min(seconds / before, MOST_CHARGED))
        if before is not None:
            for number, look_s in outcome.looks.items():
                self.charge(number, look_s)

    def charge(self, number: int, seconds: float) -> None:
        """Take what was done for a drafter out of its account."""
        plain = self.clock.plain_seconds
        if plain is not None:
            self.accounts[number].charge_look(min(seconds / plain, MOST_CHARGED))

    def _note_news(self, size: int) -> None:
        """Refill accounts once plain steps take what they never took before: what was lost was lost
        on another machine, as it were.
        """
        now = self.clock.plain_seconds or 0.0
        least, most = self._range.get(size, (now, now))
        if not FAST * least <= now <= most / FAST:
            for each in self.accounts:
                each.refill()
            least, most = min(least, now), max(most, now)
        self._range[size] = least, most

    def _settle(self, now: float) -> None:
        """Note that plain steps were measured: they take `now` seconds for each request."""
        since = [seconds / now for seconds in self.clock.since]
        self._rest = (len(since), sum(since))
        self._is_resting = False
        self._num_steps, self._tokens, self._time = 0, 0.0, 0.0

    def _learn_draft(
        self, number: int, outcome: PolicyOutcome, seconds: float, plain: float
    ) -> None:
        account, model = self.accounts[number], self.clock.model
        tokens = outcome.num_tokens / outcome.size
        length = sum(draft.num_drafted for draft in outcome.drafts) / outcome.size
        model.add_drafts(outcome.size, number, length, seconds)
        self._count(tokens, seconds / plain)
        line = model.line(number) if model.is_known(number) else None
        account.book(Owed(tokens, length, self._rate), line)
        self._is_resting = model.is_doubtful

    def _count(self, tokens: float, plain_steps: float) -> None:
        self._num_steps += 1
        self._tokens += tokens
        self._time += plain_steps

    def forget(self, request: Request) -> None:
        """Drop a request that has ended."""
        for each in self.accounts:
            each.acceptance.forget(request)
