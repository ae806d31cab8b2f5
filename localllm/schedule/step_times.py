"""The time of a step on this machine by its number of rows, measured while the engine runs."""

from bisect import bisect_left, bisect_right
from collections import defaultdict, deque
from collections.abc import Callable, Collection
from math import ceil, inf, log2

# The next step's time is predicted by that of this many steps at their first quarter: on a machine
# that others use too, several in a row may be slow.
WINDOW = 9
# Drafts cost what they did in so many of their last steps.
_RECENT = 64
# Above this many rows, times are kept for eighths of a doubling.
_EXACT_ROWS = 32
# Numbers of rows that differ by at most this factor count as about the same.
_NEAR = 1.2


class StepTimes:
    """Seconds of a step as a function of its rows: linear between the measured sizes."""

    def __init__(self) -> None:
        # By (rounded) number of rows: seconds per row of the last steps, and what is usual.
        self._times: dict[int, deque[float]] = {}
        self._usually: dict[int, float] = {}
        self._rows: list[int] = []

    def add(self, num_rows: int, seconds: float) -> None:
        """Record the time of a step."""
        key = _size(num_rows)
        if key not in self._times:
            self._times[key] = deque(maxlen=WINDOW)
            self._rows.insert(bisect_left(self._rows, key), key)
        times = self._times[key]
        times.append(seconds / num_rows)
        self._usually[key] = _usual(times)

    def forget(self, num_rows: int) -> None:
        """Drop what was measured for steps of so many rows."""
        key = _size(num_rows)
        if key in self._times:
            del self._times[key], self._usually[key]
            self._rows.remove(key)

    def knows(self, num_rows: int, least: int = 1) -> bool:
        """Whether `least` steps of about `num_rows` rows have been measured."""
        first = bisect_left(self._rows, num_rows / _NEAR)
        near = self._rows[first : bisect_right(self._rows, num_rows * _NEAR)]
        return sum(len(self._times[rows]) for rows in near) >= least

    def seconds(self, num_rows: int) -> float | None:
        """The estimated seconds of a step; None if none was measured.

        Below the smallest measured size its time is used; above the largest, the line through the
        last two sizes is extended, or time is proportional to rows if there is only one.
        """
        rows = self._rows
        if not rows:
            return None
        at = bisect_left(rows, num_rows)
        if num_rows in self._times:
            # A size that is rare may have been measured while the machine was slow: a few more
            # rows do not take less time.
            near = rows[at : bisect_right(rows, num_rows * _NEAR)]
            return min(map(self._known, near))
        if at == 0:
            return self._known(rows[0])
        if at == len(rows):
            if at == 1:
                return self._usually[rows[0]] * num_rows
            at -= 1
        low, high = rows[at - 1], rows[at]
        start, end = self._known(low), self._known(high)
        found = start + (end - start) * (num_rows - low) / (high - low)
        return max(found, start)  # noise may make a line fall

    def _known(self, num_rows: int) -> float:
        return self._usually[num_rows] * num_rows


class DraftCosts:
    """How many times as long a step takes with drafts as without them, by its rows without them and
    the number of drafted tokens.
    """

    def __init__(
        self, least: int = 2, typical: Callable[[Collection[float]], float] | None = None
    ) -> None:
        """`least`: the steps that must have been measured before an estimate is believed;
        `typical`: what is usual among factors, if they do not say how fast the machine was.
        """
        self._least, self._typical = least, typical or _usual
        # By rows, the numbers of drafted tokens and the factors of the last steps. All lengths have
        # one window, since the machine's speed changes: a length that was measured long ago would
        # seem better or worse than the one that is measured all the time.
        self._found: defaultdict[int, deque[tuple[int, float]]] = defaultdict(
            lambda: deque(maxlen=_RECENT)
        )
        # By rows, the believed factors by number of drafted tokens, in order; found when asked for.
        self._believed: dict[int, list[tuple[int, float]]] = {}

    def add(self, num_rows: int, num_drafted: int, factor: float) -> None:
        """Record a step of `num_rows` rows besides those of drafts."""
        size = _size(num_rows)
        self._found[size].append((num_drafted, factor))
        self._believed.pop(size, None)

    def forget(self, num_rows: int) -> None:
        """Drop what was measured beside so many rows."""
        self._found.pop(_size(num_rows), None)
        self._believed.pop(_size(num_rows), None)

    def factor(self, num_rows: int, num_drafted: int) -> float | None:
        """The estimate for a step; None while few steps of about so many rows were measured, since
        one may be slow by chance.

        It is linear between the numbers of drafted tokens that were measured, more than once if any
        was, and goes on along the line through the last two. Where steps of a few more or less rows
        were measured, it is that with as many drafted tokens for each row.
        """
        size, known = self._nearest(num_rows)
        if not known:
            return None
        count = num_drafted * size / num_rows
        at = min(max(1, bisect_left(known, (ceil(count), 0.0))), len(known) - 1)
        (low, start), (high, end) = known[at - 1], known[at]
        return start + (end - start) * (count - low) / (high - low)

    def longest(self, num_rows: int) -> int | None:
        """The most drafted tokens whose cost was measured; None where `factor` is."""
        size, known = self._nearest(num_rows)
        return round(known[-1][0] * num_rows / size) if known else None

    def _nearest(self, num_rows: int) -> tuple[int, list[tuple[int, float]]]:
        """The nearest number of rows, of those near enough, beside which costs are believed, and
        these; no costs if there is none.
        """
        size = _size(num_rows)
        if known := self._known(size):
            return num_rows, known  # a rounded number stands for all
        near = [each for each in self._found if size / _NEAR <= each <= size * _NEAR]
        for each in sorted(near, key=lambda each: abs(each - size)):
            if known := self._known(each):
                return each, known
        return num_rows, []

    def _known(self, size: int) -> list[tuple[int, float]]:
        return self._believed.get(size) or self._believe(size)

    def _believe(self, size: int) -> list[tuple[int, float]]:
        """What is believed of steps with so many rows besides those of drafts; empty if nothing."""
        found = self._found.get(size, ())
        if len(found) < self._least:
            return []
        own = defaultdict[int, list[float]](list)
        for count, factor in found:
            own[count].append(factor)
        counts = [count for count in own if len(own[count]) > 1] or list(own)
        # A shorter draft does not take longer than a longer one.
        least, known = inf, list[tuple[int, float]]()
        for count in sorted(counts, reverse=True):
            least = min(least, self._typical(own[count]))
            known.append((count, least))
        # Half of what the shortest one costs is the same for all lengths.
        known.append((0, (1.0 + least) / 2))
        self._believed[size] = known[::-1]
        return self._believed[size]


def _size(num_rows: int) -> int:
    """The number of rows by which times are kept."""
    if num_rows <= _EXACT_ROWS:
        return num_rows
    return round(2 ** (round(8 * log2(num_rows)) / 8))


def _usual(values: Collection[float]) -> float:
    """What they are where nothing else makes a step slow: at the first quarter of them."""
    return sorted(values)[(len(values) - 1) // 4]
