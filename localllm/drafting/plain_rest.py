"""Steps without drafts among those with them, to measure what they take.

They are slow at first: caches hold what steps with drafts need, and the processor's clock is that
of another kind of work. With `pocket` on two threads of one core, the first one takes 1.6 times as
long as it would if nobody had drafted, the fifth 1.3 times, and the tenth 1.1 times. So a rest goes
on while its steps become faster, and only its last ones count.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

# The fewest and the most steps of a rest, and the most where others come between, such as those
# with drafts that a grammar forces. Behind so few tokens a head needs no step to catch up.
_FEWEST, _MOST, _MOST_WITH_OTHERS = 6, 15, 30
# It goes on while the fastest of its last steps takes less than _FALLS times as long as the fastest
# of as many before them.
_LAST, _FALLS = 3, 0.98


@dataclass(slots=True)
class PlainRest:
    """The seconds of the steps of a rest, all of `num_rows` rows; `left`: the most that are still
    to come, of any kind.
    """

    left: int = _MOST_WITH_OTHERS
    num_rows: int = 0
    seconds: list[float] = field(default_factory=list)
    is_over: bool = False

    def add(self, num_rows: int, seconds: float) -> None:
        """Record the time of a step; one of other rows ends the rest, and nothing is learned."""
        if self.seconds and num_rows != self.num_rows:
            self.seconds, self.is_over = [], True
            return
        self.num_rows = num_rows
        self.seconds.append(seconds)
        last, before = self.seconds[-_LAST:], self.seconds[-2 * _LAST : -_LAST]
        if len(self.seconds) >= _FEWEST:
            falls = min(last) < _FALLS * min(before)
            self.is_over = not falls or len(self.seconds) == _MOST

    @property
    def settled(self) -> Sequence[float]:
        """The seconds of the last steps, which tell what one without drafts takes."""
        return self.seconds[-_LAST:]
