"""Ctrl-C that waits for the end of an engine step."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any

from localllm.answer.completion import TextEvent
from localllm.process.ending import ENDS_S

if TYPE_CHECKING:
    from localllm.answer.event_stream import EventStream


class DeferredInterrupt:
    """While active, the first Ctrl-C only sets `requested`; a second one raises at once.

    An exception in the middle of a step would leave the engine's state inconsistent.
    `ends_program`: whether the first one ends the program, as it does except in a conversation.
    """

    def __init__(self, *, ends_program: bool) -> None:
        self.requested = False
        self.ends_program = ends_program
        self._previous: Any = None

    def allowed_s(self, count: int) -> float | None:
        """See Patient. A conversation ends only if a second Ctrl-C has no effect either."""
        return ENDS_S if self.ends_program or count > 1 else None

    def __enter__(self) -> "DeferredInterrupt":
        self._previous = signal.signal(signal.SIGINT, self._handle)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        signal.signal(signal.SIGINT, self._previous)

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True


@contextmanager
def ctrl_c_raises() -> Iterator[None]:
    """Let Ctrl-C raise KeyboardInterrupt within the block, if this is the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)


def until_interrupt(events: "EventStream", *, ends_program: bool) -> Iterator[TextEvent]:
    """Yield the events until they end, or until the first Ctrl-C, which aborts the request.

    An interrupted completion has no finish reason. `ends_program`: see DeferredInterrupt.
    """
    with DeferredInterrupt(ends_program=ends_program) as interrupt:
        events.should_stop = lambda: interrupt.requested
        for event in events:
            yield event
            if interrupt.requested:
                events.close()
