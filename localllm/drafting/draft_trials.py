"""When to try a drafter whose drafts have not been worth their time, to learn what they are worth.

The interval between trials doubles up to the longest, begins anew when the drafter is chosen, and
is at most _NEW_TEXT_INTERVAL when a request begins. Once enough is known, trials take about
_TRIAL_SHARE of the time: what they take costs as many tokens as would be made without them, which
are more where another drafter's drafts pay.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

_SHORTEST_INTERVAL, _LONGEST_DOUBLED = 48, 768
# A drafter that looks for matches, whose trials are short, is tried first after so many steps.
_FIRST_OF_MATCHES = 4
_NEW_TEXT_INTERVAL, _LONGEST_INTERVAL, _TRIAL_SHARE = 192, 4096, 0.005
# The first steps of another kind are slower, since caches hold what the last ones needed. So a
# drafter that could draft always is tried for so many steps; for fewer, if each of these gave a
# request less than so many tokens on average.
_TRIAL_STEPS, _VAIN_STEPS, _LEAST_TOKENS = 6, 3, 1.25
# A drafter whose look-up is not cheap, and that was not chosen for _LOSING_STEPS, is asked once in
# so many steps, and when it is to be tried.
_LOSING_STEPS, STEPS_UNASKED = 16, 256
# So many steps before it is tried, a drafter begins to see hidden states again.
SEEN_STEPS = 32


@dataclass(slots=True)
class _Record:
    """What is known of one drafter.

    `since`: the steps since it was tried or chosen, up to its last proposal, and `unasked`: those
    after that in which it might have been asked, `asked_at` of them before it was last asked in
    vain. It is tried again when both reach `interval`, which is long at first, since it takes
    several steps until their times are believed. `left`: the steps that are left of its trial;
    `is_due`: the next step is to try it, as it was not ready or has done well; `spent`, `gained`:
    the steps' time, and the tokens, of its last trial and of the drafts that it led to, None before
    the first one; `lost`: the steps' time that trials have lost, on average; `is_known`: enough was
    measured, if only for other numbers of requests; `rate`: the tokens that others make in the time
    of a step without drafts.
    """

    drafts_always: bool
    interval: int = 2 * _SHORTEST_INTERVAL
    since: int = 0
    unasked: int = 0
    asked_at: int = 0
    left: int = 0
    is_due: bool = False
    spent: float | None = None
    gained: float = 0.0
    lost: float | None = None
    is_known: bool = False
    rate: float = 1.0

    @property
    def shortest(self) -> int:
        """The shortest interval between trials."""
        if not self.is_known:
            return _SHORTEST_INTERVAL
        affordable = (self.average_loss() or 0.0) / _TRIAL_SHARE
        return max(_SHORTEST_INTERVAL, round(min(affordable, _LONGEST_INTERVAL)))

    def average_loss(self) -> float | None:
        """The steps' time that a trial loses, the last one that has ended included; None before."""
        if self.spent is None or self.left > 0:
            return self.lost
        # Gains are not saved up: what follows may be of another kind.
        last = max(0.0, self.spent - self.gained / self.rate)
        return last if self.lost is None else (self.lost + last) / 2

    @property
    def is_time(self) -> bool:
        """Whether it is time for a trial."""
        is_first = self.spent is None and not self.drafts_always
        return self.since >= (_FIRST_OF_MATCHES if is_first else self.interval)

    @property
    def is_wanted(self) -> bool:
        """Whether the next step is to try it."""
        return self.is_due or self.left > 0


