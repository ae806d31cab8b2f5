"""The conversation on a terminal: a message in, an answer out, until the user leaves."""

import logging
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from localllm.answer.answerer import Answerer
from localllm.answer.completion import Completion
from localllm.answer.event_stream import EventStream
from localllm.answer.overflow import UNKNOWN_CONTEXT, WARNED_SHARE
from localllm.chat.conversation import ChatSession
from localllm.chat.recorder import Recorder
from localllm.cli.draw.figures import describe_cache, describe_truncation, describe_turn
from localllm.cli.draw.output import StdoutClosedError, note, print_error, show_controls
from localllm.cli.draw.prefill_progress import with_progress
from localllm.cli.draw.render import AnswerView, Shown, make_printer
from localllm.cli.draw.terminal import keys_held
from localllm.cli.draw.words import context
from localllm.cli.models.download_progress import TerminalProgress
from localllm.cli.models.opening import without_memory
from localllm.cli.models.variants import choose_variant
from localllm.cli.repl.idle import meanwhile
from localllm.cli.repl.line_editor import CommandCompleter, LineEditor, unquoted
from localllm.engine.config import EngineConfig
from localllm.errors import ExitCode, LocalLLMError, RequestError
from localllm.hub.checkpoint import open_checkpoint
from localllm.operators.listener import Listener
from localllm.schedule.sampling_params import SamplingParams
from localllm.text.prompt import Text

logger = logging.getLogger(__name__)

# Ctrl-C twice at an empty prompt within this time leaves.
LEAVE_WINDOW_S = 2.0


@dataclass(frozen=True, slots=True)
class Attachment:
    """A file to send with the next message."""

    name: str
    text: str


@dataclass(frozen=True, slots=True)
class Commands:
    """What lines that begin with `/` do: the completions of their words, and the function that runs
    one, by its word and its argument.
    """

    completer: CommandCompleter
    run: Callable[["Repl", str, str], None]


