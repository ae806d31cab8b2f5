"""How far a long prompt is read, on a terminal, until the first token comes."""

import os
import shutil
import sys
import threading
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from localllm.cli.interrupt import until_interrupt
from localllm.cli.output import dimmed, is_terminal, write_stderr

if TYPE_CHECKING:
    from localllm.completion import TextEvent
    from localllm.text_engine import EventStream

# A prompt that is read sooner shows nothing.
FIRST_SHOWN_S, INTERVAL_S = 0.15, 0.2


def with_progress(events: "EventStream") -> Iterator["TextEvent"]:
    """The events to their end or to Ctrl-C; until the first there is a line of progress."""
    with _Line(events) as line:
        for event in until_interrupt(events):
            line.end()
            yield event


class _Line:
    """Drawn by a thread of its own, since a step can take longer than a moment."""

    def __init__(self, events: "EventStream") -> None:
        self._events = events
        self._is_over = threading.Event()
        self._is_drawn = False
        self._thread = threading.Thread(target=self._run, name="progress", daemon=True)
        self._began_s = time.monotonic()
        # Where the cache ended, and when that was known.
        self._first: tuple[int, float] | None = None

    def __enter__(self) -> "_Line":
        if is_terminal(sys.stderr) and os.environ.get("TERM") != "dumb":
            self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.end()

    def end(self) -> None:
        """Erase the line; nothing is drawn any more."""
        if self._is_over.is_set():
            return
        self._is_over.set()
        if self._thread.is_alive():
            self._thread.join()
        if self._is_drawn:
            write_stderr("\r\x1b[K")

    def _run(self) -> None:
        if self._is_over.wait(FIRST_SHOWN_S):
            return
        while True:
            progress = self._events.prompt_progress()
            if progress is not None:
                self._is_drawn = True
                width = shutil.get_terminal_size().columns - 1
                text = self._describe(*progress)
                write_stderr("\r" + dimmed(text[:width]) + "\x1b[K")
            if self._is_over.wait(INTERVAL_S):
                return

    def _describe(self, computed: int, total: int) -> str:
        now = time.monotonic()
        if self._first is None and computed:
            self._first = (computed, now)
        text = f"reading {computed:,} of {total:,} tokens ({computed / total:.0%})"
        if self._first is not None and computed > self._first[0]:
            cached, since = self._first
            left_s = (total - computed) * (now - since) / (computed - cached)
            return f"{text}, {left_s:.0f} s left"
        return f"{text}, {now - self._began_s:.0f} s"