class DraftTrials:
    """The trials of several drafters, by their numbers."""

    def __init__(self, drafts_always: Sequence[bool]) -> None:
        """`drafts_always`: of each drafter, see DraftLengths."""
        self._records = [_Record(always) for always in drafts_always]

    @property
    def is_trying(self) -> bool:
        """Whether the next step is to try a drafter, too."""
        return any(own.is_wanted for own in self._records)

    def would_ask(self, drafter: int, num_steps: int) -> bool:
        """Whether to ask a dear drafter, `num_steps` after the last `asks`: not always, if it has
        not been chosen for long.
        """
        own = self._records[drafter]
        if own.is_wanted or own.since < _LOSING_STEPS:
            return True
        unasked = own.unasked + num_steps
        is_long_ago = unasked - own.asked_at >= STEPS_UNASKED
        return is_long_ago or own.since + unasked >= own.interval

    def asks(self, drafter: int, num_steps: int) -> bool:
        """The same; the steps are counted."""
        asks = self.would_ask(drafter, num_steps)
        self._records[drafter].unasked += num_steps
        return asks

    def asked_in_vain(self, drafter: int) -> None:
        """Note that a drafter that was asked has proposed nothing. No trial waits for matches."""
        own = self._records[drafter]
        own.asked_at = own.unasked
        own.is_due &= own.drafts_always

    def steps_to_ask(self, drafters: Collection[int]) -> int:
        """The number of steps until `asks` is true of one of these, if nothing else happens."""
        every = [self._records[drafter] for drafter in drafters]
        steps = (min(STEPS_UNASKED + own.asked_at, own.interval - own.since) for own in every)
        left = (due - own.unasked for own, due in zip(every, steps, strict=True))
        return max(1, min(left, default=STEPS_UNASKED))

    def is_far(self, drafter: int, num_steps: int) -> bool:
        """Whether it will not be tried for so long that what it would see now is of no use;
        `num_steps`: since the last look.
        """
        own = self._records[drafter]
        if own.is_wanted or own.since < _LOSING_STEPS:
            return False
        return own.interval - own.since - own.unasked - num_steps > SEEN_STEPS

    def begin(self) -> None:
        """Note a new request, whose text may be of another kind than those before."""
        for own in self._records:
            own.interval = min(own.interval, max(_NEW_TEXT_INTERVAL, own.shortest))

    def accepted(self, drafter: int, *, is_whole: bool) -> None:
        """Note that tokens of a drafter were accepted: it is worth trying again soon. `is_whole`:
        all of its draft were. One that looks for matches is then tried at once until enough is
        known, since a copy goes on.
        """
        own = self._records[drafter]
        own.interval = min(own.interval, own.shortest)
        if is_whole and not (own.is_known or own.drafts_always):
            own.is_due = True

    def prepared(self, num_steps: float) -> None:
        """Note that a step took so many steps' time more, to prepare those that are to be tried."""
        for own in self._records:
            if own.is_wanted and own.spent is not None:
                own.spent += num_steps

    def slowed(self, drafter: int, num_steps: float) -> None:
        """Note that a step without drafts took so many steps' time more, soon after one with those
        of a drafter.
        """
        own = self._records[drafter]
        if own.spent is not None:
            own.spent += num_steps

    def took(self, drafter: int, num_steps: float, num_tokens: float) -> None:
        """Note the time of a step with a drafter's drafts, in steps without any, and the tokens
        that it gave each request.
        """
        own = self._records[drafter]
        if own.spent is not None:
            own.spent += num_steps
            own.gained += num_tokens
            num_tried = _TRIAL_STEPS - own.left
            is_vain = num_tried >= _VAIN_STEPS and own.gained < _LEAST_TOKENS * num_tried
            if own.drafts_always and is_vain:
                own.left = 0

    def proposed(self, drafter: int, num_steps: int, rate: float, *, is_known: bool) -> None:
        """Note that a drafter has proposed something, `num_steps` after the last look; `rate`,
        `is_known`: see _Record.
        """
        own = self._records[drafter]
        own.rate = rate
        own.since += own.unasked or num_steps
        own.unasked, own.asked_at = 0, 0
        own.is_known |= is_known

    def drafts(self, drafter: int) -> None:
        """Note that a step has drafts of a drafter."""
        self._records[drafter].since = 0

    def pays(self, drafter: int) -> None:
        """Note that a drafter's drafts are worth their time, so that it need not be tried."""
        own = self._records[drafter]
        own.left = 0
        own.interval = own.shortest

    def try_again(self, drafter: int) -> None:
        """Note that a chosen drafter was not ready: the next step is to try it."""
        own = self._records[drafter]
        own.is_due = True
        own.left += own.left > 0

    def next_tried(self, chosen: int | None, have_proposed: Collection[int]) -> int | None:
        """The drafter to try in this step, one of those that have proposed something, and not the
        `chosen` one; None for none.
        """
        for i, own in enumerate(self._records):
            was_due, own.is_due = own.is_due, False
            if i not in have_proposed:
                own.left = 0
            elif i != chosen:
                if not (was_due or own.left) and own.is_time:
                    self._start(own)
                if was_due or own.left:
                    own.left = max(0, own.left - 1)
                    return i
        return None

    def _start(self, own: _Record) -> None:
        own.interval = max(min(2 * own.interval, _LONGEST_DOUBLED), own.shortest)
        own.lost = own.average_loss()
        own.since, own.spent, own.gained = 0, 0.0, 0.0
        own.left = _TRIAL_STEPS if own.drafts_always else 1
