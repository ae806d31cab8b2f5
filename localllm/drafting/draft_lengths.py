"""How many tokens to draft: the number that gives the most tokens a second, which may be 0.

A step that verifies D drafted tokens besides the B newest ones gives

    (B + sum over the D of the chance that each is accepted) / T(B + D)

tokens a second; a step without drafts gives B / T(B). T is the measured time of such steps on this
machine. The chances come from earlier drafts, by the number of tokens before the position that had
matched, for each request and for all. Tuning on acceptance alone loses where arithmetic is
expensive: vLLM's pull request 26504 reports 0.83 of all tokens accepted and 16 % less speed.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from operator import mul
from typing import NamedTuple

from localllm.drafting.costs_beside_rests import CostsBesideRests
from localllm.drafting.speculation_config import MAX_DRAFT
from localllm.schedule.step_times import DraftCosts, StepTimes

# A draft must promise this much more speed to be worth its uncertainty.
MARGIN = 1.08
# The same where a drafter could draft always, to begin and to go on, of many requests; one of
# `num_decoding` requests may promise less by so much divided by their number, since estimates of
# few go up and down, and what is lost is counted (draft_ledger.py). Where many end together, the
# last ones decode alone, which takes back some of the gain.
_MARGIN_TO_BEGIN, _LESS_TO_BEGIN = 1.08, 0.04
_MARGIN_TO_GO_ON, _LESS_TO_GO_ON = 1.04, 0.11
# Steps with drafts cannot take less time than those without: so many that take less than this share
# of it show that the latter have become faster.
_IN_DOUBT, _TOO_FAST = 3, 0.93
# Drafts less likely than this are not considered.
_LEAST_CHANCE = 0.02
# How fast earlier drafts are forgotten, for one request and for all requests, and the weight of the
# latter for a request of which little is known.
_FORGET_OWN, _FORGET_ALL, _PRIOR_WEIGHT = 0.95, 0.995, 2.0
# The weight of the initial guess of each class.
_GUESSED = 2.0
# The last two for drafters that look at no matches: requests with one kind of text are alike, and
# those with the next kind are not.
_FORGET_KIND, _ALIKE_WEIGHT = 0.98, 10.0
# So many outcomes tell what drafts are worth: few where they come from matches, since a draft that
# is rejected there may cost several steps.
_ENOUGH, _ENOUGH_OF_MATCHES = 12, 2


@dataclass(slots=True)
class Outcomes:
    """Weighted counts of drafted tokens that were decided and accepted; older ones weigh less."""

    decided: float
    accepted: float

    @property
    def chance(self) -> float:
        """The chance that the next token is accepted."""
        return self.accepted / self.decided

    def chance_with(self, guess: float, weight: float) -> float:
        """The same, with a guess that counts as `weight` outcomes."""
        return (self.accepted + weight * guess) / (self.decided + weight)

    def add(self, is_accepted: bool, kept: float) -> None:
        """Record one more outcome; earlier ones keep the fraction `kept` of their weight."""
        self.decided = kept * self.decided + 1
        self.accepted = kept * self.accepted + is_accepted


@dataclass(slots=True)
class DraftHistory:
    """Outcomes of one request's drafts by class of position, and the longest next draft.

    `longest` doubles after a draft was accepted whole and halves after one was rejected whole.
    """

    outcomes: dict[int, Outcomes] = field(default_factory=dict)
    longest: int = 4


class DraftLengths:
    """How long the drafts of one drafter should be; learns from the outcome.

    The class of a position is the number of tokens before it that matched, at most
    `num_classes` - 1; or, for a drafter that looks at no matches, its depth in the draft.
    """

    def __init__(
        self, num_classes: int, plain: StepTimes | None = None, *, has_matches: bool = True
    ) -> None:
        """`plain`: the times of steps without drafts, which several drafters may share."""
        self._has_matches = has_matches
        # Initial guess: the longer the match, the likelier the next token. A token deep in a draft
        # is as likely as the one before it.
        self._outcomes = [
            Outcomes(_GUESSED, _GUESSED * (kind + 1) / (kind + 2))
            if has_matches
            else Outcomes(0.0, 0.0)
            for kind in range(num_classes)
        ]
        self._plain = StepTimes() if plain is None else plain
        # Steps with drafts that come from matches and those without them alternate as it is.
        self._beside = None if has_matches else CostsBesideRests(self._plain)
        self._drafting = self._beside or DraftCosts()
        self._newest = deque[float](maxlen=_IN_DOUBT)

    @property
    def drafts_always(self) -> bool:
        """Whether its drafter could draft at every step, since it looks at no matches."""
        return not self._has_matches

    def fresh(self, plain: StepTimes) -> "DraftLengths":
        """The same, with nothing learned yet."""
        return type(self)(len(self._outcomes), plain, has_matches=self._has_matches)

    def offer(
        self,
        num_rows: int,
        num_decoding: int,
        candidates: Sequence["Candidate | None"],
        most: int,
        *,
        goes_on: bool = False,
    ) -> "Offer":
        """How many tokens of each candidate to verify, at most `most` in all. A request without a
        proposal has no candidate. `goes_on`: the last step had drafts, too.

        Without drafts the step computes `num_rows` rows, and `num_decoding` of them give a token.
        """
        chances = [() if each is None else self._chances(each) for each in candidates]
        ranked = _ranked(chances, is_level=not self._has_matches)
        likeliest = [chance for chance, _ in ranked[:most]]
        margin = self._margin(num_decoding, goes_on=goes_on)
        best, speed = self._best_number(num_rows, num_decoding, likeliest, margin)
        return Offer(chances, ranked, best, speed)

    def add_step(self, num_rows: int, seconds: float, num_drafted: int, *, is_plain: bool) -> None:
        """Record the time of a step of `num_rows` rows, `num_drafted` of them drafted; `is_plain`:
        drafting had no part in it.
        """
        if is_plain:
            self._plain.add(num_rows, seconds)
            return
        rows = num_rows - num_drafted
        base = self._plain.seconds(rows)
        if base is None:
            return
        if num_drafted and self._beside is not None:
            self._beside.add(rows, num_drafted, seconds)
        elif num_drafted and self._plain.knows(rows):
            self._drafting.add(rows, num_drafted, seconds / base)
        self._newest.append(seconds / base)
        if len(self._newest) == _IN_DOUBT and max(self._newest) < _TOO_FAST:
            # Everything has become faster; what was measured before misleads.
            self._plain.forget(rows)
            self._drafting.forget(rows)
            self._newest.clear()

    def rested(self, num_rows: int, seconds: Sequence[float]) -> None:
        """Record the times of a rest's steps (plain_rest.py), which count as plain ones already."""
        if self._beside is not None:
            self._beside.rested(num_rows, seconds)

    def begin_anew(self) -> None:
        """Note that the next step with drafts is far from the last one, and from the last rest."""
        if self._beside is not None:
            self._beside.begin_anew()

    def add_outcome(
        self, history: DraftHistory, match_length: int, num_drafted: int, num_accepted: int
    ) -> None:
        """Record the outcome of a draft after a match of `match_length` tokens."""
        for i in range(min(num_accepted + 1, num_drafted)):
            is_accepted = i < num_accepted
            kind = self._kind(match_length + i)
            general = self._outcomes[kind]
            if kind not in history.outcomes:
                history.outcomes[kind] = Outcomes(0.0, 0.0)
            history.outcomes[kind].add(is_accepted, _FORGET_OWN)
            general.add(is_accepted, _FORGET_ALL if self._has_matches else _FORGET_KIND)
        if num_accepted == num_drafted:
            history.longest = min(max(history.longest, 2 * num_drafted), MAX_DRAFT)
        elif num_accepted == 0:
            history.longest = max(1, history.longest // 2)

    def knows_enough(self, num_rows: int) -> bool:
        """Whether steps with drafts besides so many rows have been measured, and many outcomes; the
        latter suffice where drafts would not be worth it even if they took no time.
        """
        decided, enough = sum(outcomes.decided for outcomes in self._outcomes), _ENOUGH
        if self._has_matches:
            enough, decided = _ENOUGH_OF_MATCHES, decided - _GUESSED * len(self._outcomes)
        if decided <= enough:
            return False
        return self._is_vain() or self._drafting.factor(num_rows, 1) is not None

    def plain_seconds(self, num_rows: int) -> float | None:
        """Seconds of a step without drafts; None if none was measured."""
        return self._plain.seconds(num_rows)

    @property
    def slowness(self) -> float:
        """How many times as long as usual those took in the last rest; 1 if none was lately."""
        return 1.0 if self._beside is None else self._beside.slowness

    def knows_plain(self, num_rows: int) -> bool:
        """Whether steps of about so many rows without drafts have been measured."""
        return self._plain.knows(num_rows)

    def _is_vain(self) -> bool:
        """Whether a drafter that could draft always is right so rarely that drafts gain nothing."""
        chances = (self._general_chance(kind) for kind in range(len(self._outcomes)))
        gained = sum(accumulate(chances, mul))
        return self.drafts_always and gained < self._margin(1, goes_on=False) - 1

    def _margin(self, num_decoding: int, *, goes_on: bool) -> float:
        """How many times as fast drafts must promise to be to be worth their uncertainty."""
        if self._has_matches:
            return MARGIN
        if goes_on:
            return _MARGIN_TO_GO_ON - _LESS_TO_GO_ON / num_decoding
        return _MARGIN_TO_BEGIN - _LESS_TO_BEGIN / num_decoding

    def _best_number(
        self, num_rows: int, num_decoding: int, chances: Sequence[float], margin: float
    ) -> tuple[int, float]:
        """The best number of drafted tokens, and the tokens a second that they promise; 0 and 0 if
        none are worth it.
        """
        base = self._plain.seconds(num_rows)
        if base is None or not self._plain.knows(num_rows):
            return 0, 0.0
        best, least = 0, margin * num_decoding
        expected = list(accumulate(chances, initial=float(num_decoding)))
        if expected[-1] <= least:
            return 0, 0.0  # too little even if drafting were free
        best_speed = least / base
        for count in _tried_numbers(len(chances)):
            speed = expected[count] / self._drafting_seconds(num_rows, count, base)
            if speed > best_speed:
                best, best_speed = count, speed
        return best, best_speed if best else 0.0

    def _drafting_seconds(self, num_rows: int, num_drafted: int, base: float) -> float:
        """Seconds of a step with drafts, at least `base`, those of the step without them. Where no
        such step was measured, drafts cost what rows cost.
        """
        factor = self._drafting.factor(num_rows, num_drafted)
        if factor is not None:
            return base * max(1.0, factor)
        plain = self._plain.seconds(num_rows + num_drafted)
        assert plain is not None
        return max(plain, base)

    def _chances(self, candidate: "Candidate") -> Sequence[float]:
        """The chances that the first one, two, … tokens of a proposal are all accepted."""
        longest = candidate.history.longest if self._has_matches else candidate.num_tokens
        first, last = candidate.match_length, len(self._outcomes) - 1
        found, chance, own = list[float](), 1.0, 0.0
        for i in range(min(candidate.num_tokens, longest)):
            if i == 0 or first + i <= last:
                own = self._chance(candidate.history, self._kind(first + i))
            chance *= own
            if chance <= _LEAST_CHANCE:
                break
            found.append(chance)
        return found

    def _chance(self, history: DraftHistory, kind: int) -> float:
        general, own = self._general_chance(kind), history.outcomes.get(kind)
        if own is None:
            return general
        weight = _PRIOR_WEIGHT if self._has_matches else _ALIKE_WEIGHT
        return own.chance_with(general, weight)

    def _general_chance(self, kind: int) -> float:
        if self._has_matches:
            return self._outcomes[kind].chance
        chance, weight = 0.5, _PRIOR_WEIGHT
        for outcomes in self._outcomes[: kind + 1]:
            chance, weight = outcomes.chance_with(chance, weight), _ALIKE_WEIGHT
        return chance

    def _kind(self, match_length: int) -> int:
        return min(match_length, len(self._outcomes) - 1)


def _tried_numbers(most: int) -> Iterator[int]:
    """1 to 4, 6, 8, 12, 16, …, and `most`."""
    count, step = 1, 1
    while count < most:
        yield count
        if count >= 4 * step:
            step *= 2
        count += step
    yield most


class Candidate(NamedTuple):
    """A proposal of `num_tokens` tokens after a match of `match_length`, for one request."""

    history: DraftHistory
    match_length: int
    num_tokens: int


class Offer(NamedTuple):
    """What one drafter has for a step.

    `chances`: for each request, the chances that the first one, two, … tokens are all accepted;
    `ranked`: all of them with their request, the first ones to verify first; `best`: how many of
    these are worth verifying; `speed`: the tokens a second that they promise, 0 if none are.
    """

    chances: Sequence[Sequence[float]]
    ranked: Sequence[tuple[float, int]]
    best: int
    speed: float

    def first(self, number: int) -> list[int]:
        """The tokens of each request among the first `number`."""
        counts = [0] * len(self.chances)
        for _, i in self.ranked[:number]:
            counts[i] += 1
        return counts


def _ranked(chances: Sequence[Sequence[float]], *, is_level: bool) -> list[tuple[float, int]]:
    """Every token's chance and request, the likeliest first. With `is_level` all first tokens, then
    all second ones, and so on: drafts should be equally long, as the longest one decides what they
    cost.
    """
    if len(chances) == 1:
        return [(chance, 0) for chance in chances[0]]
    if not is_level:
        each = ((chance, i) for i, own in enumerate(chances) for chance in own)
        return sorted(each, reverse=True)
    return [
        pair
        for depth in range(max(map(len, chances), default=0))
        for pair in sorted(
            ((own[depth], i) for i, own in enumerate(chances) if depth < len(own)), reverse=True
        )
    ]
