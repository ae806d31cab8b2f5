"""The conversation on a terminal: a line in, an answer out."""

import time

from prompt_toolkit import PromptSession

from localllm.cli.interrupt import until_interrupt
from localllm.cli.output import note
from localllm.cli.render import TokenPrinter
from localllm.completion import Completion
from localllm.config import SamplingParams
from localllm.errors import ExitCode, LocalLLMError
from localllm.session import ChatSession, LoadedModel

SLASH_COMMANDS = {
    "/help": "show the commands",
    "/clear": "forget the conversation",
    "/exit": "leave (also Ctrl-D)",
}
# Two Ctrl-C at an empty prompt within this time leave.
LEAVE_WINDOW_S = 2.0


def run_repl(loaded: LoadedModel, params: SamplingParams, *, system: str | None, raw: bool) -> int:
    """Read and answer until the user leaves; returns the exit code."""
    line_editor: PromptSession[str] = PromptSession()
    session = ChatSession(loaded, system)
    chats = loaded.tokenizer.has_chat_template and not raw
    what = "answers" if chats else "continues what you write"
    note(f"{loaded.name} {what}; /help for commands, Ctrl-D leaves", dim=True)
    last_interrupt_s = -LEAVE_WINDOW_S
    while True:
        try:
            text = line_editor.prompt("> ").strip()
        except EOFError:
            return ExitCode.OK
        except KeyboardInterrupt:
            now = time.monotonic()
            if now - last_interrupt_s < LEAVE_WINDOW_S:
                return ExitCode.SIGINT
            last_interrupt_s = now
            note("Ctrl-C again or Ctrl-D leaves", dim=True)
            continue
        if text == "/exit":
            return ExitCode.OK
        if text == "/clear":
            session = ChatSession(loaded, system)
        elif text.startswith("/"):
            if text != "/help":
                note(f"unknown command {text.split()[0]!r:.40}")
            for name, meaning in SLASH_COMMANDS.items():
                note(f"  {name:8} {meaning}", dim=True)
        elif text:
            last_interrupt_s = -LEAVE_WINDOW_S
            _answer(session, text, params, raw=raw)


def _answer(session: ChatSession, text: str, params: SamplingParams, *, raw: bool) -> None:
    """Stream one answer; Ctrl-C stops it and keeps what there is. An error ends only this turn."""
    loaded = session.model
    try:
        if raw:
            completion, events = loaded.stream(loaded.prompt_ids(text), params)
        else:
            completion, events = session.reply(text, params)
        printer = TokenPrinter()
        for event in until_interrupt(events):
            printer.push(event.text)
        printer.finish()
        if completion.error is not None:
            raise completion.error
        note(describe_turn(completion, loaded.context_length), dim=True)
    except LocalLLMError as error:
        note(f"error: {error}")


def describe_turn(completion: Completion, context_length: int) -> str:
    """The line of figures under an answer."""
    used = completion.num_prompt_tokens + completion.num_generated_tokens
    interrupted = "" if completion.finish_reason else " · interrupted"
    return (
        f"{completion.num_prompt_tokens} prompt tokens ({completion.num_cached_tokens} cached) · "
        f"{completion.prefill_tokens_per_s:.0f} tok/s prefill · "
        f"first token {completion.ttft_s:.2f} s · "
        f"{completion.decode_tokens_per_s:.0f} tok/s · "
        f"context {used}/{context_length}{interrupted}"
    )
