"""The flags of `chat`, in the sections of its help."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from localllm.answer.overflow import OVERFLOW_POLICIES
from localllm.cli.draw.output import COLOURS
from localllm.cli.draw.render import RENDER_MODES
from localllm.cli.flags import suggestions
from localllm.cli.flags.engine_flags import DraftFlags, EngineFlags, PrefixCacheFlags
from localllm.cli.flags.form_flags import FormFlags
from localllm.cli.flags.groups import Flags, flag, setting
from localllm.cli.flags.sampling_flags import SamplingFlags
from localllm.cli.input.user_input import read_file
from localllm.engine.config import EngineConfig
from localllm.errors import RequestError
from localllm.text.prompt import THINK_LEVELS

if TYPE_CHECKING:
    from localllm.cli.chat.answer import AnswerForm

# Lines that --each-line answers at a time.
LINES_AT_ONCE = 32


@dataclass(frozen=True, slots=True)
class PromptFlags(Flags):
    """Which model to ask, and what."""

    section = "Model and prompt"
    exclusive = (("system", "system_file"),)

    model_flag: str | None = flag(
        None,
        "-m",
        "--model",
        help="The model; never taken for a prompt.",
        suggest=suggestions.models,
    )
    prompt_flag: str | None = flag(
        None, "-p", "--prompt", help="The prompt; never taken for a model."
    )
    file: list[str] | None = flag(
        None, "-f", help="Put files before the prompt: a path, a folder, '*.py'.", metavar="PATH"
    )
    system: str | None = setting(None, "-s", help="System prompt.")
    system_file: Path | None = setting(help="System prompt from a file.")
    raw: bool = setting(False, help="Complete the prompt as it is, without a chat template.")
    parse_special: bool = setting(
        False, help="Read text like <|im_end|> in a prompt as a special token."
    )
    think: str | None = setting(help="How much the model thinks.", choices=THINK_LEVELS)
    remote: str | None = setting(help="Ask an OpenAI-compatible server.", metavar="URL")
    api_key: str | None = setting(help="The API key of that server.")

    def system_prompt(self) -> str | None:
        """The system prompt from --system or --system-file. Raises: RequestError."""
        system = self.system
        if self.system_file is not None:
            if system is not None:
                raise RequestError("--system and --system-file cannot be combined")
            system = read_file(self.system_file).strip("\n")
        if self.raw and system is not None:
            raise RequestError("--raw takes no system prompt", hint="leave out one of the two")
        return system


@dataclass(frozen=True, slots=True)
class AnswerFlags(Flags):
    """How the answer is printed."""

    section = "Answer"

    json_output: bool = setting(
        False, "--json", help="The answer and its statistics as one JSON object."
    )
    stream_json: bool = setting(False, help="One JSON object per event, one per line.")
    extract_code: bool = setting(False, help="Print only the first fenced code block.")
    fail_on_length: bool = setting(False, help="Exit 9 when the answer is cut.")
    why: bool = setting(False, help="Report how much of the prompt came from the cache.")
    logprobs: int | None = setting(
        help="With --json: log-probabilities, and the N most likely tokens."
    )
    hide_thinking: bool = setting(False, help="Do not show the model's thoughts.")
    render: str = setting(
        "auto",
        help="On a terminal: rendered markdown (blocks), or the text as it is (plain).",
        choices=RENDER_MODES,
    )
    color: str = setting("auto", help="Colours (also NO_COLOR, FORCE_COLOR).", choices=COLOURS)

    def form(self) -> "AnswerForm":
        """The requested format. Raises: RequestError for more than one."""
        asked: list[AnswerForm] = []
        if self.json_output:
            asked.append("json")
        if self.stream_json:
            asked.append("stream-json")
        if self.extract_code:
            asked.append("code")
        if len(asked) > 1:
            raise RequestError("--json, --stream-json and --extract-code cannot be combined")
        form: AnswerForm = asked[0] if asked else "text"
        if self.logprobs is not None and form not in ("json", "stream-json"):
            raise RequestError("--logprobs needs --json or --stream-json", param="logprobs")
        return form


@dataclass(frozen=True, slots=True)
class LineFlags(Flags):
    """One question for each line of stdin."""

    section = "Lines"

    each_line: bool = flag(
        False, help="Answer each line of stdin by itself, with one line of stdout."
    )
    field: str | None = flag(
        help="With --each-line: lines are JSON objects; take the text of this field.",
        metavar="NAME",
    )
    skip: int = flag(0, help="With --each-line: leave out the first N lines.", metavar="N")

    def check(self) -> None:
        """Raises: RequestError."""
        if not self.each_line and (self.field is not None or self.skip):
            name = "field" if self.field is not None else "skip"
            raise RequestError(f"--{name} needs --each-line", param=name)
        if self.skip < 0:
            raise RequestError(f"--skip must be at least 0, found {self.skip}", param="skip")


@dataclass(frozen=True, slots=True)
class ConversationFlags(Flags):
    """Which conversation to continue, and what is kept of it for how long."""

    section = "Conversation"

    session_name: str | None = setting(
        None,
        "--session",
        help="Continue the conversation of this name, or begin it.",
        suggest=suggestions.sessions,
    )
    continue_last: bool = flag(False, "--continue", help="Continue the last conversation.")
    no_save: bool = setting(False, help="Do not save the conversation.")
    overflow: str = setting(
        "error", help="What to do when a conversation gets too long.", choices=OVERFLOW_POLICIES
    )
    keepalive: str | None = setting(
        help="Keep the engine running for the next question: 5m (the default), 0 (no), -1 "
        "(forever).",
        metavar="TIME",
    )

    @property
    def goes_on(self) -> bool:
        """Whether --session or --continue is given."""
        return self.continue_last or self.session_name is not None


@dataclass(frozen=True, slots=True)
class ChatFlags(Flags):
    """All flags of `chat`."""

    prompt: PromptFlags
    answer: AnswerFlags
    form: FormFlags
    lines: LineFlags
    conversation: ConversationFlags
    sampling: SamplingFlags
    engine: EngineFlags
    cache: PrefixCacheFlags
    drafts: DraftFlags

    def sampling_given(self) -> dict[str, Any]:
        """The SamplingParams fields that a flag set, with the grammar. Raises: RequestError."""
        fields = {**self.sampling.given(), "logprobs": self.answer.logprobs}
        fields["grammar"] = self.form.read()
        return {name: value for name, value in fields.items() if value is not None}

    def engine_config(self) -> EngineConfig:
        """The EngineConfig that the flags specify. Raises: RequestError."""
        cache = self.cache
        if self.conversation.no_save:  # keys and values reveal the conversation
            cache = replace(cache, cache_disk=None)
        num_seqs = LINES_AT_ONCE if self.lines.each_line else 1
        return self.engine.config(num_seqs, self.drafts.config(), cache)
