"""Who drafts in a step: the drafter whose drafts promise the most tokens a second, if any does.

Several drafters propose at once, from the cheapest to the dearest. Each has its own record of times
and acceptances (draft_lengths.py). What a step costs with a drafter's tokens was measured with all
that it does for them, so tokens of cheaper drafters may take the place of its own where they are
likelier.
"""

from collections.abc import Sequence
from typing import NamedTuple

from localllm.drafting.draft_ledger import DraftLedger
from localllm.drafting.draft_lengths import Candidate, DraftLengths, Offer
from localllm.drafting.draft_trials import SEEN_STEPS, DraftTrials
from localllm.drafting.drafter import Proposal
from localllm.drafting.plain_rest import PlainRest

# After _PLAIN_INTERVAL decisions since a step without drafts was timed, nobody drafts for some
# steps, see plain_rest.py. A drafter that could draft always rests after fewer at first, when a
# process becomes faster from step to step, and never after more than _CLOSE_INTERVAL while it
# promises less than _CLOSE times the speed. Where a rest has told nothing, the next one comes after
# _RETRY_REST decisions, and after twice as many each further time.
_FIRST_PLAIN_INTERVAL, _PLAIN_INTERVAL, _RETRY_REST = 4, 512, 32
_CLOSE, _CLOSE_INTERVAL = 1.15, 96
# Where drafts seem to lose, a rest so soon after the last one would tell nothing new.
_JUST_RESTED = 16
_TRIAL_TOKENS = 3
# One decision to draft in so many is for longer drafts or, every other time, for shorter ones.
_OTHER_INTERVAL = 24
# A step counts for a loss of at most so many steps' time, since other things may make it slow.
MOST_LOST_AT_ONCE = 6.0
# A decision to draft holds for so many steps more.
_REPEATS = 7


class Chosen(NamedTuple):
    """For one request, the drafter by its number, and how many of its tokens to verify; `is_trial`:
    only to learn.
    """

    drafter: int
    num_tokens: int
    is_trial: bool = False


