"""Work ahead while the user types."""

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

logger = logging.getLogger(__name__)


@contextmanager
def meanwhile(work: Callable[[], bool]) -> Iterator[None]:
    """Call `work` from another thread until it returns False or the block ends.

    No call is still running once the block has been left, not even after Ctrl-C.
    """
    is_over = threading.Event()

    def run() -> None:
        try:
            while not is_over.is_set() and work():
                pass
        except Exception:  # the error shows again when the work is needed
            logger.debug("working ahead failed", exc_info=True)

    thread = threading.Thread(target=run, name="work-ahead", daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        _join(thread)


def _join(thread: threading.Thread) -> None:
    interrupt: KeyboardInterrupt | None = None
    while thread.is_alive():
        try:
            thread.join()
        except KeyboardInterrupt as error:
            interrupt = error
    if interrupt is not None:
        raise interrupt
