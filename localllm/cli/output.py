"""The two streams of a command: notes on stderr, the answer on stdout."""

import os
import sys
from typing import TextIO


class StdoutClosedError(Exception):
    """Whoever read stdout has gone, as after `| head -1`."""


_DIM, _RESET = "\x1b[2m", "\x1b[0m"


def write_stdout(text: str) -> None:
    """Write to stdout at once, as UTF-8 whatever the locale says.

    Raises: StdoutClosedError (typer would turn a BrokenPipeError into exit code 1); OSError for a
    full disk.
    """
    try:
        sys.stdout.buffer.write(text.encode("utf-8", errors="replace"))
        sys.stdout.flush()
    except BrokenPipeError as error:
        raise StdoutClosedError from error


def note(text: str, *, dim: bool = False) -> None:
    """One line on stderr; a closed stderr stops nothing."""
    try:
        if dim and may_use_colour(sys.stderr):
            text = f"{_DIM}{text}{_RESET}"
        print(text, file=sys.stderr, flush=True)
    except (OSError, ValueError, AttributeError):
        return


def may_use_colour(stream: TextIO) -> bool:
    """Whether `stream` is a terminal that shows colours, or colours are forced."""
    if os.environ.get("NO_COLOR"):
        return False
    if os.environ.get("FORCE_COLOR"):
        return True
    return is_terminal(stream) and os.environ.get("TERM") != "dumb"


def is_terminal(stream: TextIO | None) -> bool:
    """Whether `stream` is there, open, and a terminal."""
    try:
        return stream is not None and stream.isatty()
    except ValueError:
        return False
