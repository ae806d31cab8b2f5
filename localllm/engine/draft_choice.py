"""Who drafts in a step: the drafter whose drafts promise the most tokens a second, if any does.

Several drafters propose at once, from the cheapest to the dearest. Each has its own record of times
and acceptances (draft_lengths.py). What a step costs with a drafter's tokens was measured with all
that it does for them, so tokens of cheaper drafters may take the place of its own where they are
likelier.
"""

from collections.abc import Sequence
from typing import NamedTuple

from localllm.engine.draft_ledger import DraftLedger
from localllm.engine.draft_lengths import Candidate, DraftLengths, Offer

# After PROBE_INTERVAL steps in which a drafter was not chosen, one step takes a little of it, so
# that something is learned; the interval then doubles up to the longest, begins anew when the
# drafter is chosen, and is at most _NEW_TEXT_INTERVAL when a request begins. After PLAIN_INTERVAL
# steps that draft, one step does not; at first, when a process becomes faster from step to step,
# after fewer.
PROBE_INTERVAL, LONGEST_PROBE_INTERVAL = 48, 768
_NEW_TEXT_INTERVAL, _LONGEST_INTERVAL = 192, 2048
# The first steps of another kind are slower, since caches hold what the last ones needed. So a
# drafter that could draft always is tried for _TRIAL_STEPS, and then there are _PLAIN_STEPS without
# drafts. Trials may take _TRIAL_SHARE of the time, with at most _LONGEST_INTERVAL steps between.
_TRIAL_STEPS, _PLAIN_STEPS, _TRIAL_SHARE = 6, 6, 0.01
FIRST_PLAIN_INTERVAL, PLAIN_INTERVAL = 4, 256
_PROBE_TOKENS = 3
# In one of so many steps that draft, drafts are longer.
_LONGER_INTERVAL = 24
# So many steps before it is tried, a drafter begins to see hidden states again.
_SEEN_STEPS = 64
# A decision to draft holds for so many steps more.
_REPEATS = 3
# A drafter whose look-up is not cheap, and that was not chosen for _LOSING_STEPS, is asked once in
# so many steps.
_LOSING_STEPS, STEPS_UNASKED = 16, 256


class Chosen(NamedTuple):
    """For one request, the drafter by its number, and how many of its tokens to verify; `is_trial`:
    only to learn.
    """

    drafter: int
    num_tokens: int
    is_trial: bool = False


