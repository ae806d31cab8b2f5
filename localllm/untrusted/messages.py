"""Messages to and from a worker.

    OpenTexts or OpenGrammars → Opened | Failed | Stopped
    then, any number of times, Job → a result | Failed | Stopped

Untrusted text is bytes here: only the job that reads it decodes it, within the job's limits.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, get_args

from localllm.process.frames import Codec
from localllm.process.limits import AtMost, Within
from localllm.process.messages import Failed
from localllm.text.prompt import Prompt

# JSON and texts may hold lone surrogates, which are found when they are encoded.
_TEXT_CODING = ("utf-8", "surrogatepass")
_Seconds = Annotated[float, Within(0, 1e6)]


def text_to_bytes(text: str) -> bytes:
    """See `bytes_to_text`."""
    return text.encode(*_TEXT_CODING)


def bytes_to_text(data: bytes) -> str:
    """The text that was given to `text_to_bytes`. Raises: UnicodeDecodeError."""
    return data.decode(*_TEXT_CODING)


@dataclass(frozen=True, slots=True)
class OpenTexts:
    """The jobs are texts for the tokenizer of a folder; its vocabulary has `num_bytes` bytes."""

    folder: Annotated[str, AtMost(1 << 16)]
    fallback_template: str | None
    num_bytes: Annotated[int, Within(0, 1 << 40)]


@dataclass(frozen=True, slots=True)
class OpenGrammars:
    """The jobs are grammars for a tokenizer, given as JSON."""

    tokenizer: str
    vocab_size: Annotated[int, Within(0, 1 << 31)]
    eos: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes that are read at the start."""
        return len(self.tokenizer)


@dataclass(frozen=True, slots=True)
class _Texts:
    """A job on untrusted text, or on the JSON of a Conversation."""

    text: bytes

    @property
    def num_bytes(self) -> int:
        """Bytes of untrusted input."""
        return len(self.text)


@dataclass(frozen=True, slots=True)
class EncodeText(_Texts):
    """See Tokenizer.encode. → TokenIds."""

    add_special_tokens: bool
    parse_special: bool


@dataclass(frozen=True, slots=True)
class CountTokens(_Texts):
    """See Tokenizer.count_at_least. → TokenCount."""

    limit: Annotated[int, Within(0, 1 << 40)]


@dataclass(frozen=True, slots=True)
class EncodeChat(_Texts):
    """See Tokenizer.encode_chat. → ChatPrompt."""


@dataclass(frozen=True, slots=True)
class RenderChat(_Texts):
    """See Tokenizer.render_chat. → Rendered."""


@dataclass(frozen=True, slots=True)
class TryGrammar:
    """Compile a grammar, and follow it for some tokens. → Trial."""

    source: str

    @property
    def num_bytes(self) -> int:
        """Bytes of untrusted input."""
        return len(self.source)


@dataclass(frozen=True, slots=True)
class TokenIds:
    """A text's tokens."""

    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TokenCount:
    """A lower bound on a text's tokens."""

    count: int


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A conversation's prompt."""

    prompt: Prompt


@dataclass(frozen=True, slots=True)
class Rendered:
    """A conversation as text."""

    text: bytes


@dataclass(frozen=True, slots=True)
class Trial:
    """The cost of a grammar. `error`: the compiler's message, empty if there is none; `step_s`: the
    most seconds that a token took.
    """

    error: str
    step_s: float
    num_bytes: Annotated[int, Within(0, 1 << 50)]


@dataclass(frozen=True, slots=True)
class Opened:
    """A worker is ready."""


@dataclass(frozen=True, slots=True)
class Stopped:
    """The work exceeded a limit, or crashed."""

    reason: Annotated[str, AtMost(1 << 16)]


Opening = OpenTexts | OpenGrammars
TextJob = EncodeText | CountTokens | EncodeChat | RenderChat
TextResult = TokenIds | TokenCount | ChatPrompt | Rendered
Work = TextJob | TryGrammar
Result = TextResult | Trial
# Does the jobs of one opening.
Jobs = Callable[[Work], Result]


@dataclass(frozen=True, slots=True)
class Job:
    """Work, and the seconds it may take."""

    seconds: _Seconds
    work: Work


ToWorker = Opening | Job
FromWorker = Opened | Result | Failed | Stopped
TO_WORKER: Codec[ToWorker] = Codec(get_args(ToWorker))
FROM_WORKER: Codec[FromWorker] = Codec(get_args(FromWorker))
