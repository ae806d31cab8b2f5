"""Messages to and from an engine in another process; an arrow (→) leads to the replies.

Each process that sends requests chooses their numbers, which are valid on its own connection only.
"""

from dataclasses import dataclass
from typing import Annotated, get_args

from localllm.answer.completion import TextEvent
from localllm.engine.config import EngineConfig
from localllm.errors import RequestError
from localllm.process.frames import Codec
from localllm.process.limits import AtMost, Within
from localllm.process.messages import Failed
from localllm.schedule.prompt_progress import PromptProgress
from localllm.schedule.sampling_params import SamplingParams
from localllm.text.context import Context
from localllm.text.prompt import Prompt
from localllm.untrusted.messages import TextJob, TextResult

MAX_SALT_BYTES = 64
Number = Annotated[int, Within(0, 1 << 62)]
Line = Annotated[str, AtMost(1 << 16)]


@dataclass(frozen=True, slots=True)
class Open:
    """Load a model: the first message to a new process, from the one that started it. → any number
    of Loading, then Ready or Failed.

    `address`: the socket where other processes may connect; `keepalive_s`: see EngineLoop.
    """

    model: Line
    name: Line
    config: EngineConfig
    log_level: int
    address: Line | None
    keepalive_s: float | None


@dataclass(frozen=True, slots=True)
class Submit:
    """Answer a prompt. → Accepted, then Events and Progress until the end; or Refused."""

    id: Number
    prompt: Prompt
    params: SamplingParams
    salt: Annotated[bytes, AtMost(MAX_SALT_BYTES)]


@dataclass(frozen=True, slots=True)
class Write:
    """Encode, count or render a text or a conversation. → Wrote."""

    id: Number
    job: TextJob


@dataclass(frozen=True, slots=True)
class Abort:
    """Abort a request; its answer is no longer needed."""

    id: Number


@dataclass(frozen=True, slots=True)
class Ping:
    """→ Pong, at once, however long a step takes."""

    id: Number


@dataclass(frozen=True, slots=True)
class Hello:
    """→ Ready."""


@dataclass(frozen=True, slots=True)
class KeepAlive:
    """Set how long the engine waits for a new process after the last has left; below 0: forever."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Stop:
    """End once all requests are answered. → Stopping; or Staying if only a server may end it."""


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """A ready engine's model and process; `owner_pid`: the server that the engine belongs to."""

    name: Line
    context_length: Number
    longer_context: Line
    pid: Number
    owner_pid: Number | None
    started_s: float
    keeps_states: bool = False

    @property
    def context(self) -> Context:
        """How much the model reads and writes in one request."""
        return Context(self.context_length, self.longer_context, self.keeps_states)


@dataclass(frozen=True, slots=True)
class EngineUse:
    """How an engine is used.

    `left_s`: seconds until the engine ends if no process connects; None: never.
    """

    requests: Number
    is_used: bool
    left_s: float | None
    memory_bytes: Number


@dataclass(frozen=True, slots=True)
class Stats:
    """An engine's load."""

    running: Number = 0
    waiting: Number = 0
    used_blocks: Number = 0
    blocks: Number = 1
    preemptions: Number = 0


@dataclass(frozen=True, slots=True)
class Loading:
    """The progress of loading; `is_line`: show it on a line of its own."""

    text: Line
    is_line: bool


@dataclass(frozen=True, slots=True)
class Ready:
    """The engine is ready."""

    model: ModelInfo
    use: EngineUse


@dataclass(frozen=True, slots=True)
class Accepted:
    """A request is accepted."""

    id: Number


@dataclass(frozen=True, slots=True)
class Refused:
    """A request is refused."""

    id: Number
    error: RequestError


@dataclass(frozen=True, slots=True)
class Events:
    """New events, each with the number of its request."""

    events: tuple[tuple[Number, TextEvent], ...]


@dataclass(frozen=True, slots=True)
class Progress:
    """How far the prompt of a request is; None once it has ended."""

    id: Number
    progress: PromptProgress | None


@dataclass(frozen=True, slots=True)
class Wrote:
    """The result of a Write."""

    id: Number
    result: TextResult | Failed


@dataclass(frozen=True, slots=True)
class Pong:
    """`busy_s`: seconds that the engine's thread has been in its current step; `is_compiling`: that
    step may have to compile kernels.
    """

    id: Number
    stats: Stats
    busy_s: float
    is_compiling: bool


@dataclass(frozen=True, slots=True)
class Stopping:
    """The engine will end."""


@dataclass(frozen=True, slots=True)
class Staying:
    """The engine will not end."""


Command = Open | Submit | Write | Abort | Ping | Hello | KeepAlive | Stop
Reply = (
    Loading
    | Ready
    | Failed
    | Accepted
    | Refused
    | Events
    | Progress
    | Wrote
    | Pong
    | Stopping
    | Staying
)
COMMANDS: Codec[Command] = Codec(get_args(Command))
REPLIES: Codec[Reply] = Codec(get_args(Reply))
