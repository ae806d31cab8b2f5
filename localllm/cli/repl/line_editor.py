"""The input line of a conversation: several lines, paste, history, completion."""

import logging
import os
import shutil
from collections.abc import Callable, Iterable, Sequence

from prompt_toolkit import PromptSession
from prompt_toolkit.application import run_in_terminal
from prompt_toolkit.auto_suggest import AutoSuggestFromHistory
from prompt_toolkit.completion import CompleteEvent, Completer, Completion, PathCompleter
from prompt_toolkit.document import Document
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.input.typeahead import get_typeahead, store_typeahead
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.keys import Keys
from prompt_toolkit.styles import Style
from rich.cells import cell_len, set_cell_size

from localllm.files.private_files import make_private_folder, private_descriptor
from localllm.user.places import history_file

logger = logging.getLogger(__name__)

PROMPT, MULTI_PROMPT, EDIT_PROMPT = "> ", "| ", "edit> "
# A message that begins with these continues over several lines until they appear again.
QUOTES = '"""'
# The line below the prompt is dim like other notes, not a bar.
_STYLE = Style.from_dict(
    {"bottom-toolbar": "noreverse", "bottom-toolbar.text": "fg:ansibrightblack"}
)


class LineEditor:
    """Reads one message at a time.

    Enter sends, Alt-Enter or a `\\` at the line's end adds a line, and pasted lines are only
    inserted. While `is_multi`, it is the other way round: Enter adds a line and Alt-Enter sends.
    Ctrl-O calls `on_toggle_thinking`, which writes above the prompt; `status` is shown below it.
    """

    def __init__(
        self,
        on_toggle_thinking: Callable[[], None],
        status: Callable[[], str],
    ) -> None:
        self.is_multi = False
        self._is_editing = False
        self._session: PromptSession[str] = PromptSession(
            message=self._prompt,
            prompt_continuation=lambda width, line, is_soft: "" if is_soft else ". ".rjust(width),
            multiline=True,
            complete_while_typing=False,
            history=_open_history(),
            auto_suggest=AutoSuggestFromHistory(),
            enable_open_in_editor=True,  # Ctrl-X Ctrl-E
            tempfile_suffix=".md",
            key_bindings=self._key_bindings(on_toggle_thinking),
            bottom_toolbar=lambda: _fitted(status()),
            style=_STYLE,
        )

    def read(self, completer: Completer) -> str:
        """Read the next message, unchanged; Tab offers what `completer` knows.

        Raises: EOFError for Ctrl-D, KeyboardInterrupt for Ctrl-C, both at an empty prompt.
        """
        return self._session.prompt(completer=completer)

    def edit(self, text: str) -> str | None:
        """Let the user edit `text`; None if Ctrl-C or Ctrl-D cancels that."""
        self._is_editing = True
        try:
            return self._session.prompt(default=text)
        except (EOFError, KeyboardInterrupt):
            return None
        finally:
            self._is_editing = False

    def has_typed_interrupt(self) -> bool:
        """Whether Ctrl-C is among the keys typed after a message, before the terminal turned it
        into a signal again. It is removed, together with the keys before it.
        """
        keys = [*get_typeahead(self._session.input), *self._session.input.read_keys()]
        interrupts = [i for i, key in enumerate(keys) if key.key == Keys.ControlC]
        store_typeahead(self._session.input, keys[interrupts[-1] + 1 :] if interrupts else keys)
        return bool(interrupts)

    def _prompt(self) -> str:
        if self._is_editing:
            return EDIT_PROMPT
        return MULTI_PROMPT if self.is_multi else PROMPT

    def _key_bindings(self, on_toggle_thinking: Callable[[], None]) -> KeyBindings:
        keys = KeyBindings()

        @keys.add("enter")
        @keys.add("c-j")
        def _enter(event: KeyPressEvent) -> None:
            buffer = event.current_buffer
            if buffer.complete_state and buffer.complete_state.current_completion:
                buffer.complete_state = None  # the first Enter accepts the menu's choice
            elif self.is_multi or _is_open(buffer.text):
                buffer.newline(copy_margin=False)
            elif buffer.document.text_before_cursor.endswith("\\"):
                buffer.delete_before_cursor()
                buffer.newline(copy_margin=False)
            else:
                buffer.validate_and_handle()

        @keys.add("escape", "enter")
        @keys.add("escape", "c-j")
        def _alt_enter(event: KeyPressEvent) -> None:
            if self.is_multi:
                event.current_buffer.validate_and_handle()
            else:
                event.current_buffer.newline(copy_margin=False)

        @keys.add("c-c")
        def _clear_or_interrupt(event: KeyPressEvent) -> None:
            if event.current_buffer.text and not self._is_editing:
                event.current_buffer.reset()
            else:
                event.app.exit(exception=KeyboardInterrupt)

        @keys.add("c-o")
        def _toggle_thinking(event: KeyPressEvent) -> None:
            run_in_terminal(on_toggle_thinking)

        return keys


class CommandCompleter(Completer):
    """Completes a command at the start of the line, and then its argument.

    `arguments` returns the possible words after a command; None if a path may follow.
    """

    def __init__(
        self, commands: Iterable[str], arguments: Callable[[str], Sequence[str] | None]
    ) -> None:
        self._commands, self._arguments = sorted(commands), arguments
        self._paths = PathCompleter(expanduser=True)

    def get_completions(
        self, document: Document, complete_event: CompleteEvent
    ) -> Iterable[Completion]:
        """What Tab offers at the cursor."""
        before = document.text_before_cursor
        if not before.startswith("/") or "\n" in before:
            return
        command, space, argument = before.partition(" ")
        words = self._arguments(command) if space else self._commands
        if words is None:
            yield from self._paths.get_completions(Document(argument), complete_event)
        else:
            yield from _starting_with(argument if space else command, words)


def unquoted(text: str) -> str:
    """A message without the triple quotes around its lines."""
    stripped = text.strip()
    if len(stripped) >= 2 * len(QUOTES) and stripped.startswith(QUOTES):
        return stripped.removeprefix(QUOTES).removesuffix(QUOTES).strip("\n")
    return text


def _is_open(text: str) -> bool:
    return text.lstrip().startswith(QUOTES) and text.count(QUOTES) == 1


def _fitted(text: str) -> str:
    """`text` cut to one row of the terminal."""
    columns = shutil.get_terminal_size().columns - 1
    return text if cell_len(text) <= columns else set_cell_size(text, max(1, columns))


def _starting_with(text: str, words: Iterable[str]) -> Iterable[Completion]:
    return (Completion(word, -len(text)) for word in words if word.startswith(text))


def _open_history() -> History:
    """The history file in the user's data folder; in memory if it cannot be written."""
    path = history_file()
    try:
        # Prompts are private: only the user may read them.
        make_private_folder(path.parent)
        os.close(private_descriptor(path, os.O_RDWR | os.O_APPEND))
    except OSError as error:
        logger.warning("the history is not saved: %s", error)
        return InMemoryHistory()
    return _ForgivingFileHistory(path)


class _ForgivingFileHistory(FileHistory):
    """A history file whose write errors, such as a full disk, do not end the conversation."""

    def store_string(self, string: str) -> None:
        try:
            # Text from a terminal can hold lone surrogates, which cannot be encoded.
            super().store_string(string.encode("utf-8", errors="replace").decode("utf-8"))
        except OSError as error:
            logger.warning("the history is not saved: %s", error)
