"""The two streams of a command: notes on stderr, the answer on stdout."""

import json
import os
import shutil
import sys
import textwrap
from collections.abc import Mapping
from typing import Any, Literal, TextIO, get_args

Colour = Literal["auto", "always", "never"]
COLOURS: tuple[Colour, ...] = get_args(Colour)


class StdoutClosedError(Exception):
    """The reader of stdout has gone, as after `| head -1`."""


_DIM, _RESET = "\x1b[2m", "\x1b[0m"


def write_stdout(text: str) -> None:
    """Write to stdout at once, as UTF-8 whatever the locale.

    Raises: StdoutClosedError (typer would turn a BrokenPipeError into exit code 1); OSError for a
    full disk.
    """
    if sys.stdout is None:  # closed before the program started, as by `>&-`
        raise StdoutClosedError
    try:
        sys.stdout.buffer.write(text.encode("utf-8", errors="replace"))
        sys.stdout.flush()
    except BrokenPipeError as error:
        raise StdoutClosedError from error


def write_stderr(text: str) -> None:
    """Write to stderr at once; a closed stderr is ignored."""
    try:
        sys.stderr.write(text)
        sys.stderr.flush()
    except (OSError, ValueError, AttributeError):
        return


def note(text: str, *, dim: bool = False, indent: int = 2) -> None:
    """Write one line to stderr, with control characters made visible; a line too long for the
    terminal wraps between words, and its continuation is indented by `indent` columns.
    """
    text = show_controls(text)
    if is_terminal(sys.stderr):
        text = _wrapped(text, indent)
    write_stderr((dimmed(text) if dim else text) + "\n")


def _wrapped(text: str, indent: int) -> str:
    columns = shutil.get_terminal_size().columns
    if len(text) <= columns or "\n" in text or columns < 2 * indent:
        return text
    return textwrap.fill(
        text,
        columns,
        subsequent_indent=" " * indent,
        break_long_words=False,
        break_on_hyphens=False,
    )


def tinted(text: str) -> str:
    """`text` in green if stdout is a terminal, or underlined if colours are not wanted."""
    if not is_terminal(sys.stdout):
        return text
    return f"\x1b[{32 if may_use_colour(sys.stdout) else 4}m{text}\x1b[0m"


def dimmed(text: str) -> str:
    """`text` for stderr, dimmed if stderr shows colours."""
    return f"{_DIM}{text}{_RESET}" if may_use_colour(sys.stderr) else text


def print_error(message: str, where: str = "", hint: str = "") -> None:
    """Print what happened, why or where, and the next step: up to three lines on stderr."""
    for start, text in (("error: ", message), ("  ", where), ("  try: ", hint)):
        if text:
            note(start + show_controls(f"{text:.500}"))


def json_line(value: Mapping[str, Any]) -> str:
    """`value` as one line of JSON; control characters of a model's text are written as escapes."""
    line = json.dumps(value, ensure_ascii=False, default=str)
    return "".join(c if not 0x7F <= ord(c) < 0xA0 else f"\\u{ord(c):04x}" for c in line) + "\n"


def show_controls(text: str) -> str:
    """`text` with C0 and C1 controls (except tab and newline) as visible symbols.

    Text from a model or its files must not move the cursor or write to the clipboard.
    """
    return "".join(_visible(char) for char in text)


def _visible(char: str) -> str:
    code = ord(char)
    if char in "\t\n" or 0x20 <= code < 0x7F or code >= 0xA0:
        return char
    if code < 0x20:
        return chr(0x2400 + code)  # the Control Pictures block
    return "\u2421" if code == 0x7F else f"\\x{code:02x}"


def choose_colour(choice: Colour) -> None:
    """Apply `--color`: it sets NO_COLOR or FORCE_COLOR, which libraries that colour their output
    read too.
    """
    if choice != "auto":
        for name, value in (("NO_COLOR", "never"), ("FORCE_COLOR", "always")):
            os.environ.pop(name, None)
            if choice == value:
                os.environ[name] = "1"


def may_use_colour(stream: TextIO) -> bool:
    """Whether `stream` is a terminal that shows colours, or colours are forced."""
    if os.environ.get("NO_COLOR"):
        return False
    if os.environ.get("FORCE_COLOR"):
        return True
    return is_terminal(stream) and os.environ.get("TERM") != "dumb"


def is_terminal(stream: TextIO | None) -> bool:
    """Whether `stream` exists, is open, and is a terminal."""
    try:
        return stream is not None and stream.isatty()
    except ValueError:
        return False
