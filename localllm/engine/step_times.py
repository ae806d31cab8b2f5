"""The time of a step on this machine by its number of rows, measured while the engine runs."""

from bisect import bisect_left
from collections import deque
from math import log2

# The next step's time is predicted by the median of this many steps, which a few slow ones among
# them do not move.
WINDOW = 9
# Above this many rows, times are kept for eighths of a doubling.
_EXACT_ROWS = 32
# Numbers of rows that differ by at most this factor count as about the same.
_NEAR = 1.2


class StepTimes:
    """Seconds of a step as a function of its rows: linear between the measured sizes."""

    def __init__(self) -> None:
        # By (rounded) number of rows: seconds per row of the last steps, and their median.
        self._times: dict[int, deque[float]] = {}
        self._medians: dict[int, float] = {}
        self._rows: list[int] = []

    def add(self, num_rows: int, seconds: float) -> None:
        """Record the time of a step."""
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
        """Whether a step of about `num_rows` rows has been measured."""
        near = bisect_left(self._rows, num_rows / _NEAR)
        return near < len(self._rows) and self._rows[near] <= num_rows * _NEAR

    def nearest(self, num_rows: int) -> int | None:
        """`num_rows`, limited to the range of measured sizes; None if none was measured."""
        rows = self._rows
        return min(max(num_rows, rows[0]), rows[-1]) if rows else None

    def seconds(self, num_rows: int) -> float | None:
        """The estimated seconds of a step; None if none was measured.

        Below the smallest measured size its time is used; above the largest, the line through the
        last two sizes is extended, or time is proportional to rows if there is only one.
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
        return max(found, start)  # noise may make a line fall

    def _known(self, num_rows: int) -> float:
        return self._medians[num_rows] * num_rows
