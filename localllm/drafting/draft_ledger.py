"""What the drafts of one drafter have saved, so that they never lose much.

Estimates may mislead; this counts what steps with drafts took. When they have cost so many steps'
time more than they saved, the drafter pauses; each pause is twice as long as the last. What drafts
save of one request varies from step to step, so that may cost _MOST_LOST_ALONE more. All of the
machine may have become slower instead: so where that can be measured, it is, and only the second
such loss makes the drafter pause, unless as much was saved between them.
"""

_MOST_LOST, _MOST_LOST_ALONE, _SHORTEST_PAUSE, _LONGEST_PAUSE = 4.0, 4.0, 64, 1024
# Earlier savings count for at most so many steps.
_MOST_SAVED = 16.0


class DraftLedger:
    """Of one drafter; in steps without drafts. `left`: the steps that are left of its pause."""

    def __init__(self) -> None:
        self._saved, self.left, self._next_pause = 0.0, 0, _SHORTEST_PAUSE
        self._has_doubted = False

    @property
    def pauses(self) -> bool:
        """Whether the drafter pauses."""
        return self.left > 0

    def pass_steps(self, count: int) -> None:
        """Note that so many steps begin."""
        self.left = max(0, self.left - count)

    def book(self, saved: float, num_requests: int = 1, *, can_measure: bool = False) -> bool:
        """Note that drafts for so many requests saved the time of so many steps, which may be
        negative; in a pause they are not its own. `can_measure`: whether steps without drafts could
        be measured first.

        Returns whether they should be, before the drafter pauses.
        """
        if self.pauses:
            return False
        most_lost = _MOST_LOST + _MOST_LOST_ALONE / num_requests
        self._saved = min(_MOST_SAVED, self._saved + saved)
        if self._saved > most_lost:
            self._has_doubted = False
        if self._saved == _MOST_SAVED:
            self._next_pause = _SHORTEST_PAUSE
        if self._saved >= -most_lost:
            return False
        self._saved, self._has_doubted = 0.0, not self._has_doubted and can_measure
        if not self._has_doubted:
            self.left = self._next_pause
            self._next_pause = min(2 * self._next_pause, _LONGEST_PAUSE)
        return self._has_doubted