class DraftChoice:
    """Chooses among drafters, whose `lengths` are in order of their cost."""

    def __init__(self, lengths: Sequence[DraftLengths]) -> None:
        self._lengths = lengths
        self._ledgers = [DraftLedger() for _ in lengths]
        # Of each drafter: the steps with proposals since it was chosen, all steps since it was last
        # asked, and whether the next step is to try it.
        self._since = [0] * len(lengths)
        self._unasked = [0] * len(lengths)
        self._is_due = [False] * len(lengths)
        self._is_known = [False] * len(lengths)
        # How many steps' time a trial has cost; the drafter that is being tried or was last, the
        # steps' time since its trial began, and the steps that are left of it.
        self._costs = [0.0] * len(lengths)
        self._trying, self._lost, self._left = -1, 0.0, 0
        # The steps without drafts that are still to come.
        self._plain_left = 0
        # The drafter whose drafts were last found to be worth their time, -1 if none were.
        self._drafting = -1
        # The last decision to draft, with the number of requests that decode, and how often it was
        # taken again.
        self._decided: tuple[int, list[Chosen]] | None = None
        self._repeats = 0
        # Steps since drafts were longer than they seem to be worth.
        self._since_longer = 0
        # The first probe comes late, since it takes several until their times are believed.
        # It is tried again when `_since` reaches its interval.
        self._intervals = [2 * PROBE_INTERVAL] * len(lengths)
        self._since_plain, self._plain_interval = 0, FIRST_PLAIN_INTERVAL

    def asks(self, drafter: int, num_steps: int) -> bool:
        """Whether to ask a dear drafter, `num_steps` after the last call of this: not always, if it
        has not been chosen for long.
        """
        self._unasked[drafter] += num_steps
        if self._is_due[drafter] or self._since[drafter] < _LOSING_STEPS:
            return True
        return self._unasked[drafter] >= min(STEPS_UNASKED, self._intervals[drafter])

    def steps_to_ask(self) -> int:
        """The number of steps until `asks` is true of some drafter, if nothing else happens."""
        pairs = zip(self._intervals, self._unasked, strict=True)
        return max(1, min(min(STEPS_UNASKED, interval) - passed for interval, passed in pairs))

    def choose(
        self,
        num_rows: int,
        num_decoding: int,
        candidates: Sequence[Sequence[Candidate | None]],
        most: int,
        num_steps: int = 1,
    ) -> list[Chosen]:
        """For each request, whose drafts to verify; at most `most` tokens in all. `num_steps`: the
        steps since the last call.

        `candidates`: of each drafter, one for each request. Without drafts the step computes
        `num_rows` rows, and `num_decoding` of them give a token.
        """
        again = self._again(candidates, num_decoding)
        if again is not None:
            return again
        offers = [
            lengths.offer(num_rows, num_decoding, own, most, goes_on=i == self._drafting)
            for i, (lengths, own) in enumerate(zip(self._lengths, candidates, strict=True))
        ]
        self._is_known = [lengths.knows_enough(num_rows) for lengths in self._lengths]
        self._since_plain += 1
        for i, own in enumerate(candidates):
            if any(own):
                self._since[i] += self._unasked[i] or num_steps
                self._unasked[i] = 0
        chosen = self._decide(offers, most)
        goes_on = self._drafting >= 0 and not self._plain_left and not chosen[0].is_trial
        self._decided = (num_decoding, chosen) if goes_on else None
        self._repeats = 0
        used = {each.drafter for each in chosen if each.num_tokens}
        for drafter in used:
            self._since[drafter] = 0
        if not used:
            self._since_plain = 0
        return chosen

    def _again(
        self, candidates: Sequence[Sequence[Candidate | None]], num_decoding: int
    ) -> list[Chosen] | None:
        """The last decision, where nobody else proposes anything; for a few steps only. Decisions
        take time, and what they rest on changes slowly.
        """
        if self._decided is None or self._repeats >= _REPEATS:
            return None
        before, chosen = self._decided
        if before != num_decoding or len(chosen) != len(candidates[0]):
            return None
        for i, own in enumerate(candidates):
            is_drafter = i == self._drafting
            if not is_drafter and any(own):
                return None
            if is_drafter and not (self._lengths[i].drafts_always and all(own)):
                return None
        self._repeats += 1
        self._since_plain += 1
        of_drafter = candidates[self._drafting]
        return [
            each._replace(num_tokens=min(each.num_tokens, candidate.num_tokens))
            for each, candidate in zip(chosen, of_drafter, strict=True)
            if candidate is not None
        ]

    def begin(self) -> None:
        """Note a new request, whose text may be of another kind than those before."""
        for i, interval in enumerate(self._intervals):
            self._intervals[i] = min(interval, max(_NEW_TEXT_INTERVAL, self._shortest(i)))

    def accepted(self, drafter: int) -> None:
        """Note that tokens of a drafter were accepted: it is worth trying again soon."""
        self._intervals[drafter] = min(self._intervals[drafter], self._shortest(drafter))

    def lost(self, num_steps: float, drafter: int | None = None) -> None:
        """Note that a step took so many steps' time more than its tokens are worth, to prepare a
        drafter or with its drafts.
        """
        if drafter is None or drafter == self._trying:
            self._lost += num_steps

    @property
    def all_pause(self) -> bool:
        """Whether nobody drafts now, since all have lost too much."""
        return all(ledger.pauses for ledger in self._ledgers)

    def pauses(self, drafter: int) -> bool:
        """Whether a drafter does not draft now, since its drafts have lost too much."""
        return self._ledgers[drafter].pauses

    def is_far(self, drafter: int, num_steps: int) -> bool:
        """Whether a drafter will not draft for so long that what it would see now is of no use;
        `num_steps`: since the last look.
        """
        is_trying = drafter == self._trying and self._left > 0
        if drafter == self._drafting or is_trying or self._since[drafter] < _LOSING_STEPS:
            return False
        passed = self._since[drafter] + self._unasked[drafter] + num_steps
        return self._intervals[drafter] - passed > _SEEN_STEPS

    def pass_step(self) -> None:
        """Note that a step begins."""
        for ledger in self._ledgers:
            ledger.pass_step()

    def book(self, drafter: int, saved: float) -> None:
        """Note that a step with drafts of a drafter saved so many steps' time."""
        self._ledgers[drafter].book(saved)
        self.lost(-saved, drafter)
        if self._ledgers[drafter].pauses and self._drafting == drafter:
            self._drafting, self._decided = -1, None

    def rests(self) -> bool:
        """Whether this step does without drafts, so that its time is measured; without a look."""
        self._plain_left -= self._plain_left > 0
        return self._plain_left > 0

    @property
    def is_trying(self) -> bool:
        """Whether the next step is to try a drafter, too."""
        return self._left > 0

    def try_again(self, drafter: int) -> None:
        """Note that a chosen drafter was not ready: the next step is to try it."""
        self._is_due[drafter] = True
        self._left += drafter == self._trying

    def _shortest(self, drafter: int) -> int:
        """The shortest interval between trials; it may cost more, once enough is known."""
        if not self._is_known[drafter]:
            return PROBE_INTERVAL
        affordable = min(self._costs[drafter] / _TRIAL_SHARE, _LONGEST_INTERVAL)
        return max(PROBE_INTERVAL, round(affordable))

    def _decide(self, offers: Sequence[Offer], most: int) -> list[Chosen]:
        best = max(range(len(offers)), key=lambda i: offers[i].speed)
        is_worth_it = offers[best].speed > 0
        self._drafting = best if is_worth_it else -1
        if is_worth_it:
            self._intervals[best] = self._shortest(best)
            if best == self._trying:
                self._trying, self._left = -1, 0
        for i, offer in enumerate(offers):
            is_chosen = is_worth_it and i == best
            is_due, self._is_due[i] = self._is_due[i], False
            begins = not is_due and self._since[i] >= self._intervals[i]
            goes_on = is_due or (i == self._trying and self._left > 0)
            if is_chosen or not (begins or goes_on):
                continue
            if begins:
                self._begin_trial(i)
            self._left = max(0, self._left - 1)
            return [Chosen(i, count, is_trial=True) for count in self._trial_counts(i, offer, most)]
        if is_worth_it and self._since_plain >= self._plain_interval:
            # Keeps the measured time of steps without drafts up to date.
            self._plain_interval = min(2 * self._plain_interval, PLAIN_INTERVAL)
            self._plain_left = _PLAIN_STEPS - 1 if self._lengths[best].drafts_always else 0
            is_worth_it = False
        if not is_worth_it:
            return [Chosen(best, 0) for _ in offers[best].chances]
        return self._with_likelier_ones(offers, best, most)

    def _trial_counts(self, drafter: int, offer: Offer, most: int) -> list[int]:
        """The tokens of each request to try a drafter with: where it has to be prepared, those of
        one request, the same in each step of the trial.
        """
        if not self._lengths[drafter].drafts_always:
            return offer.first(min(_PROBE_TOKENS, most))
        tried = next((i for i, own in enumerate(offer.chances) if own), -1)
        return [
            min(_PROBE_TOKENS, len(own), most) if i == tried else 0
            for i, own in enumerate(offer.chances)
        ]

    def _begin_trial(self, drafter: int) -> None:
        if drafter == self._trying:
            self._costs[drafter] += (max(0.0, self._lost) - self._costs[drafter]) / 2
        doubled = min(2 * self._intervals[drafter], LONGEST_PROBE_INTERVAL)
        self._intervals[drafter] = max(doubled, self._shortest(drafter))
        self._trying, self._lost = drafter, 0.0
        self._left = _TRIAL_STEPS if self._lengths[drafter].drafts_always else 1

    def _with_likelier_ones(self, offers: Sequence[Offer], best: int, most: int) -> list[Chosen]:
        """The best offer, but of each request the tokens of the drafter who expects more of them to
        be accepted, among those as cheap as the best.
        """
        winner, number = offers[best], offers[best].best
        self._since_longer += 1
        if self._since_longer >= _LONGER_INTERVAL:
            # What is never drafted is never known to be likely, or to have become cheap.
            self._since_longer = 0
            number = min(number + max(sum(map(bool, winner.chances)), number // 2), most)
        counts = winner.first(number)
        if best == 0:
            return [Chosen(best, count) for count in counts]
        least = min(
            own[count - 1] for own, count in zip(winner.chances, counts, strict=True) if count
        )
        chosen, left = [], most
        for i, count in enumerate(counts):
            mine, expected = Chosen(best, count), sum(winner.chances[i][:count])
            for drafter in range(best):
                likely = [each for each in offers[drafter].chances[i] if each >= least]
                if sum(likely) > expected:
                    mine, expected = Chosen(drafter, len(likely)), sum(likely)
            mine = mine._replace(num_tokens=min(mine.num_tokens, left))
            left -= mine.num_tokens
            chosen.append(mine)
        return chosen
