"""The request of a `chat` command, read and checked before anything is loaded."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from localllm.answer.overflow import OVERFLOW_POLICIES, OverflowPolicy
from localllm.chat.recorder import Recorder
from localllm.chat.store import SavedSession
from localllm.cli.chat.answer import AnswerForm
from localllm.cli.chat.flags import ChatFlags, ConversationFlags
from localllm.cli.chat.saved import find_session, open_recorder
from localllm.cli.chat.words import choose_model_and_prompt, split_files
from localllm.cli.draw.output import is_terminal, note
from localllm.cli.draw.render import RENDER_MODES, RenderMode
from localllm.cli.flags.values import parse_choice, parse_keepalive, parse_think
from localllm.cli.input.text_files import read_files
from localllm.cli.input.user_input import gather_prompt
from localllm.cli.models.opening import open_noted
from localllm.engine.config import EngineConfig
from localllm.errors import RequestError
from localllm.schedule.sampling_params import SamplingParams

if TYPE_CHECKING:
    from localllm.answer.answerer import Answerer
    from localllm.chat.conversation import ChatSession
    from localllm.text.prompt import ThinkLevel


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """A question, the model to ask, and how to answer; `text` is None for a conversation, and what
    stands behind each line for --each-line.

    It does not hold the loaded model, which may change during a conversation. `sampling` has the
    SamplingParams fields that were set, `saved` is the conversation to continue, and without a
    `recorder` nothing is saved. `typed`: the words of the question that come from no file.
    """

    model: str | None
    text: str | None
    typed: str
    system: str | None
    flags: ChatFlags
    sampling: dict[str, Any]
    engine: EngineConfig
    form: AnswerForm
    think: "ThinkLevel | None"
    render: RenderMode
    overflow: OverflowPolicy
    recorder: Recorder | None
    saved: SavedSession | None
    keepalive_s: float | None

    @property
    def title(self) -> str:
        """See Transcript."""
        return "" if self.text == self.typed else self.typed

    @property
    def has_grammar(self) -> bool:
        """Whether the answer must follow a grammar."""
        return "grammar" in self.sampling

    def open_session(self) -> "ChatSession":
        """Open the model and begin a conversation with it, restoring what is saved of it."""
        session = self._begin(self._open_model())
        session.parse_special = self.flags.prompt.parse_special
        session.overflow = self.overflow
        if self.saved is not None:
            session.system = session.system or self.saved.transcript.system
            session.restore(self.saved.transcript.turns)
        else:
            session.title = self.title
        return session

    def _open_model(self) -> "Answerer":
        remote, api_key = self.flags.prompt.remote, self.flags.prompt.api_key
        if remote is None:
            return open_noted(
                self.model,
                self.engine,
                is_conversation=self.text is None,
                keepalive_s=self.keepalive_s,
            )
        from localllm.attach.remote import open_remote

        return open_remote(remote, self.model, api_key)

    def _begin(self, loaded: "Answerer") -> "ChatSession":
        """Begin a conversation, and note it if the model cannot think although --think asks."""
        from localllm.chat.conversation import ChatSession

        session = ChatSession(loaded, self.system, raw=self.flags.prompt.raw)
        session.think = self.think
        if self.think is not None and (session.completes_text or not loaded.can_think):
            note(f"{loaded.name} does not support thinking; --think has no effect", dim=True)
        return session


def read_request(words: Sequence[str], flags: ChatFlags) -> ChatRequest:
    """Read words, flags, stdin and files into a request. Raises: RequestError, CatalogError."""
    files, left = split_files(flags.prompt.file or [], words)
    is_remote = flags.prompt.remote is not None
    chosen = choose_model_and_prompt(
        left, flags.prompt.model_flag, flags.prompt.prompt_flag, is_remote=is_remote
    )
    sampling = flags.sampling_given()
    engine = flags.engine_config()
    form = flags.answer.form()
    flags.lines.check()
    think = parse_think(flags.prompt.think)
    render = parse_choice("render", flags.answer.render, RENDER_MODES)
    each_line = flags.lines.each_line
    is_raw = flags.prompt.raw
    read = read_files(files, is_raw=is_raw)
    text = gather_prompt(chosen.prompt, read, reads_stdin=not each_line, is_raw=is_raw)
    if each_line:
        _check_lines(flags, form)
        text = text or ""
    elif text is None:
        _check_conversation(form)
    system = flags.prompt.system_prompt()
    SamplingParams(**sampling)  # rejects bad values before the model is opened
    overflow = parse_choice("overflow", flags.conversation.overflow, OVERFLOW_POLICIES)
    recorder = None if flags.conversation.no_save else open_recorder()
    saved = _find_saved(flags.conversation, recorder)
    goes_on_with = None if saved is None or chosen.is_said else saved.transcript.model
    return ChatRequest(
        model=goes_on_with or chosen.model,
        text=text,
        typed="" if chosen.prompt in (None, "-") else chosen.prompt,
        system=system,
        flags=flags,
        sampling=sampling,
        engine=engine,
        form=form,
        think=think,
        render="plain" if "grammar" in sampling else render,  # shown verbatim
        overflow=overflow,
        recorder=recorder,
        saved=saved,
        keepalive_s=parse_keepalive(flags.conversation.keepalive),
    )


def is_on_terminal() -> bool:
    """Whether a user is at the terminal: both stdin and stdout are one."""
    return is_terminal(sys.stdin) and is_terminal(sys.stdout)


def _check_conversation(form: AnswerForm) -> None:
    on_terminal = is_on_terminal()
    if on_terminal and form == "text":
        return
    raise RequestError(
        "no prompt, and no terminal to ask for one"
        if not on_terminal
        else "a conversation is shown as text; --json, --stream-json and --extract-code need a "
        "prompt",
        param="prompt",
        hint='localllm chat "your question", or pipe some text into it',
    )


def _check_lines(flags: ChatFlags, form: AnswerForm) -> None:
    """Raises: RequestError for what --each-line cannot do."""
    others = {
        "--stream-json": form == "stream-json",
        "--extract-code": form == "code",
        "--why": flags.answer.why,
        "--session": flags.conversation.session_name is not None,
        "--continue": flags.conversation.continue_last,
    }
    other = next((name for name, is_given in others.items() if is_given), None)
    if other is not None:
        raise RequestError(
            f"--each-line and {other} cannot be combined",
            param=other.lstrip("-"),
            hint="--json describes each answer",
        )
    if sys.stdin is None or is_terminal(sys.stdin):
        raise RequestError(
            "--each-line reads lines from stdin, and nothing is piped into it",
            hint='localllm chat --each-line "your question" < lines.txt',
        )


def _find_saved(flags: ConversationFlags, recorder: Recorder | None) -> SavedSession | None:
    if not flags.goes_on:
        return None
    if recorder is None:
        raise RequestError("--no-save cannot be combined with --session or --continue")
    return find_session(recorder, flags.session_name, goes_on=flags.continue_last)