class Repl:
    """A conversation, and what its commands change: sampling, what is shown, files to send.

    `given` has the SamplingParams fields that flags or `/set` set in place of the model's own;
    without a `recorder` nothing is saved.
    """

    def __init__(
        self,
        session: ChatSession,
        engine_config: EngineConfig,
        given: dict[str, Any],
        shown: Shown,
        recorder: Recorder | None = None,
    ) -> None:
        self.session = session
        self.recorder = recorder
        self.given = given
        self.shown = shown
        self.attachments: list[Attachment] = []
        self.last_completion: Completion | None = None
        self.used_tokens = 0  # of the context, as far as known
        self.is_over = False
        self.editor = LineEditor(self._toggle_thinking, self._status)
        self._engine_config = engine_config
        self._num_regenerated = 0
        self._was_warned = False

    def run(self, commands: Commands) -> int:
        """Read and answer until the user leaves; return the exit code."""
        what = "continues what you write" if self.session.completes_text else "answers"
        note(f"{self.session.model.name} {what}; /help for commands, Ctrl-D leaves", dim=True)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        last_interrupt_s = -LEAVE_WINDOW_S
        while not self.is_over:
            try:
                with meanwhile(self.session.model.work_ahead):
                    text = self.editor.read(commands.completer)
            except EOFError:
                break
            except KeyboardInterrupt:
                now = time.monotonic()
                if now - last_interrupt_s < LEAVE_WINDOW_S:
                    return ExitCode.SIGINT
                last_interrupt_s = now
                note("press Ctrl-C again or Ctrl-D to leave", dim=True)
                continue
            last_interrupt_s = -LEAVE_WINDOW_S
            try:
                self._handle(text, commands)
            except LocalLLMError as error:
                print_error(error.message, error.where, error.hint)
            except KeyboardInterrupt:
                note("interrupted", dim=True)
            except (StdoutClosedError, BrokenPipeError):
                raise
            except Exception as error:  # a bug in localllm, or out of memory: keep the conversation
                logger.debug("an error in a conversation", exc_info=True)
                print_error(f"{type(error).__name__}: {error}", hint="--debug shows where")
        self._close()
        saved = self.recorder.session if self.recorder is not None else None
        if saved is not None:
            name = show_controls(saved.name or str(saved.id))
            note(f"saved as session {name}; localllm chat --continue resumes it", dim=True)
        return ExitCode.OK

    def _close(self) -> None:
        try:
            self.session.close()
        except KeyboardInterrupt:
            note("left before all of the prompts' keys and values were saved", dim=True)

    def params(self) -> SamplingParams:
        """The sampling parameters of the next answer."""
        return self.session.model.sampling_params(**self.given)

    def ask(self, text: str) -> None:
        """Send `text` with the attached files, and show the answer."""
        message = "\n\n".join([*(file.text for file in self.attachments), text])
        before = self.last_completion
        if self.attachments and not self.session.turns:
            self.session.title = text
        self.session.pose(message)
        self.save()  # before it is asked, so that a killed process does not lose it
        try:
            self.answer(lambda params: self.session.reply(message, params))
        finally:
            if self.last_completion is not before:  # else refused: keep them
                self.attachments.clear()
        self._num_regenerated = 0

    def attach(self, name: str, text: str) -> None:
        """Put a file before the next message. Raises: RequestError if it leaves no room for a
        message.
        """
        model = self.session.model
        window = model.context.length
        num_tokens = model.count(Text(text), limit=window)
        if num_tokens >= window:
            raise RequestError(
                f"{name} is too long: it has at least {num_tokens:,} tokens, and the context "
                f"holds {window:,}",
                hint=f"a part of it, or {model.context.longer}",
            )
        self.attachments.append(Attachment(name, text.strip("\n")))

    def regenerate(self) -> None:
        """Answer the last question again, differently even if the seed is fixed."""
        self._num_regenerated += 1
        params = self.params()
        if params.temperature == 0:
            note("the temperature is 0, so the answer stays the same; try /set temp 0.7", dim=True)
        if params.seed is not None:
            params = replace(params, seed=params.seed + self._num_regenerated)
        before = self.session.turns[-1].answer if self.session.turns else None
        self.answer(lambda _: self.session.regenerate(params))
        if params.temperature > 0 and self.session.turns[-1].answer == before:
            note("the same answer again; /set temp 1.2 makes others more likely", dim=True)

    def answer(self, start: Callable[[SamplingParams], tuple[Completion, EventStream]]) -> None:
        """Start an answer and show it as it comes; Ctrl-C stops it and keeps the text so far.

        Raises: LocalLLMError, which ends this turn only.
        """
        completion, events = start(self.params())
        self.last_completion = completion
        self.save()
        try:
            self.show(completion, events)
        finally:
            self.save()
        if completion.error is not None:
            raise completion.error
        if completion.finish_reason is None and completion.num_generated_tokens == 0:
            note("interrupted before the answer; /retry asks again", dim=True)
            return
        self.used_tokens = completion.num_context_tokens
        self._note_outcome(completion)

    def show(self, completion: Completion, events: EventStream) -> None:
        """Show an answer as it comes, and save it as it grows."""
        printer = make_printer(
            self.shown.render,
            is_markdown=not self.session.completes_text,
            tints_drafts=self.shown.tints_drafts,
        )
        if completion.said.answer:
            printer.continue_behind(show_controls(completion.said.answer))
        view = AnswerView(printer, self.shown.thoughts)
        if completion.truncation is not None:
            note(describe_truncation(completion.truncation), dim=True)
        with keys_held():
            try:
                if self.editor.has_typed_interrupt():
                    events.close()
                for event in with_progress(events, ends_program=False):
                    view.push(event)
                    if self.recorder is not None:
                        self.recorder.flush(self.session.transcript)
            finally:
                events.close()
                view.finish()

    def save(self) -> None:
        """Save the conversation as it is now."""
        if self.recorder is not None:
            self.recorder.save(self.session.transcript())

    def start_anew(self) -> None:
        """Begin an empty conversation; the current one stays saved."""
        if self.recorder is not None:
            self.recorder.begin()
        self.session.clear()
        self.attachments.clear()
        self.last_completion, self.used_tokens, self._was_warned = None, 0, False

    def load_model(self, name: str) -> None:
        """Switch to another model; if that fails, the old one stays or is loaded again.

        Raises: LocalLLMError.
        """
        from localllm.answer.drafters import find_drafters  # imports torch: a second
        from localllm.answer.opening import load_checkpoint, open_model

        tell, chosen = partial(note, dim=True), choose_variant(name, self._engine_config)
        before = self.session.model.name
        # Errors in its files, and in those of what drafts for it, are found while the old model is
        # still loaded.
        found = open_checkpoint(chosen, self._engine_config, TerminalProgress())
        drafters = find_drafters(found)
        found.tokenizer.warm()
        SamplingParams(**{**found.defaults.sampling, **self.given})

        def load_back() -> Answerer:
            tell(f"loading {before} again")
            try:
                return open_model(before, self._engine_config)
            except BaseException:
                self.is_over = True  # no model is left to answer
                raise

        self.session.change_model(
            lambda: load_checkpoint(found, drafters, Listener(without_memory(tell))), load_back
        )
        self.used_tokens = self.session.count_tokens()
        self.save()

    @property
    def is_full(self) -> bool:
        """Whether the context has no room for another token."""
        return self.used_tokens >= self.session.model.context.length

    def way_to_room(self) -> str:
        """What the user can do when the context is full."""
        if self.session.can_be_summarised and not self.session.completes_text:
            return "/compact makes room by summarising the older turns"
        way = self.session.model.context.longer
        return f"/clear begins a new conversation, or start again with {way}"

    def _handle(self, text: str, commands: Commands) -> None:
        stripped = text.strip()
        if not stripped:
            return
        if stripped.lower() in ("exit", "quit"):
            self.is_over = True
            return
        if stripped.startswith("/") and not stripped.startswith("//"):
            word, _, argument = stripped.partition(" ")
            commands.run(self, word, argument)
            return
        if not self.session.completes_text:
            text = unquoted(stripped)
        self.ask(text.lstrip()[1:] if stripped.startswith("//") else text)

    def _note_outcome(self, completion: Completion) -> None:
        window = self.session.model.context.length
        if self.shown.shows_stats:
            note(describe_turn(completion, window), dim=True)
        if self.shown.shows_why:
            report = self.session.report_cache()
            if report is not None:
                for line in describe_cache(report, completion):
                    note(line, dim=True)
        if completion.finish_reason is None:
            note("interrupted; /continue resumes the answer", dim=True)
        elif completion.finish_reason == "length" and self.is_full:
            note(f"cut: the context is full; {self.way_to_room()}")
        elif completion.finish_reason == "length":
            note("cut at the token limit; /continue resumes the answer", dim=True)
        share = self.used_tokens / window
        if share >= WARNED_SHARE and not self._was_warned and not self.session.completes_text:
            self._was_warned = True
            if not self.is_full:  # else the note above says so
                note(f"the context is {share:.0%} full; /compact makes room by summarising")
        elif share < WARNED_SHARE:
            self._was_warned = False

    def _status(self) -> str:
        """The line below the prompt."""
        parts = [self.session.model.name]
        if self.session.think is not None:
            parts.append(f"thinks {self.session.think}")
        if self.recorder is None:
            parts.append("not saved")
        elif self.recorder.session is not None or self.recorder.name is not None:
            saved = self.recorder.session
            parts.append(f"session {self.recorder.name or (saved.id if saved else '')}")
        if self.used_tokens:
            window = self.session.model.context.length
            share = self.used_tokens / window
            told = "" if window == UNKNOWN_CONTEXT else f" ({share:.0%})"
            parts.append(f"{context(self.used_tokens, window)}{told}")
        if self.attachments:
            parts.append(f"{len(self.attachments)} file{'s' * (len(self.attachments) > 1)} to send")
        return " · ".join(parts)

    def _toggle_thinking(self) -> None:
        self.shown.thoughts = "fold" if self.shown.thoughts == "show" else "show"
        if self.shown.thoughts == "fold":
            note("thinking is folded", dim=True)
            return
        turns = self.session.turns
        thoughts = turns[-1].thinking.strip() if turns else ""
        if thoughts:
            note(show_controls(thoughts), dim=True)
        note("thinking is shown", dim=True)
