"""The conversation on a terminal: a message in, an answer out, until the user leaves."""

import logging
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from localllm.cli.idle import meanwhile
from localllm.cli.interrupt import until_interrupt
from localllm.cli.line_editor import CommandCompleter, LineEditor
from localllm.cli.output import StdoutClosedError, note, print_error
from localllm.cli.render import AnswerView, Shown, make_printer
from localllm.cli.slash_commands import (
    SLASH_COMMANDS,
    complete_argument,
    find_command,
    takes_path,
)
from localllm.cli.terminal import keys_held
from localllm.completion import Completion
from localllm.config import EngineConfig, SamplingParams
from localllm.conversation import ChatSession
from localllm.errors import ExitCode, LocalLLMError
from localllm.session import open_model
from localllm.text_engine import EventStream

logger = logging.getLogger(__name__)

# Two Ctrl-C at an empty prompt within this time leave.
LEAVE_WINDOW_S = 2.0


class Repl:
    """A conversation, and what its commands change: sampling, what is shown, files to send.

    `given` are the fields of SamplingParams that flags or `/set` have set over the model's own.
    """

    def __init__(
        self,
        session: ChatSession,
        engine_config: EngineConfig,
        given: dict[str, Any],
        shown: Shown,
    ) -> None:
        self.session = session
        self.given = given
        self.shown = shown
        self.attachments: list[str] = []
        self.last_completion: Completion | None = None
        self.is_over = False
        self.editor = LineEditor(
            CommandCompleter(SLASH_COMMANDS, complete_argument, takes_path), self._toggle_thinking
        )
        self._engine_config = engine_config
        self._num_regenerated = 0

    def run(self) -> int:
        """Read and answer until the user leaves; returns the exit code."""
        what = "continues what you write" if self.session.completes_text else "answers"
        note(f"{self.session.model.name} {what}; /help for commands, Ctrl-D leaves", dim=True)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        last_interrupt_s = -LEAVE_WINDOW_S
        while not self.is_over:
            try:
                with meanwhile(self.session.model.text_engine.work_ahead):
                    text = self.editor.read()
            except EOFError:
                break
            except KeyboardInterrupt:
                now = time.monotonic()
                if now - last_interrupt_s < LEAVE_WINDOW_S:
                    return ExitCode.SIGINT
                last_interrupt_s = now
                note("Ctrl-C again or Ctrl-D leaves", dim=True)
                continue
            last_interrupt_s = -LEAVE_WINDOW_S
            try:
                self._handle(text)
            except LocalLLMError as error:
                print_error(error.message, error.where, error.hint)
            except KeyboardInterrupt:
                note("interrupted", dim=True)
            except (StdoutClosedError, BrokenPipeError):
                raise
            except Exception as error:  # a defect of ours, or no memory: the conversation stays
                logger.debug("in a conversation", exc_info=True)
                print_error(f"{type(error).__name__}: {error}", hint="--debug shows where")
        return ExitCode.OK

    def params(self) -> SamplingParams:
        """What the next answer is sampled with."""
        return self.session.model.sampling_params(**self.given)

    def ask(self, text: str) -> None:
        """Send `text`, with the files that wait for it, and show the answer."""
        message = "\n\n".join([*self.attachments, text])
        num_turns = self.session.num_turns
        try:
            self.answer(lambda params: self.session.reply(message, params))
        finally:
            if self.session.num_turns > num_turns:  # refused, they wait for the next one
                self.attachments.clear()
        self._num_regenerated = 0

    def regenerate(self) -> None:
        """Another answer to the last question, also where the seed is fixed."""
        self._num_regenerated += 1
        params = self.params()
        if params.temperature == 0:
            note("the temperature is 0, so the answer stays the same; /set temp 0.7", dim=True)
        if params.seed is not None:
            params = replace(params, seed=params.seed + self._num_regenerated)
        self.answer(lambda _: self.session.regenerate(params))

    def answer(self, start: Callable[[SamplingParams], tuple[Completion, EventStream]]) -> None:
        """Show one answer as it comes; Ctrl-C stops it and keeps what there is.

        Raises: LocalLLMError, which ends this turn only.
        """
        completion, events = start(self.params())
        self.last_completion = completion
        is_markdown = not self.session.completes_text
        view = AnswerView(
            make_printer(
                self.shown.render,
                is_markdown=is_markdown,
                tints_drafts=self.shown.tints_drafts,
            ),
            shows_thinking=self.shown.shows_thinking,
        )
        with keys_held():
            try:
                for event in until_interrupt(events):
                    view.push(event)
            finally:
                events.close()
                view.finish()
        if completion.error is not None:
            raise completion.error
        if self.shown.shows_stats:
            note(describe_turn(completion, self.session.model.context_length), dim=True)
        if completion.finish_reason is None:
            note("interrupted; /continue goes on", dim=True)
        elif completion.finish_reason == "length":
            note("cut at the limit of tokens; /continue goes on", dim=True)

    def load_model(self, name: str) -> None:
        """Answer with another model from here on; the old one stays if that fails."""
        model = open_model(name, self._engine_config, report=partial(note, dim=True))
        model.sampling_params(**self.given)
        self.session.change_model(model)

    def _handle(self, text: str) -> None:
        stripped = text.strip()
        if not stripped:
            return
        if stripped.startswith("/") and not stripped.startswith("//"):
            word, _, argument = stripped.partition(" ")
            command = find_command(word)
            if command is None:
                print_error(
                    f"unknown command {word!r:.40}",
                    hint="/help shows them; begin with // to send a message that starts with /",
                )
            else:
                command.run(self, argument.strip())
            return
        if not self.session.completes_text:
            text = stripped
        self.ask(text.lstrip()[1:] if stripped.startswith("//") else text)

    def _toggle_thinking(self) -> None:
        self.shown.shows_thinking = not self.shown.shows_thinking
        note(f"thinking is {'shown' if self.shown.shows_thinking else 'hidden'}", dim=True)


def describe_turn(completion: Completion, context_length: int) -> str:
    """The line of figures under an answer."""
    used = completion.num_prompt_tokens + completion.num_generated_tokens
    drafted, accepted = completion.num_drafted_tokens, completion.num_accepted_tokens
    drafts = f"drafts {accepted}/{drafted} · " if drafted else ""
    return (
        f"prompt {completion.num_prompt_tokens} ({completion.num_cached_tokens} cached) "
        f"{completion.prefill_tokens_per_s:.0f} tok/s · "
        f"first {completion.ttft_s:.2f} s · "
        f"{completion.decode_tokens_per_s:.0f} tok/s · "
        f"{drafts}"
        f"context {used}/{context_length}"
    )
