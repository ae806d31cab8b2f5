"""A model's thoughts on stderr: in full, folded to the last rows while they stream, or hidden."""

import os
import shutil
import sys
import time
from collections.abc import Callable
from typing import Literal, get_args

from rich.cells import cell_len, chop_cells

from localllm.cli.draw.output import dimmed, is_terminal, show_controls, write_stderr

ThoughtsMode = Literal["fold", "show", "hide"]
THOUGHTS_MODES: tuple[ThoughtsMode, ...] = get_args(ThoughtsMode)

MAX_ROWS = 4
_MIN_INTERVAL_S = 1 / 15
# The screen never shows more of the text than this.
_KEPT_CHARS = 4000


class ThoughtsView:
    """Shows thoughts as they stream. If stderr is not a terminal, they are written unchanged unless
    hidden; folding needs a terminal that can move its cursor.
    """

    def __init__(self, mode: ThoughtsMode, clock: Callable[[], float] = time.monotonic) -> None:
        self._is_terminal = is_terminal(sys.stderr)
        can_fold = self._is_terminal and os.environ.get("TERM") != "dumb"
        self._mode: ThoughtsMode = "show" if mode == "fold" and not can_fold else mode
        self._clock = clock
        self._began_s = self._next_draw_s = 0.0
        self._tail = ""
        self._num_rows = self._num_pieces = 0

    @property
    def has_begun(self) -> bool:
        """Whether any thoughts have come."""
        return self._num_pieces > 0

    def push(self, text: str) -> None:
        """Show `text`, the next piece of the thoughts."""
        if not self._num_pieces:
            self._began_s = self._clock()
        self._num_pieces += 1
        if self._mode == "show":
            write_stderr(dimmed(show_controls(text) if self._is_terminal else text))
        elif self._mode == "fold":
            self._tail = (self._tail + show_controls(text))[-_KEPT_CHARS:]
            if self._clock() >= self._next_draw_s:
                self._draw()
                self._next_draw_s = self._clock() + _MIN_INTERVAL_S
        elif self._num_pieces == 1 and self._is_terminal:
            write_stderr(dimmed("thinking ..."))

    def end(self) -> None:
        """End the thoughts; the next output starts on a new line."""
        if not self.has_begun:
            return
        if self._mode == "show":
            write_stderr("\n\n")
        elif self._mode == "fold":
            seconds = self._clock() - self._began_s
            self._erase()
            line = f"thought for {seconds:.1f} s, {self._num_pieces} tokens; Ctrl-O shows it"
            write_stderr(dimmed(line) + "\n\n")
        elif self._is_terminal:
            write_stderr("\n")
        self._num_pieces = 0

    def _draw(self) -> None:
        columns = max(2, shutil.get_terminal_size().columns)
        rows = [
            row
            for line in self._tail.strip("\n").split("\n")
            for row in (chop_cells(line, columns - 1) or [""])
        ][-MAX_ROWS:]
        self._erase()
        write_stderr("\n".join(dimmed(row) for row in rows))
        self._num_rows = sum(max(1, -(-cell_len(row) // columns)) for row in rows)

    def _erase(self) -> None:
        if self._num_rows:
            up = f"\x1b[{self._num_rows - 1}A" if self._num_rows > 1 else ""
            write_stderr(f"\r{up}\x1b[J")
        self._num_rows = 0
