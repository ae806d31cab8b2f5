"""What drafts cost: a step with them takes 1 + f + s * length plain steps."""

from collections import deque
from math import inf
from statistics import mean

from localllm.schedule.step_clock import SETTLE_STEPS, usual

# The last so many steps with drafts tell what they take.
WINDOW = 32
# s of a drafter of which nothing was measured.
GUESSED_COST = 0.25
# A step that takes less than this share of what it was thought to take is news; so are a few in a
# row of which that is less than this share of what they take.
FAST = 0.7


class DraftCost:
    """f and s of one drafter at one batch size, from the last steps with drafts."""

    def __init__(self, like: "DraftCost | None" = None) -> None:
        """`like`: of another batch size, from which it begins."""
        self._fixed, self._marginal = (0.0, GUESSED_COST) if like is None else like.line()
        self._is_measured: bool = like is not None and like._is_measured
        # Mean number of drafted tokens of a request, and the step's time in plain steps.
        self._samples = deque[tuple[float, float]](maxlen=WINDOW)
        self._is_stale = False
        # How many of the newest in a row took much more than was thought, if positive, or less.
        self._surprises, self._has_doubted = 0, False
        # The least that steps have taken when they were news, in terms of what is guessed.
        self._least = inf

    def line(self) -> tuple[float, float]:
        """f and s."""
        if self._is_stale:
            self._fit()
        return self._fixed, self._marginal

    @property
    def is_hopeless(self) -> bool:
        """Whether the newest steps took longer than they gain if all tokens are accepted."""
        newest = [steps > 1 + length for length, steps in list(self._samples)[-SETTLE_STEPS:]]
        return len(newest) == SETTLE_STEPS and all(newest)

    @property
    def is_known(self) -> bool:
        """Whether it rests on more than the first steps, which are slow."""
        return len(self._samples) >= SETTLE_STEPS

    @property
    def is_doubtful(self) -> bool:
        """Whether the newest steps took so much less or more than was thought that it takes plain
        steps to tell whether drafts have changed or the machine has.
        """
        return self._surprises < 0 or self._surprises >= SETTLE_STEPS

    def add(self, length: float, plain_steps: float) -> None:
        """Record a step."""
        if self._samples:
            kind = self._surprise(length, plain_steps)
            self._surprises = kind if kind * self._surprises <= 0 else self._surprises + kind
            self._has_doubted &= kind > 0
        self._samples.append((length, plain_steps))
        self._is_stale = True

    def _surprise(self, length: float, plain_steps: float) -> int:
        fixed, marginal = self.line()
        share = plain_steps / (1 + fixed + marginal * length)
        return int(share > 1 / FAST) - int(share < FAST)

    def rescale(self, change: float) -> bool:
        """Note that plain steps now take `change` times as long as when they were last measured: so
        did those in doubt. If these still take less or more, those before them count no more.
        Returns whether they take less than ever.
        """
        if not self.is_doubtful:
            self._surprises = 0
            return False
        count = min(abs(self._surprises), len(self._samples))
        doubted = [self._samples.pop() for _ in range(count)][::-1]
        now = [(length, steps / change) for length, steps in doubted]
        self._is_stale = bool(self._samples)
        has_changed = all(self._surprise(*each) for each in now)
        is_slow, self._surprises = self._surprises > 0, 0
        if has_changed and is_slow and not self._has_doubted:
            # Other work may have ended meanwhile: they have to come again.
            self._has_doubted = True
            return False
        if has_changed:
            self._samples.clear()
        self._samples.extend(now)
        self._is_stale = True
        usually = min(steps / (1 + GUESSED_COST * length) for length, steps in now)
        is_least = len(self._samples) == len(now) and usually < FAST * self._least
        self._least = min(self._least, usually) if is_least else self._least
        return is_least

    def _fit(self) -> None:
        """A line through what steps of each length usually take, of those measured more than once
        if any was. While all are alike, s stays as it was, or is half of what they cost if they
        always were.
        """
        self._is_stale = False
        groups: dict[int, list[tuple[float, float]]] = {}
        for length, steps in self._samples:
            groups.setdefault(round(length), []).append((length, steps))
        least, points = inf, list[tuple[float, float, int]]()
        most = max(map(len, groups.values()))
        for _, each in sorted(groups.items(), reverse=True):
            if len(each) == 1 < most:
                continue  # something else may have made it slow
            lengths, times = zip(*each, strict=True)
            least = min(least, usual(times) - 1)  # shorter ones do not take longer
            points.append((mean(lengths), least, len(each)))
        total = sum(count for *_, count in points)
        length = sum(length * count for length, _, count in points) / total
        more = sum(each * count for _, each, count in points) / total
        spread = sum(count * (each - length) ** 2 for each, _, count in points)
        slope = sum(count * (each - length) * time for each, time, count in points)
        more = max(more, 0.0)
        self._is_measured |= len(points) > 1
        guess = self._marginal if self._is_measured else more / length / 2
        # The guess counts like a step without drafts: lengths that are nearly alike tell little.
        weight = length**2
        slope = (slope + guess * weight) / (spread + weight)
        self._marginal = min(max(slope, 0.0), more / length)
        self._fixed = more - self._marginal * length
