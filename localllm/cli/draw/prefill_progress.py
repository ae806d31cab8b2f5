"""Show the progress of a long prefill on a terminal, until the first token comes."""

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from localllm.cli.draw.interrupt import until_interrupt
from localllm.cli.draw.status_line import StatusLine

if TYPE_CHECKING:
    from localllm.answer.completion import TextEvent
    from localllm.answer.event_stream import EventStream

# A shorter prefill shows nothing.
FIRST_SHOWN_S = 0.15


def with_progress(events: "EventStream", *, ends_program: bool = True) -> Iterator["TextEvent"]:
    """Yield the events until they end or Ctrl-C is pressed; a progress line is shown until the
    first. `ends_program`: see DeferredInterrupt.
    """
    with StatusLine(_Reading(events).describe, FIRST_SHOWN_S) as line:
        for event in until_interrupt(events, ends_program=ends_program):
            line.end()
            yield event


class _Reading:
    def __init__(self, events: "EventStream") -> None:
        self._events = events
        self._began_s = time.monotonic()
        # How many tokens came from the cache, and when that was known.
        self._first: tuple[int, float] | None = None

    def describe(self) -> str | None:
        progress = self._events.prompt_progress()
        if progress is None:
            return None
        computed, total = progress
        now = time.monotonic()
        if self._first is None and computed:
            self._first = (computed, now)
        text = f"reading {computed:,} of {total:,} tokens ({computed / total:.0%})"
        if self._first is not None and computed > self._first[0]:
            cached, since = self._first
            left_s = (total - computed) * (now - since) / (computed - cached)
            return f"{text}, {left_s:.0f} s left"
        return f"{text}, {now - self._began_s:.0f} s"
