"""Show the progress of a long prefill on a terminal, until the first token comes."""

import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from localllm.cli.draw.interrupt import until_interrupt
from localllm.cli.draw.status_line import StatusLine

if TYPE_CHECKING:
    from localllm.answer.completion import TextEvent
    from localllm.answer.event_stream import EventStream
    from localllm.schedule.prompt_progress import PromptProgress

# A shorter prefill shows nothing.
FIRST_SHOWN_S = 0.15


def with_progress(events: "EventStream", *, ends_program: bool = True) -> Iterator["TextEvent"]:
    """Yield the events until they end or Ctrl-C is pressed; a progress line is shown until the
    first. `ends_program`: see DeferredInterrupt.
    """
    with StatusLine(Reading(events.prompt_progress).describe, FIRST_SHOWN_S) as line:
        for event in until_interrupt(events, ends_program=ends_program):
            line.end()
            yield event


class Reading:
    """Describes how far a prompt is, and how long the rest takes: as long for its work as what was
    done of it here.
    """

    def __init__(
        self,
        ask: Callable[[], "PromptProgress | None"],
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """`now`: a clock, in seconds."""
        self._ask, self._now = ask, now
        self._began_s = now()
        # The share of the work that the cache saved, or that the first chunk was, and when it was
        # known; and the last progress, and when that came.
        self._first: tuple[float, float] | None = None
        self._last: tuple[int, float] = (0, self._began_s)

    def describe(self) -> str | None:
        """A line for a terminal; None once the prompt is read."""
        progress = self._ask()
        if progress is None:
            return None
        now = self._now()
        if progress.computed != self._last[0]:
            self._last = (progress.computed, now)
        if self._first is None and progress.computed:
            self._first = (progress.work, now)
        text = (
            f"reading {progress.computed:,} of {progress.total:,} tokens "
            f"({progress.computed / progress.total:.0%})"
        )
        if self._first is not None and progress.work > self._first[0]:
            before, since = self._first
            came_s = self._last[1]
            whole_s = (1 - progress.work) * (came_s - since) / (progress.work - before)
            return f"{text}, {max(0.0, whole_s - (now - came_s)):.0f} s left"
        return f"{text}, {now - self._began_s:.0f} s"
