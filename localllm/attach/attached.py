"""An engine in another process, used as if it were in this one."""

import select
import socket
import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from localllm.answer.completion import TextEvent
from localllm.answer.loaded_model import ON_DISK, LoadedModel
from localllm.answer.text_engine import TextSource
from localllm.attach.addresses import address_of, connect
from localllm.attach.messages import (
    COMMANDS,
    REPLIES,
    Abort,
    Accepted,
    Command,
    Events,
    Hello,
    KeepAlive,
    Loading,
    ModelInfo,
    Open,
    Progress,
    Ready,
    Refused,
    Reply,
    Submit,
    Write,
    Wrote,
)
from localllm.attach.started_process import StartedProcess
from localllm.errors import LocalLLMError
from localllm.hub.checkpoint import FoundModel
from localllm.hub.generation_config import read_generation_config
from localllm.operators.listener import LOGGED, Listener
from localllm.process.frames import Unpacker, received
from localllm.process.messages import Failed
from localllm.process.shapes import MessageError
from localllm.schedule.prompt_progress import PromptProgress
from localllm.schedule.sampling_params import SamplingParams
from localllm.text.context import Context
from localllm.text.prompt import Prompt
from localllm.text.template_files import read_chat_templates
from localllm.text.tokenizer_files import load_backend, read_special_texts
from localllm.untrusted.delegated_tokenizer import DelegatedTokenizer, Elsewhere
from localllm.untrusted.messages import TextJob, TextResult
from localllm.untrusted.worker import StoppedError

_CHUNK = 1 << 16
# Seconds of one wait for messages, short enough to notice Ctrl-C; and those an engine has to reply.
_LOOK_S, _HELLO_S = 0.05, 2.0


@dataclass(slots=True)
class _Open:
    """A request: its events that nobody has read yet, and the number of unfinished samples."""

    num_left: int
    inbox: deque[TextEvent] = field(default_factory=deque)
    progress: PromptProgress | None = None
    is_accepted: bool = False
    refusal: LocalLLMError | None = None


class AttachedEngine(TextSource, Elsewhere):
    """An engine in another process, which works ahead and saves its prefixes by itself. Must be
    used from one thread.
    """

    def __init__(self, channel: socket.socket, described: ModelInfo, found: FoundModel) -> None:
        self._channel, self._described = channel, described
        # The engine has read the vocabulary; this process reads it only if it needs tokens' texts.
        self.tokenizer = DelegatedTokenizer(
            lambda: load_backend(found.folder),
            read_special_texts(found.folder),
            read_chat_templates(found.folder, found.fallback_template),
            self,
        )
        self._results: dict[int, TextResult | Failed] = {}
        self._unpacker = Unpacker(REPLIES)
        self._requests: dict[int, _Open] = {}
        self._next_id = 0

    @property
    def context(self) -> Context:
        return self._described.context

    def submit(self, prompt: Prompt, params: SamplingParams, salt: bytes = b"") -> int:
        """Raises: RequestError; LocalLLMError if the engine has ended."""
        request_id, self._next_id = self._next_id, self._next_id + 1
        opened = self._requests[request_id] = _Open(params.n)
        self._send(Submit(request_id, prompt, params, salt))
        try:
            while not opened.is_accepted and opened.refusal is None:
                self.step()
        except BaseException:
            self.forget(request_id)
            raise
        if opened.refusal is not None:
            del self._requests[request_id]
            raise opened.refusal
        return request_id

    def take(self, request_id: int) -> TextEvent | None:
        inbox = self._requests[request_id].inbox
        return inbox.popleft() if inbox else None

    def is_open(self, request_id: int) -> bool:
        return self._requests[request_id].num_left > 0

    def forget(self, request_id: int) -> None:
        known = self._requests.pop(request_id)
        if known.num_left > 0:
            with suppress(LocalLLMError):  # an engine that has gone needs no Abort
                self._send(Abort(request_id))

    def prompt_progress(self, request_id: int) -> PromptProgress | None:
        known = self._requests.get(request_id)
        return None if known is None else known.progress

    def warm(self) -> None:
        """The engine has done this already."""

    def ask(self, job: TextJob, seconds: float) -> TextResult:
        """Raises: also LocalLLMError if the engine has ended."""
        job_id, self._next_id = self._next_id, self._next_id + 1
        self._send(Write(job_id, job))
        deadline = time.monotonic() + seconds + _HELLO_S
        while job_id not in self._results:
            if time.monotonic() > deadline:
                raise StoppedError(f"the engine did not reply within {seconds:.3g} s")
            self.step()
        result = self._results.pop(job_id)
        if isinstance(result, Failed):
            raise result.error
        return result

    def step(self) -> None:
        """Wait briefly for messages, and handle them. Raises: LocalLLMError if the engine has
        ended.
        """
        ready, _, _ = select.select([self._channel], [], [], _LOOK_S)
        if not ready:
            return
        try:
            data = self._channel.recv(_CHUNK)
        except OSError:
            data = b""
        if not data:
            raise LocalLLMError("the engine has ended", hint="ask again; a new engine will start")
        try:
            for message in self._unpacker.feed(data):
                self._book(message)
        except MessageError as error:
            raise LocalLLMError(
                f"the engine's message cannot be read: {error}",
                hint="localllm stop, which ends the engine",
            ) from error

    def finish(self) -> None:
        """The engine keeps running."""
        self._channel.close()

    def keep_for(self, seconds: float) -> None:
        """Set how long the engine waits for another program after the last one has left."""
        self._send(KeepAlive(seconds))

    def _send(self, message: Command) -> None:
        try:
            self._channel.sendall(COMMANDS.pack(message))
        except OSError as error:
            raise LocalLLMError(f"the engine is gone: {error}", hint="ask again") from error

    def _book(self, message: Reply) -> None:
        match message:
            case Events(events):
                for request_id, event in events:
                    opened = self._requests.get(request_id)
                    if opened is not None:
                        opened.inbox.append(event)
                        opened.num_left -= event.finish_reason is not None
            case Wrote(job_id, result):
                self._results[job_id] = result
            case Accepted(request_id) if request_id in self._requests:
                self._requests[request_id].is_accepted = True
            case Refused(request_id, error) if request_id in self._requests:
                self._requests[request_id].refusal = error
            case Progress(request_id, progress) if request_id in self._requests:
                self._requests[request_id].progress = progress


