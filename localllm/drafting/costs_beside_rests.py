"""What drafts cost, from steps that stand beside a rest.

The speed of a machine changes: with `pocket` on two shared processors all steps take up to 1.3
times as long for some 50 steps, and then do not; and steps take longer as a text grows. Compared
with a step of another time, one with drafts seems up to a third cheaper or dearer than it is. So
steps with drafts are compared with the rest (plain_rest.py) just before or behind them. How much
more longer drafts cost is also learned from the others, since few lengths stand beside a rest.
"""

from collections import deque
from collections.abc import Sequence
from statistics import median

from localllm.schedule.step_times import DraftCosts, StepTimes

# So many steps before a rest, and as many behind it, are compared with it.
_BESIDE = 8
# Models that draft are slow at first, until memory and caches hold them. A trial has so many steps
# that tell (draft_trials.py).
_LEAST_STEPS = 5
# Elsewhere, times are compared with those of so many steps without drafts: the first ones of a
# process are slow, and drafts would seem cheap beside them.
_FEW_PLAIN = 4


class CostsBesideRests:
    """Of one drafter that could draft always; `plain`: the times of steps without drafts.

    `slowness`: how many times as long as usual such steps took in the last rest.
    """

    def __init__(self, plain: StepTimes) -> None:
        self._plain = plain
        self._beside = DraftCosts(_LEAST_STEPS, median)
        self._anywhere = DraftCosts(_LEAST_STEPS, median)
        # The last steps since a rest: rows without drafts, drafted tokens, seconds.
        self._waiting = deque[tuple[int, int, float]](maxlen=_BESIDE)
        # The steps that are still to be compared with the last rest.
        self._num_behind = 0
        self.slowness = 1.0

    def add(self, num_rows: int, num_drafted: int, seconds: float) -> None:
        """Record a step of `num_rows` rows besides those of drafts."""
        base = self._plain.seconds(num_rows)
        if base is not None and self._plain.knows(num_rows, _FEW_PLAIN):
            self._anywhere.add(num_rows, num_drafted, seconds / base)
        if self._num_behind:
            self._num_behind -= 1
            self._compare(num_rows, num_drafted, seconds)
        else:
            self._waiting.append((num_rows, num_drafted, seconds))

    def rested(self, num_rows: int, seconds: Sequence[float]) -> None:
        """Record the times of a rest's steps, which `plain` has already."""
        usual = self._plain.seconds(num_rows)
        if usual is None:
            return
        self.slowness, self._num_behind = median(seconds) / usual, _BESIDE
        for step in self._waiting:
            self._compare(*step)
        self._waiting.clear()

    def begin_anew(self) -> None:
        """Note that the next steps are far from the last ones, and from the last rest."""
        self._waiting.clear()
        self._num_behind, self.slowness = 0, 1.0

    def factor(self, num_rows: int, num_drafted: int) -> float | None:
        """See DraftCosts. Until a rest has told, and for drafts longer than those beside rests, all
        steps tell.
        """
        found = self._beside.factor(num_rows, num_drafted)
        anywhere = self._anywhere.factor(num_rows, num_drafted)
        longest = self._beside.longest(num_rows)
        if longest is None:
            return anywhere
        if anywhere is None or num_drafted <= longest:
            return found
        known = self._beside.factor(num_rows, longest)
        there = self._anywhere.factor(num_rows, longest)
        return known and there and known * anywhere / there

    def forget(self, num_rows: int) -> None:
        """Drop what was measured beside so many rows."""
        self._anywhere.forget(num_rows)
        self._beside.forget(num_rows)

    def _compare(self, num_rows: int, num_drafted: int, seconds: float) -> None:
        base = self._plain.seconds(num_rows)
        if base is not None:
            self._beside.add(num_rows, num_drafted, seconds / (self.slowness * base))
