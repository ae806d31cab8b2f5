"""Limits the rate of log lines of one kind, so that no client can fill the disk with them."""

import logging
import time
from collections.abc import Callable

# This many lines of one kind in this many seconds; the next line says how many were left out.
LINES, WINDOW_S = 10, 10.0
_MAX_KINDS = 1000


class LogRate(logging.Filter):
    """Passes LINES lines of each kind in WINDOW_S seconds. A kind is a logger and a message, before
    its arguments are put in.
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
