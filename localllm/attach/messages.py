"""What an engine in another process is told, and what it says.

Each of the engine's numbers for a request is chosen by whoever asks, and means something to those
two alone.
"""

from dataclasses import dataclass
from typing import Annotated, get_args

from localllm.answer.completion import TextEvent
from localllm.engine.config import EngineConfig
from localllm.engine.sampling_params import SamplingParams
from localllm.errors import RequestError
from localllm.process.frames import Codec
from localllm.process.limits import AtMost, Within
from localllm.process.messages import Failed
from localllm.text.prompt import Prompt
from localllm.untrusted.messages import TextJob, TextResult

MAX_SALT_BYTES = 64
Number = Annotated[int, Within(0, 1 << 62)]
Line = Annotated[str, AtMost(1 << 16)]


@dataclass(frozen=True, slots=True)
class Open:
    """Load a model: the first that a new process is told, by whoever started it. → Loading, any
    number of them, → Ready or Failed.

    `address`: where others may join; `keepalive_s`: see EngineLoop.
    """

    model: Line
    name: Line
    config: EngineConfig
    log_level: int
    address: Line | None
    keepalive_s: float | None


@dataclass(frozen=True, slots=True)
class Submit:
    """Answer a prompt. → Accepted, then Events to the end, and Progress; or Refused."""

    id: Number
    prompt: Prompt
    params: SamplingParams
    salt: Annotated[bytes, AtMost(MAX_SALT_BYTES)]


@dataclass(frozen=True, slots=True)
class Write:
    """Say what a text or a conversation is as a prompt. → Wrote."""

    id: Number
    job: TextJob


@dataclass(frozen=True, slots=True)
class Abort:
    """Nobody wants a request's answer any more."""

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
    """How long the engine waits for somebody else, once nobody is there; below 0: for ever."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Stop:
    """End, once what was asked is answered. → Stopping, or Staying where a server ends it."""


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What a ready engine says of its model and its process; `owner_pid`: the server it is of."""

    name: Line
    context_length: Number
    longer_context: Line
    pid: Number
    owner_pid: Number | None
    started_s: float


@dataclass(frozen=True, slots=True)
class EngineUse:
    """How an engine is used; it stays `left_s` seconds if nobody asks, or for ever."""

    requests: Number
    is_used: bool
    left_s: float | None
    memory_bytes: Number


@dataclass(frozen=True, slots=True)
class Stats:
    """What an engine says of its load."""

    running: Number = 0
    waiting: Number = 0
    used_blocks: Number = 0
    blocks: Number = 1
    preemptions: Number = 0


@dataclass(frozen=True, slots=True)
class Loading:
    """How loading goes on; `is_line`: it is worth a line of its own."""

    text: Line
    is_line: bool


@dataclass(frozen=True, slots=True)
class Ready:
    """There is an engine."""

    model: ModelInfo
    use: EngineUse


@dataclass(frozen=True, slots=True)
class Accepted:
    """A request is taken."""

    id: Number


@dataclass(frozen=True, slots=True)
class Refused:
    """A request is not taken."""

    id: Number
    error: RequestError


@dataclass(frozen=True, slots=True)
class Events:
    """What came since the last, each with the number of its request."""

    events: tuple[tuple[Number, TextEvent], ...]


@dataclass(frozen=True, slots=True)
class Progress:
    """How many of a prompt's tokens are computed, and how many there are; None: it is answered."""

    id: Number
    progress: tuple[Number, Number] | None


@dataclass(frozen=True, slots=True)
class Wrote:
    """What became of a Write."""

    id: Number
    result: TextResult | Failed


@dataclass(frozen=True, slots=True)
class Pong:
    """`busy_s`: for how long the engine's thread is at one step; `is_compiling`: kernels may be
    compiled in it.
    """

    id: Number
    stats: Stats
    busy_s: float
    is_compiling: bool


@dataclass(frozen=True, slots=True)
class Stopping:
    """It ends."""


@dataclass(frozen=True, slots=True)
class Staying:
    """It does not end."""


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