def attach(found: FoundModel, keepalive_s: float | None = None) -> LoadedModel | None:
    """Attach to a running engine with this model and these settings; None if there is none.

    `keepalive_s` replaces the time it waits for the next program; None leaves it unchanged.
    """
    began_s = time.monotonic()
    channel = connect(address_of(found.folder, found.engine_config))
    if channel is None:
        return None
    answer = ask(channel, Hello())
    if not isinstance(answer, Ready):
        channel.close()
        return None
    engine = AttachedEngine(channel, answer.model, found)
    if keepalive_s is not None:
        engine.keep_for(keepalive_s)
    return _loaded(found, engine, began_s)


def ask_engine(address: Path, message: Command) -> Reply | None:
    """Send a message to the engine at `address`, and return its reply; None if there is none."""
    channel = connect(address)
    if channel is None:
        return None
    with channel:
        return ask(channel, message)


def start(
    found: FoundModel,
    keepalive_s: float,
    log_level: int,
    listener: Listener = LOGGED,
    least_load_s: float = 0.0,
    process: StartedProcess | None = None,
) -> LoadedModel:
    """Start an engine that waits `keepalive_s` for the next program after the last one has left;
    below 0: forever; not at all if its process took less than `least_load_s` from its start on,
    without what finding the model took. `listener` is told the progress of loading; `process`: one
    that was started ahead.

    Raises: LocalLLMError if the model cannot be loaded; OSError if there is no place for its
    socket, or its process cannot be started.
    """
    began_s = time.monotonic()
    address = address_of(found.folder, found.engine_config)
    with StartedProcess() if process is None else process as started:
        told = Open(
            model=str(found.folder.resolve()),
            name=found.name,
            config=found.engine_config,
            log_level=log_level,
            address=str(address),
            keepalive_s=keepalive_s,
        )
        started.log_for(address)
        with suppress(OSError):  # a process that has ended says no more
            started.channel.sendall(COMMANDS.pack(told))
        answer = _receive_loaded(started.channel, listener)
        started.is_engine = isinstance(answer, Ready)
    match answer:
        case Ready(model):
            engine = AttachedEngine(started.channel, model, found)
            if time.monotonic() - started.began_s - found.open_s < least_load_s:
                engine.keep_for(0.0)
            return _loaded(found, engine, began_s)
        case Failed(error):
            raise error
        case _:
            raise LocalLLMError(
                "the engine's process ended before its model was loaded",
                hint="--keepalive 0, which loads it in this process and shows more",
            )


def ask(channel: socket.socket, message: Command) -> Reply | None:
    """Send a message and return the reply; None if none comes soon."""
    try:
        channel.settimeout(_HELLO_S)
        channel.sendall(COMMANDS.pack(message))
        answer = next(received(channel, Unpacker(REPLIES)), None)
        channel.settimeout(None)
    except (OSError, MessageError):  # the engine has gone, or is of another version
        return None
    return answer


def _loaded(found: FoundModel, engine: AttachedEngine, began_s: float) -> LoadedModel:
    defaults = read_generation_config(found.folder)
    taken_s = found.open_s + time.monotonic() - began_s
    others = "earlier requests to the engine that is kept loaded"
    if found.engine_config.cache_disk_bytes:
        others += f", or {ON_DISK}"
    return LoadedModel(found.name, engine, defaults, taken_s, others)


def _receive_loaded(channel: socket.socket, listener: Listener) -> Reply | None:
    """The first message after the progress of loading; None if the channel is closed before it."""
    for message in received(channel, Unpacker(REPLIES)):
        if not isinstance(message, Loading):
            return message
        tell = listener.line if message.is_line else listener.doing
        tell(message.text)
    return None
