"""The answer on stdout as it comes."""

import sys

from localllm.cli.output import is_terminal, show_controls, write_stdout


class TokenPrinter:
    """Writes pieces of text to stdout, flushed, and ends them with exactly one newline.

    A pipe gets the text as it is. On a terminal control characters are made visible: an escape
    sequence from a model must not move the cursor or write the clipboard.
    """

    def __init__(self) -> None:
        self._is_terminal = is_terminal(sys.stdout)
        self._held_newlines = ""

    def push(self, piece: str) -> None:
        """Write `piece`; newlines at its end wait for more text."""
        text = self._held_newlines + piece
        body = text.rstrip("\n")
        self._held_newlines = text[len(body) :]
        if body:
            write_stdout(show_controls(body) if self._is_terminal else body)

    def finish(self) -> None:
        """End the answer."""
        self._held_newlines = ""
        write_stdout("\n")
