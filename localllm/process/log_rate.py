"""Log lines of one kind, by rate: what a client can cause a thousand times fills no disk."""

import logging
import time
from collections.abc import Callable

# So many lines of one kind in so many seconds; then one that tells how many were left out.
LINES, WINDOW_S = 10, 10.0
_MAX_KINDS = 1000


class LogRate(logging.Filter):
    """Lets pass LINES lines of each kind in WINDOW_S seconds. A kind is a logger with the text that
    its call gives, before anything is put into it.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._kinds: dict[tuple[str, str], tuple[float, int]] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """See logging.Filter."""
        kind, now = (record.name, str(record.msg)), self._clock()
        began_s, count = self._kinds.pop(kind, (now, 0))
        if now - began_s >= WINDOW_S:
            if count > LINES:
                record.msg = f"{record.msg} ({count - LINES:,} more like it were left out)"
            began_s, count = now, 0
        self._kinds[kind] = began_s, count + 1
        if len(self._kinds) > _MAX_KINDS:
            del self._kinds[next(iter(self._kinds))]
        return count < LINES
