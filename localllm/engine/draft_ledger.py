"""What the drafts of one drafter have saved, so that they never lose much.

Estimates may mislead; this counts what steps with drafts took. When they have cost _MOST_LOST
steps' time more than they saved, the drafter pauses; each pause is twice as long as the last.
"""

_MOST_LOST, _SHORTEST_PAUSE, _LONGEST_PAUSE = 8.0, 64, 1024
# Earlier savings count for at most so many steps.
_MOST_SAVED = 16.0


class DraftLedger:
    """Of one drafter; in steps without drafts. `left`: the steps that are left of its pause."""

    def __init__(self) -> None:
        self._saved, self.left, self._next_pause = 0.0, 0, _SHORTEST_PAUSE

    @property
    def pauses(self) -> bool:
        """Whether the drafter pauses."""
        return self.left > 0

    def pass_steps(self, count: int) -> None:
        """Note that so many steps begin."""
        self.left = max(0, self.left - count)

    def book(self, saved: float) -> None:
        """Note that drafts saved the time of so many steps, which may be negative; in a pause they
        are not its own.
        """
        if self.pauses:
            return
        self._saved = min(_MOST_SAVED, self._saved + saved)
        if self._saved < -_MOST_LOST:
            self._saved, self.left = 0.0, self._next_pause
            self._next_pause = min(2 * self._next_pause, _LONGEST_PAUSE)
        elif self._saved == _MOST_SAVED:
            self._next_pause = _SHORTEST_PAUSE
