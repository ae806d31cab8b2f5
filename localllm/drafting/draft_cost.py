"""What drafts cost: a step with them takes 1 + f + s * length plain steps."""

from collections import deque
from math import inf
from statistics import mean, median_low

from localllm.schedule.step_clock import SETTLED

# The last so many steps with drafts tell what they take.
WINDOW = 32
# s of a drafter of which nothing was measured.
GUESSED_COST = 0.25
# A step that takes less than this share of what it was thought to take is news: other work may make
# a step slow, but nothing makes it fast.
FAST = 0.7


class DraftCost:
    """f and s of one drafter at one batch size, from the last steps with drafts.

    `is_too_low`: these took less time than plain ones are believed to, which must have become
    faster.
    """

    def __init__(self, like: "DraftCost | None" = None) -> None:
        """`like`: of another batch size, from which it begins."""
        self._fixed, self._marginal = (0.0, GUESSED_COST) if like is None else like.line()
        self._is_measured: bool = like is not None and like._is_measured
        self._is_too_low = False
        # Mean number of drafted tokens of a request, and the step's time in plain steps; the last
        # `num_fresh` came after plain steps were last measured.
        self._samples = deque[tuple[float, float]](maxlen=WINDOW)
        self._num_fresh, self._is_stale = 0, False

    def line(self) -> tuple[float, float]:
        """f and s."""
        if self._is_stale:
            self._fit()
        return self._fixed, self._marginal

    @property
    def is_too_low(self) -> bool:
        """See the class."""
        self.line()
        return self._is_too_low

    @property
    def is_hopeless(self) -> bool:
        """Whether the two newest steps took longer than they gain if all tokens are accepted."""
        newest = [steps > 1 + length for length, steps in list(self._samples)[-2:]]
        return len(newest) == 2 and all(newest)

    def add(self, length: float, plain_steps: float) -> bool:
        """Record a step; returns whether it was so fast that those before it count no more."""
        fixed, marginal = self.line()
        is_news = bool(self._samples) and plain_steps < FAST * (1 + fixed + marginal * length)
        if is_news:
            self._samples.clear()
            self._num_fresh = 0
        self._samples.append((length, plain_steps))
        self._num_fresh = min(self._num_fresh + 1, WINDOW)
        self._is_stale = True
        return is_news

    def rescale(self, change: float) -> float:
        """Note that plain steps take `change` times as long as was thought; returns how many fewer
        of them the steps since they were last measured took.
        """
        fresh = [self._samples.pop() for _ in range(self._num_fresh)][::-1]
        self._samples.extend((length, steps / change) for length, steps in fresh)
        self._num_fresh, self._is_stale = 0, bool(self._samples)
        return (1 - 1 / change) * sum(steps for _, steps in fresh)

    def _fit(self) -> None:
        """A line through the medians of each length, of those measured more than once if any was.
        While all are alike, s stays as it was, or is half of what they cost if they always were.
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
            least = min(least, median_low(times) - 1)  # shorter ones do not take longer
            points.append((mean(lengths), least, len(each)))
        total = sum(count for *_, count in points)
        length = sum(length * count for length, _, count in points) / total
        more = sum(each * count for _, each, count in points) / total
        spread = sum(count * (each - length) ** 2 for each, _, count in points)
        slope = sum(count * (each - length) * time for each, time, count in points)
        self._is_too_low, more = more < SETTLED - 1, max(more, 0.0)
        self._is_measured |= len(points) > 1
        guess = self._marginal if self._is_measured else more / length / 2
        # The guess counts like a step without drafts: lengths that are nearly alike tell little.
        weight = length**2
        slope = (slope + guess * weight) / (spread + weight)
        self._marginal = min(max(slope, 0.0), more / length)
        self._fixed = more - self._marginal * length
