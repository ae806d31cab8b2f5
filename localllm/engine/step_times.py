"""What a step takes on this machine, by the rows that it computes, as measured while it runs."""

from bisect import bisect_left
from collections import deque
from math import log2

# Times of so many steps tell what the next will take: their median, which a few slow ones among
# them do not move.
WINDOW = 9
# Above so many rows times are kept for eighths of a doubling.
_EXACT_ROWS = 32
# What differs by no more than this factor is about the same.
_NEAR = 1.2


class StepTimes:
    """Seconds of a step as a function of its rows: straight lines between what was measured."""

    def __init__(self) -> None:
        # By about how many rows: the seconds of each, of the last steps and their median.
        self._times: dict[int, deque[float]] = {}
        self._medians: dict[int, float] = {}
        self._rows: list[int] = []

    def add(self, num_rows: int, seconds: float) -> None:
        """Book a step."""
        key = num_rows
        if num_rows > _EXACT_ROWS:
            key = round(2 ** (round(8 * log2(num_rows)) / 8))
        if key not in self._times:
            self._times[key] = deque(maxlen=WINDOW)
            self._rows.insert(bisect_left(self._rows, key), key)
        times = self._times[key]
        times.append(seconds / num_rows)
        self._medians[key] = sorted(times)[len(times) // 2]

    def knows(self, num_rows: int) -> bool:
        """Whether a step of about so many rows has been measured."""
        near = bisect_left(self._rows, num_rows / _NEAR)
        return near < len(self._rows) and self._rows[near] <= num_rows * _NEAR

    def nearest(self, num_rows: int) -> int | None:
        """Of the numbers between the least and the greatest that were measured the one closest to
        `num_rows`; None where none was.
        """
        rows = self._rows
        return min(max(num_rows, rows[0]), rows[-1]) if rows else None

    def seconds(self, num_rows: int) -> float | None:
        """What a step takes; None where none was measured.

        Fewer rows than any measured take as long as those, more take longer in proportion to the
        last ones.
        """
        rows = self._rows
        if not rows:
            return None
        at = bisect_left(rows, num_rows)
        if at == 0:
            return self._known(rows[0])
        if at == len(rows):
            if at == 1:
                return self._medians[rows[0]] * num_rows
            at -= 1
        low, high = rows[at - 1], rows[at]
        start, end = self._known(low), self._known(high)
        found = start + (end - start) * (num_rows - low) / (high - low)
        return max(found, start)  # noise may let a line fall

    def _known(self, num_rows: int) -> float:
        return self._medians[num_rows] * num_rows
