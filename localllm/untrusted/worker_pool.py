"""Workers for several threads; small jobs do not wait behind large ones."""

import time
import weakref
from threading import BoundedSemaphore, Condition

from localllm.untrusted.messages import Opening, Result, Work
from localllm.untrusted.worker import OPEN_S, WaitedError, Worker

# One of them is always kept free of large jobs.
_MAX_WORKERS = 2
LARGE_BYTES = 1 << 16
_WAITED = "other work took the time it had"


class WorkerPool:
    """Up to two workers of one kind; the second is started when the first is busy."""

    def __init__(self, opening: Opening) -> None:
        """`opening`: see Worker."""
        self._opening = opening
        self._free = [Worker(opening)]
        self._all = list(self._free)
        self._changed = Condition()
        self._large = BoundedSemaphore(_MAX_WORKERS - 1)
        weakref.finalize(self, _close_all, self._all)

    def warm(self) -> None:
        """Start the first process, without waiting for it."""
        with self._changed:
            if self._free:
                self._free[-1].warm()

    def open(self) -> None:
        """Wait until the first process is ready. Raises: as Worker.open."""
        worker = self._take(time.monotonic() + OPEN_S)
        try:
            worker.open()
        finally:
            self._give_back(worker)

    def ask(self, work: Work, seconds: float) -> Result:
        """Run a job within `seconds`, which include waiting for other jobs.

        Raises: as Worker.ask.
        """
        deadline = time.monotonic() + seconds
        is_large = work.num_bytes > LARGE_BYTES
        if is_large and not self._large.acquire(timeout=seconds):
            raise WaitedError(_WAITED)
        try:
            worker = self._take(deadline)
            try:
                return worker.ask(work, max(0.0, deadline - time.monotonic()))
            finally:
                self._give_back(worker)
        finally:
            if is_large:
                self._large.release()

    def close(self) -> None:
        """End the processes; their current jobs end with StoppedError."""
        _close_all(self._all)

    def _take(self, deadline: float) -> Worker:
        with self._changed:
            while not self._free:
                if len(self._all) < _MAX_WORKERS:
                    self._all.append(Worker(self._opening))
                    return self._all[-1]
                if not self._changed.wait(deadline - time.monotonic()):
                    raise WaitedError(_WAITED)
            return self._free.pop()

    def _give_back(self, worker: Worker) -> None:
        with self._changed:
            self._free.append(worker)
            self._changed.notify()


def _close_all(workers: list[Worker]) -> None:
    for worker in workers:
        worker.close()
