"""What steps take on this machine, learned while it runs by an extended Kalman filter.

A step in which some requests decode, with drafts of `length` tokens for each, takes

    seconds = exp(v) * (1 + f + s * length)

A plain step takes exp(v): the machine's speed, which wanders as its clock does and as others use
it, and changes with the number of requests. f and s, the fixed and the marginal cost of verifying
one drafter's drafts in plain steps, hardly change. So a step that took longer than was thought
tells of the machine first; only a change from one kind of step to the other, or of the length,
tells what drafts cost. Source: Kalman 1960, "A new approach to linear filtering and prediction
problems".
"""

from math import exp, log, log2, sqrt
from typing import NamedTuple

# The standard deviations of a step's time, in terms of it, and of what v, f and s change by: from
# step to step, and where twice or half as many requests decode.
NOISE, STEP_DRIFT, SIZE_DRIFT = 0.12, (0.04, 0.003, 0.003), (0.5, 0.1, 0.1)
# s of a drafter of which nothing was measured, and how far that may be off.
GUESSED_COST = 0.25
# A step that is off by more of its standard deviations tells nothing, unless others follow.
SURPRISE = 3.0
# So many in a row are no accident; and the first ones of a kind are slow.
SETTLE_STEPS = 3
# The variances of v, f and s where nothing is known.
_UNKNOWN = (1.0, 1.0, GUESSED_COST**2)


class Step(NamedTuple):
    """What a step took; with drafts of `length` tokens of each request, or a plain one if
    `drafter` is None.
    """

    seconds: float
    drafter: int | None = None
    length: float = 0.0


