"""Stream the answer to stdout, and the thoughts before it to stderr."""

import os
import shutil
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol, get_args

from localllm.cli.draw.output import (
    is_terminal,
    may_use_colour,
    show_controls,
    tinted,
    write_stdout,
)
from localllm.cli.draw.thoughts import ThoughtsMode, ThoughtsView

if TYPE_CHECKING:
    from localllm.answer.completion import TextEvent

RenderMode = Literal["auto", "blocks", "plain"]
RENDER_MODES: tuple[RenderMode, ...] = get_args(RenderMode)
# Narrower terminals have no room for lists, quotations and tables.
MIN_MARKDOWN_COLUMNS = 20


@dataclass(slots=True)
class Shown:
    """What is shown of an answer, and how; `tints_drafts`: as plain text in which accepted draft
    tokens are highlighted.
    """

    render: RenderMode
    thoughts: ThoughtsMode
    shows_stats: bool = True
    tints_drafts: bool = False
    shows_why: bool = False


class TextPrinter(Protocol):
    """Prints an answer piece by piece."""

    def continue_behind(self, said: str) -> None:
        """Print what belongs to the end of an earlier part of the answer, its last block or line,
        again, so that the new part goes on in it.
        """

    def push(self, piece: str) -> None:
        """Add `piece`."""

    def finish(self) -> None:
        """End the answer; the next output starts on a new line."""


class PlainPrinter(TextPrinter):
    """Writes pieces of text to stdout, flushed, and ends them with exactly one newline.

    A pipe gets the text unchanged. On a terminal, control characters are made visible: an escape
    sequence from a model must not move the cursor or write to the clipboard.
    """

    def __init__(self, *, tints_drafts: bool = False) -> None:
        self._is_terminal = is_terminal(sys.stdout)
        self._tints_drafts = tints_drafts
        self._held_newlines = ""

    def continue_behind(self, said: str) -> None:
        self.push(said.rpartition("\n")[2])

    def push(self, piece: str, *, is_draft: bool = False) -> None:
        """Write `piece`; trailing newlines are held back until more text comes."""
        text = self._held_newlines + piece
        body = text.rstrip("\n")
        self._held_newlines = text[len(body) :]
        if not body:
            return
        if self._is_terminal:
            body = show_controls(body)
        if is_draft and self._tints_drafts:
            body = tinted(body)
        write_stdout(body)

    def finish(self) -> None:
        self._held_newlines = ""
        write_stdout("\n")


def make_printer(mode: RenderMode, *, is_markdown: bool, tints_drafts: bool = False) -> TextPrinter:
    """A printer of rendered markdown for a terminal that is capable and wide enough; otherwise, and
    always for tinted drafts, one of plain text.
    """
    suits = (
        is_terminal(sys.stdout)
        and os.environ.get("TERM") != "dumb"
        and shutil.get_terminal_size().columns >= MIN_MARKDOWN_COLUMNS
    )
    if mode == "plain" or not suits or (mode == "auto" and not is_markdown):
        return PlainPrinter()
    if tints_drafts:
        return PlainPrinter(tints_drafts=True)
    from localllm.cli.draw.markdown import MarkdownRenderer
    from localllm.cli.draw.markdown_stream import MarkdownPrinter

    renderer = MarkdownRenderer(has_colour=may_use_colour(sys.stdout))
    return MarkdownPrinter(write_stdout, renderer)


class AnswerView:
    """Shows the events of one answer: thoughts on stderr, then the answer through `printer`."""

    def __init__(self, printer: TextPrinter, thoughts: ThoughtsMode) -> None:
        self._printer = printer
        self._thoughts = ThoughtsView(thoughts)
        self._has_answered = False

    def push(self, event: "TextEvent") -> None:
        """Show the thoughts and text of `event`."""
        if event.thinking and not self._has_answered:
            self._thoughts.push(event.thinking)
        if event.text:
            self._thoughts.end()
            self._has_answered = True
            if isinstance(self._printer, PlainPrinter):
                is_draft = event.token is not None and event.token.is_draft
                self._printer.push(event.text, is_draft=is_draft)
            else:
                self._printer.push(show_controls(event.text))

    def finish(self) -> None:
        """End the answer."""
        self._thoughts.end()
        self._printer.finish()
