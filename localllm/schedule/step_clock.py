"""Measures what steps take on this machine while it runs.

A plain step decodes some requests, without drafts and prompts. Plain steps are slow at first in a
cold process, and behind steps with drafts: caches hold what the others needed, and the processor's
clock is that of another kind of work. With `pocket` on two threads of one core the first one takes
1.6 times as long as it would if nobody had drafted, the fifth 1.3 times, the tenth 1.1 times. So
they count once they have settled.
"""

from collections import deque
from collections.abc import Sequence

# So many tell what the next plain step usually takes.
PLAIN_WINDOW = 9
# Plain steps have settled when the fastest of SETTLE_STEPS takes at least SETTLED of the time of
# the fastest of as many before.
SETTLE_STEPS, SETTLED = 3, 0.98
# Batches that differ by at most this factor take about the same time.
NEAR = 1.2


def usual(times: Sequence[float]) -> float:
    """What steps take while nothing else makes them slow: a quarter of them took less."""
    return sorted(times)[len(times) // 4]


class StepClock:
    """The seconds of plain steps by how many requests decode.

    `since`: the plain steps since the last one of another kind, until they have settled.
    """

    def __init__(self) -> None:
        self._times: dict[int, deque[float]] = {}
        self._usual: dict[int, float] = {}
        self._size, self.since, self.is_settled = 0, list[float](), False

    def plain_seconds(self, size: int) -> float | None:
        """Of the nearest size that was measured; None if none is near."""
        found = self._usual.get(size)
        if found is not None:
            return found
        near = [each for each in self._usual if size / NEAR <= each <= size * NEAR]
        return self._usual[min(near, key=lambda each: abs(each - size))] if near else None

    def add_plain(self, size: int, seconds: float) -> bool:
        """Record a plain step; returns whether it has shown that they have settled."""
        if self.is_settled:
            times = self._times.get(size)
            self._keep(size, [seconds] if times is None else [*times, seconds])
            return False
        if size != self._size:
            self._size, self.since = size, []
        self.since.append(seconds)
        if self._usual and self.plain_seconds(size) is None:
            self._keep(size, [seconds])  # slow ones tell more than none
        last, before = self.since[-SETTLE_STEPS:], self.since[-2 * SETTLE_STEPS : -SETTLE_STEPS]
        if len(before) < SETTLE_STEPS or min(last) < SETTLED * min(before):
            return False
        self._keep(size, [*self._times.get(size, ()), *last])
        self.is_settled = True
        return True

    def unsettle(self) -> None:
        """Note a step of another kind: the plain ones behind it are slow at first."""
        self.is_settled, self.since = False, []

    def doubt(self) -> None:
        """Note that the machine may have changed."""
        self._times.clear()

    def _keep(self, size: int, times: Sequence[float]) -> None:
        own = self._times[size] = deque(times, PLAIN_WINDOW)
        self._usual[size] = usual(own)