class StepModel:
    """v, and f and s of each drafter.

    `plain_seconds`: of a plain step; `is_measured`: whether any was seen; `is_doubtful`: steps with
    drafts took much more or less than was thought, and it takes plain steps to tell whether drafts
    have changed or the machine has.
    """

    def __init__(self, num_drafters: int) -> None:
        variances = [_UNKNOWN[0], *_UNKNOWN[1:] * num_drafters]
        self._mean = [0.0, *[0.0, GUESSED_COST] * num_drafters]
        self._covariances = [[0.0] * len(variances) for _ in variances]
        for at, variance in enumerate(variances):
            self._covariances[at][at] = variance
        self._num_drafts = [0] * num_drafters
        self.plain_seconds, self.is_measured, self.is_doubtful = 1.0, False, False
        self._size = 1
        # The first ones of the newest steps with drafts, and those that were surprises.
        self._first, self._aside = list[Step](), list[Step]()
        self._num_surprises = 0

    def line(self, drafter: int) -> tuple[float, float]:
        """f and s."""
        at = 1 + 2 * drafter
        return self._mean[at], self._mean[at + 1]

    def is_known(self, drafter: int) -> bool:
        """Whether it rests on more than the first steps, which are slow."""
        return self._num_drafts[drafter] >= SETTLE_STEPS

    def add_plain(self, size: int, seconds: float, *, is_settled: bool) -> None:
        """Learn from a plain step of so many requests; `is_settled`: those behind it will hardly be
        faster.
        """
        self._resize(size)
        step = Step(seconds)
        if len(self._first) == SETTLE_STEPS:
            self._first.clear()
        if not self.is_measured:
            self._mean[0], self.plain_seconds, self.is_measured = log(seconds), seconds, True
            for row in self._covariances:
                row[0] = 0.0
            self._covariances[0] = [NOISE**2, *[0.0] * (len(self._mean) - 1)]
        elif not is_settled and self._surprise(step) >= 0:
            pass  # slow at first
        elif self.is_doubtful:
            self._covariances[0][0] += _UNKNOWN[0]
            self._update(step)
            self._resolve()
        elif self._is_believed(step):
            if self._num_surprises:
                self._covariances[0][0] += _UNKNOWN[0]
                self._num_surprises = 0
            self._update(step)

    def add_drafts(self, size: int, drafter: int, length: float, seconds: float) -> None:
        """Learn from a step of so many requests with drafts of so many tokens for each."""
        self._resize(size)
        step, was_known = Step(seconds, drafter, length), self.is_known(drafter)
        self._num_drafts[drafter] += 1
        if self._first and self._first[-1].drafter != drafter:
            self._first.clear()
        if len(self._first) < SETTLE_STEPS:
            self._first.append(step)
            # Of the first ones the fastest counts.
            if was_known and len(self._first) < SETTLE_STEPS and self._surprise(step) >= 0:
                return
            step = min(self._first, key=self._ratio)
        if not self._is_believed(step):
            self._aside.append(step)
        elif self._num_surprises:
            self._aside.append(step)
            self.is_doubtful = True
        else:
            self._aside.clear()
            self._update(step)

    def _resize(self, size: int) -> None:
        if size != self._size:
            self._drift(SIZE_DRIFT, log2(size / self._size))
            self._size = size

    def _is_believed(self, step: Step) -> bool:
        """Whether a step is as it was thought, or enough in a row were not; counts these."""
        surprise = self._surprise(step)
        # Other work may have made a few slow; nothing makes one fast.
        self._num_surprises += SETTLE_STEPS if surprise < 0 else surprise
        self._num_surprises *= abs(surprise)
        return self._num_surprises == 0 or self._num_surprises >= SETTLE_STEPS

    def _resolve(self) -> None:
        """Believe the doubted steps, now that the speed is known."""
        self.is_doubtful, self._num_surprises = False, 0
        doubted, self._aside = self._aside, []
        for step in doubted:
            if step.drafter is not None and self._surprise(step):
                for at in (1 + 2 * step.drafter, 2 + 2 * step.drafter):
                    self._covariances[at][at] += _UNKNOWN[2 - at % 2] + self._mean[at] ** 2
            self._update(step)

    def _surprise(self, step: Step) -> int:
        """1 if a step took much longer than was thought, -1 if it took much less, or 0."""
        steps, _, variance = self._expected(step)
        off, limit = steps * log(self._ratio(step)), SURPRISE * sqrt(variance)
        return int(off > limit) - int(off < -limit)

    def _ratio(self, step: Step) -> float:
        """The seconds of a step in terms of what was thought."""
        return step.seconds / (self._expected(step)[0] * self.plain_seconds)

    def _drift(self, deviations: tuple[float, ...], count: float) -> None:
        """Be less sure of all."""
        for at, row in enumerate(self._covariances):
            row[at] += (count * deviations[at if at < 2 else 2 - at % 2]) ** 2

    def _update(self, step: Step) -> None:
        self._drift(STEP_DRIFT, 1.0)
        ratio, before = self._ratio(step), self._mean[0]
        steps, gains, variance = self._expected(step)
        # What the time is off by if the machine is slower, and if drafts cost more.
        slower, dearer = steps * log(ratio), steps * (ratio - 1)
        for at, gain in enumerate(gains):
            self._mean[at] += gain / variance * (dearer if at else slower)
            row = self._covariances[at]
            for other, more in enumerate(gains):
                row[other] -= gain * more / variance
        if step.drafter is not None:
            self._keep_positive(1 + 2 * step.drafter)
            self._keep_positive(2 + 2 * step.drafter)
        # The machine's speed has changed at most as much as the time of the whole step.
        most = abs(log(ratio))
        self._mean[0] = min(max(self._mean[0], before - most), before + most)
        self.plain_seconds = exp(self._mean[0])

    def _expected(self, step: Step) -> tuple[float, list[float], float]:
        """A step's time in plain steps, its covariances with v and all costs, and its variance."""
        rows = self._covariances
        if step.drafter is None:
            return 1.0, [row[0] for row in rows], rows[0][0] + NOISE**2
        at, length = 1 + 2 * step.drafter, step.length
        steps = max(1 + self._mean[at] + self._mean[at + 1] * length, 1.0)
        gains = [steps * row[0] + row[at] + length * row[at + 1] for row in rows]
        variance = steps * gains[0] + gains[at] + length * gains[at + 1]
        return steps, gains, variance + (NOISE * steps) ** 2

    def _keep_positive(self, at: int) -> None:
        """Costs are not negative: the likeliest ones that are not (Simon and Chia 2002, "Kalman
        filtering with state equality constraints").
        """
        cost = self._mean[at]
        if cost < 0:
            for other, row in enumerate(self._covariances):
                self._mean[other] -= row[at] / self._covariances[at][at] * cost
