"""When to try a drafter whose drafts have not been worth their time, to learn what they are worth.

The interval between trials doubles up to the longest, begins anew when the drafter is chosen, and
is at most _NEW_TEXT_INTERVAL when a request begins. Once enough is known, trials take at most
_TRIAL_SHARE of the time.
"""

from collections.abc import Sequence
from dataclasses import dataclass

_SHORTEST_INTERVAL, _LONGEST_DOUBLED = 48, 768
_NEW_TEXT_INTERVAL, _LONGEST_INTERVAL, _TRIAL_SHARE = 192, 2048, 0.01
# The first steps of another kind are slower, since caches hold what the last ones needed. So a
# drafter that could draft always is tried for so many steps.
_TRIAL_STEPS = 6
# A drafter whose look-up is not cheap, and that was not chosen for _LOSING_STEPS, is asked once in
# so many steps.
_LOSING_STEPS, STEPS_UNASKED = 16, 256
# So many steps before it is tried, a drafter begins to see hidden states again.
_SEEN_STEPS = 64


@dataclass(slots=True)
class _Record:
    """What is known of one drafter.

    `since`: the steps with proposals since it was chosen; it is tried again when they reach
    `interval`, which is long at first, since it takes several steps until their times are believed.
    `unasked`: all steps since it was last asked; `is_due`: the next step is to try it; `is_known`:
    enough was measured; `cost`: how many steps' time a trial has cost.
    """

    drafts_always: bool
    interval: int = 2 * _SHORTEST_INTERVAL
    since: int = 0
    unasked: int = 0
    is_due: bool = False
    is_known: bool = False
    cost: float = 0.0

    @property
    def shortest(self) -> int:
        """The shortest interval between trials."""
        if not self.is_known:
            return _SHORTEST_INTERVAL
        affordable = min(self.cost / _TRIAL_SHARE, _LONGEST_INTERVAL)
        return max(_SHORTEST_INTERVAL, round(affordable))


class DraftTrials:
    """The trials of several drafters, by their numbers."""

    def __init__(self, drafts_always: Sequence[bool]) -> None:
        """`drafts_always`: of each drafter, see DraftLengths."""
        self._records = [_Record(always) for always in drafts_always]
        # The drafter that is being tried or was last, the steps' time lost since its trial began,
        # and the steps that are left of it.
        self._trying, self._lost, self._left = -1, 0.0, 0

    @property
    def is_trying(self) -> bool:
        """Whether the next step is to try a drafter, too."""
        return self._left > 0

    def asks(self, drafter: int, num_steps: int) -> bool:
        """Whether to ask a dear drafter, `num_steps` after the last call of this: not always, if it
        has not been chosen for long.
        """
        own = self._records[drafter]
        own.unasked += num_steps
        if own.is_due or own.since < _LOSING_STEPS:
            return True
        return own.unasked >= min(STEPS_UNASKED, own.interval)

    def steps_to_ask(self) -> int:
        """The number of steps until `asks` is true of some drafter, if nothing else happens."""
        left = (min(STEPS_UNASKED, each.interval) - each.unasked for each in self._records)
        return max(1, min(left))

    def is_far(self, drafter: int, num_steps: int) -> bool:
        """Whether it will not be tried for so long that what it would see now is of no use;
        `num_steps`: since the last look.
        """
        own = self._records[drafter]
        if own.since < _LOSING_STEPS or (drafter == self._trying and self._left):
            return False
        return own.interval - own.since - own.unasked - num_steps > _SEEN_STEPS

    def begin(self) -> None:
        """Note a new request, whose text may be of another kind than those before."""
        for own in self._records:
            own.interval = min(own.interval, max(_NEW_TEXT_INTERVAL, own.shortest))

    def accepted(self, drafter: int) -> None:
        """Note that tokens of a drafter were accepted: it is worth trying again soon."""
        own = self._records[drafter]
        own.interval = min(own.interval, own.shortest)

    def lost(self, num_steps: float, drafter: int | None = None) -> None:
        """Note that a step took so many steps' time more than its tokens are worth, to prepare a
        drafter or with its drafts.
        """
        if drafter is None or drafter == self._trying:
            self._lost += num_steps

    def was_asked(self, drafter: int, num_steps: int, *, is_known: bool) -> None:
        """Note that a drafter has proposed something, `num_steps` after the last look; `is_known`:
        enough has been measured of it.
        """
        own = self._records[drafter]
        own.since += own.unasked or num_steps
        own.unasked, own.is_known = 0, is_known

    def drafts(self, drafter: int) -> None:
        """Note that a step has drafts of a drafter."""
        self._records[drafter].since = 0

    def pays(self, drafter: int) -> None:
        """Note that a drafter's drafts are worth their time, so that it need not be tried."""
        own = self._records[drafter]
        own.interval = own.shortest
        if drafter == self._trying:
            self._trying, self._left = -1, 0

    def try_again(self, drafter: int) -> None:
        """Note that a chosen drafter was not ready: the next step is to try it."""
        self._records[drafter].is_due = True
        self._left += drafter == self._trying

    def next_tried(self, chosen: int | None) -> int | None:
        """The drafter to try in this step, which is not the `chosen` one; None for none."""
        for i, own in enumerate(self._records):
            was_due, own.is_due = own.is_due, False
            begins = not was_due and own.since >= own.interval
            goes_on = was_due or (i == self._trying and self._left > 0)
            if i == chosen or not (begins or goes_on):
                continue
            if begins:
                self._start(i, own)
            self._left = max(0, self._left - 1)
            return i
        return None

    def _start(self, drafter: int, own: _Record) -> None:
        if drafter == self._trying:
            own.cost += (max(0.0, self._lost) - own.cost) / 2
        doubled = min(2 * own.interval, _LONGEST_DOUBLED)
        own.interval = max(doubled, own.shortest)
        self._trying, self._lost = drafter, 0.0
        self._left = _TRIAL_STEPS if own.drafts_always else 1
