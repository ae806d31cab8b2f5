"""A program on a real pseudo-terminal, read back from a terminal emulator's screen."""

import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable
from pathlib import Path

import pyte
from fork_server import PATHS, take_terminal

_TYPED_S = 0.05  # before each key, as a person types


class Window:
    """A program in a terminal of a given size, and the screen that it has drawn.

    `tells_cursor`: it answers the question for the cursor's place, as terminals do; without that
    answer the line below the prompt is not drawn.
    """

    def __init__(
        self, command: list[str], columns: int, rows: int, home: Path, *, tells_cursor: bool = False
    ) -> None:
        environment = {
            **os.environ,
            "PYTHONPATH": PATHS,
            "TERM": "xterm-256color",
            "XDG_DATA_HOME": str(home),
            "PROMPT_TOOLKIT_NO_CPR": "" if tells_cursor else "1",
            "OMP_NUM_THREADS": "1",
        }
        for name in ("COLUMNS", "LINES"):  # pytest-xdist sets them; the terminal's size counts here
            environment.pop(name, None)
        self._tells_cursor = tells_cursor
        self.screen = pyte.Screen(columns, rows)
        self._stream = pyte.ByteStream(self.screen)
        self.written = b""
        self.descriptor, its = pty.openpty()
        self._tell_size(columns, rows)
        self.process = subprocess.Popen(
            [sys.executable, *command],
            stdin=its,
            stdout=its,
            stderr=its,
            env=environment,
            start_new_session=True,
            preexec_fn=take_terminal,
        )
        os.close(its)

    def pump(self, seconds: float = 0.05) -> None:
        """Let the program write for a while."""
        if not select.select([self.descriptor], [], [], seconds)[0]:
            return
        try:
            written = os.read(self.descriptor, 65536)
        except OSError:  # the program has closed it
            time.sleep(seconds)
            return
        self.written += written
        self._stream.feed(written)
        if self._tells_cursor and b"\x1b[6n" in written:
            self.send(f"\x1b[{self.screen.cursor.y + 1};{self.screen.cursor.x + 1}R")

    def settle(self) -> None:
        """Wait until nothing has been written for a while."""
        for _ in range(400):
            before = self.screen.dirty.copy()
            self.screen.dirty.clear()
            self.pump(0.1)
            if not self.screen.dirty and not before:
                return

    def wait_for(self, pattern: str, seconds: float = 30) -> str:
        """Wait until `pattern` is somewhere on the screen; returns the screen."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            self.pump()
            if re.search(pattern, self.text):
                return self.text
        raise AssertionError(f"{pattern!r} never came:\n{self.text}")

    def send(self, keys: str) -> None:
        time.sleep(_TYPED_S)
        os.write(self.descriptor, keys.encode())

    def say(self, text: str) -> None:
        self.send(text + "\r")

    @property
    def lines(self) -> list[str]:
        return [line.rstrip() for line in self.screen.display]

    @property
    def text(self) -> str:
        return "\n".join(self.lines)

    def resize(self, columns: int, rows: int) -> None:
        self._tell_size(columns, rows)
        self.screen.resize(rows, columns)

    def exit_code(self) -> int:
        for _ in range(200):
            has_ended = self.process.poll() is not None
            self.pump()
            if has_ended:
                break
        self.close()
        return self.process.returncode

    def close(self) -> None:
        """End the program, whatever it does."""
        self.process.kill()
        self.process.wait()

    def _tell_size(self, columns: int, rows: int) -> None:
        fcntl.ioctl(self.descriptor, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))


Open = Callable[..., Window]