class DraftChoice:
    """Chooses among drafters, whose `lengths` are in order of their cost.

    `trials`: when to ask and to try those that are not chosen; `ledgers`: what each has saved.
    """

    def __init__(self, lengths: Sequence[DraftLengths]) -> None:
        self._lengths = lengths
        self.trials = DraftTrials([each.drafts_always for each in lengths])
        self.ledgers = tuple(DraftLedger() for _ in lengths)
        # The drafter whose drafts were last found to be worth their time, None if none were.
        self.drafting: int | None = None
        # The last decision to draft, with the number of requests that decode, and how often it was
        # taken again.
        self._decided: tuple[int, list[Chosen]] | None = None
        self._repeats = 0
        # Decisions since one for drafts of another length than seems best, and whether the next
        # such one is for longer drafts.
        self._since_other, self._is_for_longer = 0, True
        # Decisions since a step without drafts told what such steps take.
        self._since_plain, self._plain_interval = 0, _FIRST_PLAIN_INTERVAL
        self._rest: PlainRest | None = None
        # Whether the last decision was to try a drafter that could draft always: its steps are
        # compared with those of a rest behind them.
        self._has_tried = False
        self._to_retry = _RETRY_REST

    def again(
        self, num_decoding: int, proposals: Sequence[Sequence[Proposal | None]], most: int
    ) -> list[Chosen] | None:
        """The last decision, where nobody else proposes anything; for a few steps only. Decisions
        take time, and what they rest on changes slowly. `proposals`: of each drafter, one for each
        request; for the rest see `choose`.
        """
        if self._decided is None or self._repeats >= _REPEATS:
            return None
        before, chosen = self._decided
        if before != num_decoding or len(chosen) != len(proposals[0]):
            return None
        if sum(each.num_tokens for each in chosen) > most:
            return None
        for i, own in enumerate(proposals):
            is_drafter = i == self.drafting
            if not is_drafter and any(own):
                return None
            if is_drafter and not (self._lengths[i].drafts_always and all(own)):
                return None
        if self._since_plain + 1 >= self._plain_interval:
            return None
        self._repeats += 1
        self._since_plain += 1
        return chosen

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
        offers = [
            lengths.offer(num_rows, num_decoding, own, most, goes_on=i == self.drafting)
            for i, (lengths, own) in enumerate(zip(self._lengths, candidates, strict=True))
        ]
        self._since_plain += 1
        base = self._lengths[0].plain_seconds(num_rows) or 0.0
        for i, own in enumerate(candidates):
            if any(own):
                others = max((each.speed for each in offers if each is not offers[i]), default=0.0)
                rate = max(1.0, others * base / num_decoding)
                is_known = self._lengths[i].knows_enough(num_rows)
                self.trials.proposed(i, num_steps, rate, is_known=is_known)
        gain = max(each.speed for each in offers) * base / num_decoding
        chosen = self._decide(offers, candidates, most, gain)
        used = {each.drafter for each in chosen if each.num_tokens}
        goes_on = used == {self.drafting} and self._rest is None and not chosen[0].is_trial
        self._decided = (num_decoding, chosen) if goes_on else None
        self._repeats = 0
        self._has_tried = any(
            each.is_trial and each.num_tokens > 0 and self._lengths[each.drafter].drafts_always
            for each in chosen
        )
        for drafter in used:
            self.trials.drafts(drafter)
        return chosen

    @property
    def all_pause(self) -> bool:
        """Whether nobody drafts now, since all have lost too much."""
        return all(ledger.pauses for ledger in self.ledgers)

    def is_far(self, drafter: int, num_steps: int, ahead: int = 0) -> bool:
        """Whether a drafter will not draft for so long that what it would see now is of no use, nor
        what it would see `ahead` steps later; `num_steps`: since the last look.
        """
        if self.ledgers[drafter].left > SEEN_STEPS + ahead:
            return True
        return drafter != self.drafting and self.trials.is_far(drafter, num_steps + ahead)

    def book(self, drafter: int, num_steps: float, num_tokens: float, num_requests: int) -> None:
        """Note the time of a step with drafts of a drafter, or that waited for them, in steps
        without any, and the tokens that it gave each of so many requests.
        """
        num_steps = min(num_steps, num_tokens + MOST_LOST_AT_ONCE)
        is_chosen = self.drafting == drafter
        can_rest = is_chosen and self._lengths[drafter].drafts_always
        can_rest &= self._since_plain > _JUST_RESTED
        saved, ledger = num_tokens - num_steps, self.ledgers[drafter]
        is_in_doubt = ledger.book(saved, num_requests, can_measure=can_rest)
        self.trials.took(drafter, num_steps, num_tokens)
        if is_in_doubt:
            self._since_plain, self._decided = self._plain_interval, None
        if ledger.pauses:
            self._has_tried = False
            if is_chosen:
                self.drafting, self._decided, self._rest = None, None, None

    @property
    def is_resting(self) -> bool:
        """Whether steps do without drafts, so that their times are measured."""
        return self._rest is not None

    def rests(self) -> bool:
        """Whether the next step does, which is counted."""
        if self._has_tried and not self.trials.is_trying:
            self._rest, self._has_tried = PlainRest(), False
        if self._rest is not None:
            self._rest.left -= 1
            if self._rest.left < 0:
                self._end_rest()
        return self.is_resting

    def rested(self, num_rows: int, seconds: float) -> Sequence[float]:
        """Note the time of a step that rests; returns what tells of steps without drafts."""
        if self._rest is None:
            return ()
        self._rest.add(num_rows, seconds)
        settled = self._rest.settled if self._rest.is_over else ()
        if self._rest.is_over:
            self._end_rest()
        return settled

    def timed_plain(self) -> None:
        """Note that a step without drafts told what such steps take."""
        self._since_plain, self._to_retry = 0, _RETRY_REST

    def _end_rest(self) -> None:
        self._rest = None
        self._since_plain = max(0, self._plain_interval - self._to_retry)
        self._to_retry = min(2 * self._to_retry, _PLAIN_INTERVAL)

    def _decide(
        self,
        offers: Sequence[Offer],
        candidates: Sequence[Sequence[Candidate | None]],
        most: int,
        gain: float,
    ) -> list[Chosen]:
        best = max(range(len(offers)), key=lambda i: offers[i].speed)
        is_worth_it = offers[best].speed > 0
        self.drafting = best if is_worth_it else None
        if is_worth_it:
            self.trials.pays(best)
        have_proposed = [i for i, own in enumerate(candidates) if any(own)]
        tried = self.trials.next_tried(best if is_worth_it else None, have_proposed)
        if tried is not None:
            counts = self._trial_counts(tried, candidates[tried], most)
            return [Chosen(tried, count, is_trial=True) for count in counts]
        drafts_always = self._lengths[best].drafts_always
        longest = _CLOSE_INTERVAL if is_worth_it and gain < _CLOSE else _PLAIN_INTERVAL
        self._plain_interval = min(self._plain_interval, longest)
        interval = self._plain_interval if drafts_always else _PLAIN_INTERVAL
        if is_worth_it and self._since_plain >= interval:
            # Keeps the measured time of steps without drafts up to date.
            self._plain_interval = min(4 * self._plain_interval, longest)
            self._rest, is_worth_it = PlainRest(), False
        if not is_worth_it:
            return [Chosen(best, 0) for _ in offers[best].chances]
        return self._with_likelier_ones(offers, best, most)

    def _trial_counts(self, drafter: int, own: Sequence[Candidate | None], most: int) -> list[int]:
        """The tokens of each request to try a drafter with, whatever is thought of them.

        Of a drafter that could draft always, one of each request, if there are several: three of
        one request take as many passes, and say little about what one for all of them costs.
        """
        is_for_each = self._lengths[drafter].drafts_always and sum(map(bool, own)) > 1
        each = 1 if is_for_each else _TRIAL_TOKENS
        counts, left = list[int](), most if is_for_each else min(each, most)
        for candidate in own:
            count = 0 if candidate is None else min(each, left, candidate.num_tokens)
            left -= count
            counts.append(count)
        return counts

    def _with_likelier_ones(self, offers: Sequence[Offer], best: int, most: int) -> list[Chosen]:
        """The best offer, but of each request the tokens of the drafter who expects more of them to
        be accepted, among those as cheap as the best.
        """
        winner, number = offers[best], offers[best].best
        self._since_other += 1
        if self._since_other >= _OTHER_INTERVAL:
            # What is never drafted is never known to be likely, or to be cheap.
            longer = min(number + max(sum(map(bool, winner.chances)), number // 2), most)
            number = longer if self._is_for_longer else max(1, number // 2)
            self._since_other, self._is_for_longer = 0, not self._is_for_longer
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
