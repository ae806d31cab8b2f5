"""A line on stderr that says what is going on: redrawn on a terminal; elsewhere written once
it is over.
"""

import os
import shutil
import sys
import threading
import time
from collections.abc import Callable

from localllm.cli.draw.output import dimmed, is_terminal, show_controls, write_stderr

INTERVAL_S = 0.2
# A pipe or a log gets one line about work that took longer than the first; about work that takes
# longer than the second, another one by then.
SILENT_S, LONG_S = 2.0, 60.0


class StatusLine:
    """Drawn by its own thread, since the work that it describes may block for a while.

    `describe` returns the text, or None if there is nothing to say yet; work that ends within
    `first_shown_s` shows nothing.
    """

    def __init__(self, describe: Callable[[], str | None], first_shown_s: float) -> None:
        self._describe, self._first_shown_s = describe, first_shown_s
        self._is_over = threading.Event()
        self._screen = threading.Lock()
        self._is_drawn = self._is_terminal = False
        self._thread = threading.Thread(target=self._run, name="status-line", daemon=True)

    def __enter__(self) -> "StatusLine":
        self._is_terminal = is_terminal(sys.stderr) and os.environ.get("TERM") != "dumb"
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.end()

    def end(self) -> None:
        """Erase the line and stop drawing."""
        if self._is_over.is_set():
            return
        self._is_over.set()
        if self._thread.is_alive():
            self._thread.join()
        if self._is_drawn:
            write_stderr("\r\x1b[K")

    def say(self, write: Callable[[], None]) -> None:
        """Erase the line and call `write`, whose output stays; the line is redrawn below it."""
        with self._screen:
            if self._is_drawn:
                write_stderr("\r\x1b[K")
            write()

    def _run(self) -> None:
        if not self._is_terminal:
            self._tell_at_the_end()
            return
        if self._is_over.wait(self._first_shown_s):
            return
        while True:
            text = self._describe()
            if text is not None and not self._is_over.is_set():
                self._is_drawn = True
                width = shutil.get_terminal_size().columns - 1
                with self._screen:
                    write_stderr("\r" + dimmed(show_controls(text)[:width]) + "\x1b[K")
            if self._is_over.wait(INTERVAL_S):
                return

    def _tell_at_the_end(self) -> None:
        began_s = time.monotonic()
        if not self._is_over.wait(LONG_S):
            self._tell()
            self._is_over.wait()
        if time.monotonic() - began_s >= SILENT_S:
            self._tell()

    def _tell(self) -> None:
        text = self._describe()
        if text is not None:
            write_stderr(f"{show_controls(text)}\n")
