"""The server's side of the engine: starts its process, watches it, and restarts it.

When a process has died, or is killed because it hangs, each of its requests ends with an error that
names the request; the next process takes requests as soon as it is ready.
"""

import asyncio
import logging
import socket
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Literal, Never

from localllm.answer.completion import TextEvent
from localllm.attach.messages import (
    COMMANDS,
    REPLIES,
    Abort,
    Command,
    Events,
    Loading,
    ModelInfo,
    Open,
    Ping,
    Pong,
    Ready,
    Refused,
    Reply,
    Stats,
    Submit,
)
from localllm.attach.started_process import command_of
from localllm.engine.config import EngineConfig
from localllm.errors import LocalLLMError, RequestError
from localllm.operators.listener import Tell
from localllm.process.frames import Unpacker
from localllm.process.messages import Failed
from localllm.process.shapes import MessageError
from localllm.schedule.sampling_params import SamplingParams
from localllm.text.prompt import Prompt

logger = logging.getLogger(__name__)

State = Literal["starting", "ready", "compiling", "unresponsive", "stopped", "failed"]
# Seconds between pings. A process that does not reply, or stays in one step, is called unresponsive
# after the second time and killed after the third. A step on a CPU can take seconds, and one that
# has to compile kernels can take minutes.
PING_S, UNRESPONSIVE_S, HANGS_S = 2.0, 10.0, 180.0
# Seconds before a restart; doubled after each process that did not become ready.
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 30.0
# Seconds for a process to end after its channel is closed.
_ENDS_S = 5.0
# Unread events of a request; with more, its reader counts as too slow.
_MAX_UNREAD = 8192


class EngineDownError(LocalLLMError):
    """There is no engine at the moment, or it died during a request."""


class QueueFullError(LocalLLMError):
    """The largest number of requests is reached."""


@dataclass(slots=True, eq=False)
class RequestStream:
    """The events of one request, to be read by one task; closing the stream ends the request."""

    client: "EngineClient"
    request_id: int
    num_samples: int
    events: "asyncio.Queue[TextEvent | LocalLLMError]" = field(default_factory=asyncio.Queue)
    num_ended: int = 0
    num_delivered: int = 0  # samples whose last event has arrived, read or not
    replica: str = ""  # one engine has none

    async def __aiter__(self) -> AsyncIterator[TextEvent]:
        """Raises: RequestError for a request that is refused; EngineDownError."""
        try:
            while self.num_ended < self.num_samples:
                event = await self.events.get()
                if isinstance(event, LocalLLMError):
                    raise event
                if event.finish_reason is not None:
                    self.num_ended += 1
                yield event
        finally:
            self.close()

    def close(self) -> None:
        """End the request, if it still runs."""
        self.client.forget(self)


class EngineClient:
    """One engine, in whichever process it currently runs."""

    def __init__(
        self,
        model: str,
        config: EngineConfig,
        max_requests: int,
        log_level: int,
        *,
        name: str = "",
        address: str | None = None,
        hangs_s: float = HANGS_S,
        tell: Tell = logger.info,
    ) -> None:
        """`name`: the model's name; `address`: the socket where the user's programs may attach;
        `hangs_s`: seconds until a process that hangs is killed; `tell` gets the lines to print
        while the model is loaded.
        """
        self._tell = tell
        self._hangs_s = hangs_s
        self._model, self._config = model, config
        self._name, self._address = name, address
        self._max_requests, self._log_level = max_requests, log_level
        self._state: State = "starting"
        self.info: ModelInfo | None = None
        self.failure: LocalLLMError | None = None
        self.stats = Stats()
        self.num_restarts = 0
        self._next_id = 0
        self._streams: dict[int, RequestStream] = {}
        self._writer: asyncio.StreamWriter | None = None
        self._supervisor: asyncio.Task[None] | None = None
        self._settled = asyncio.Event()
        self._heard_s = self._busy_s = 0.0
        self._is_compiling = False

    @property
    def state(self) -> State:
        """The state of the engine."""
        if self._state != "ready" or self._stuck_s < UNRESPONSIVE_S:
            return self._state
        return "compiling" if self._is_compiling and self._busy_s > 0 else "unresponsive"

    @property
    def replicas(self) -> Mapping[str, Never]:
        """None: this is one engine."""
        return {}

    @property
    def _is_ready(self) -> bool:
        return self._state == "ready"

    @property
    def _is_stopped(self) -> bool:
        return self._state == "stopped"

    @property
    def _stuck_s(self) -> float:
        """Seconds since the engine's last message, plus those it had been in one step by then."""
        silent_s = time.monotonic() - self._heard_s
        return self._busy_s + silent_s if self._busy_s else silent_s

    async def start(self) -> ModelInfo:
        """Start the engine, and wait until it is ready.

        Raises: LocalLLMError if the model cannot be loaded.
        """
        self._supervisor = asyncio.create_task(self._supervise())
        settled = asyncio.create_task(self._settled.wait())
        # A supervisor that ends has failed.
        await asyncio.wait({settled, self._supervisor}, return_when=asyncio.FIRST_COMPLETED)
        if not settled.done():
            settled.cancel()
            await self._supervisor
        if self.info is None:
            assert self.failure is not None
            raise self.failure
        return self.info

    async def stop(self) -> None:
        """End the process; its unfinished requests end with an error."""
        self._state = "stopped"
        if self._supervisor is not None:
            self._supervisor.cancel()
            await asyncio.gather(self._supervisor, return_exceptions=True)

    def submit(
        self, prompt: Prompt, params: SamplingParams, salt: bytes = b"", *, is_whole: bool = False
    ) -> RequestStream:
        """Start a request; one engine cannot answer it elsewhere if it ends, `is_whole` or not.

        Raises: EngineDownError, QueueFullError.
        """
        if self._writer is None or not self._is_ready:
            raise EngineDownError("the engine is starting", hint="try again in a moment")
        if len(self._streams) >= self._max_requests:
            raise QueueFullError(f"{len(self._streams)} requests are already running or waiting")
        stream = RequestStream(self, self._next_id, params.n)
        self._next_id += 1
        self._streams[stream.request_id] = stream
        self._send(Submit(stream.request_id, prompt, params, salt))
        return stream

    def forget(self, stream: RequestStream) -> None:
        """Drop a stream that nobody reads any more; its request is aborted if it is unfinished."""
        known = self._streams.pop(stream.request_id, None)
        if known is not None and stream.num_delivered < stream.num_samples:
            self._send(Abort(stream.request_id))

    def _send(self, message: Command) -> None:
        if self._writer is not None:
            self._writer.write(COMMANDS.pack(message))

    async def _supervise(self) -> None:
        pause = _FIRST_PAUSE_S
        while True:
            try:
                was_ready = await self._run_once()
            finally:
                self._end_all()
            if self.failure is not None:
                self._state = "failed"
                self._settled.set()
                return
            pause = _FIRST_PAUSE_S if was_ready else min(2 * pause, _LONGEST_PAUSE_S)
            self.num_restarts += 1
            logger.error("the engine's process ended; starting it again")
            await asyncio.sleep(pause)

    async def _run_once(self) -> bool:
        """Run one process to its end; returns whether it was ever ready."""
        ours, theirs = socket.socketpair()
        self._state = "starting"
        try:
            process = await asyncio.create_subprocess_exec(
                *command_of(theirs), pass_fds=[theirs.fileno()]
            )
        except OSError as error:
            ours.close()
            logger.error("the engine's process cannot be started: %s", error)
            if self.info is None:
                self.failure = LocalLLMError(f"the engine cannot be started: {error}")
            return False
        finally:
            theirs.close()
        reader, self._writer = await asyncio.open_connection(sock=ours)
        was_ready = False
        watch = asyncio.create_task(self._watch(process))
        try:
            told = Open(
                model=self._model,
                name=self._name,
                config=self._config,
                log_level=self._log_level,
                address=self._address,
                keepalive_s=None,
            )
            self._send(told)
            unpacker = Unpacker(REPLIES)
            self._heard_s = time.monotonic()
            while data := await reader.read(1 << 16):
                self._heard_s = time.monotonic()
                for message in unpacker.feed(data):
                    self._take(message)
                was_ready = was_ready or self._is_ready
        except (ConnectionError, MessageError):
            logger.debug("the engine's channel is broken", exc_info=True)
        finally:
            self._busy_s = 0.0
            watch.cancel()
            self._writer.close()
            self._writer = None
            if self._is_ready:
                self._state = "starting"
            if not was_ready and self._is_stopped:  # it has nothing to save yet
                with suppress(ProcessLookupError):
                    process.kill()
            try:  # it ends by itself, after saving its prefixes
                code = await asyncio.wait_for(process.wait(), _ENDS_S)
            except TimeoutError:
                process.kill()
                code = await process.wait()
            if not was_ready and self.failure is None and self.num_restarts == 0:
                self.failure = LocalLLMError(
                    "the engine's process ended before its model was loaded",
                    where=f"exit code {code}",
                    hint="localllm chat with the same model and flags shows more",
                )
        return was_ready

    async def _watch(self, process: asyncio.subprocess.Process) -> None:
        """Ping the process, and kill it if it hangs."""
        while True:
            await asyncio.sleep(min(PING_S, self._hangs_s / 4))
            if self._is_ready:
                self._send(Ping(0))
                if self._stuck_s > self._hangs_s:
                    logger.error("the engine has hung for %g s; killing it", self._hangs_s)
                    process.kill()

    def _take(self, message: Reply) -> None:
        match message:
            case Ready(model):
                self.info, self._state = model, "ready"
                self._settled.set()
            case Loading(text, is_line):
                if is_line:
                    self._tell(text)
            case Failed(failure):
                if self.info is None:
                    self.failure = failure
                else:  # it was loaded before, so the next attempt may succeed
                    logger.error("cannot load the engine again: %s", failure)
            case Events(events):
                for request_id, event in events:
                    self._deliver(request_id, event)
            case Refused(request_id, error):
                self._deliver(request_id, error)
            case Pong(_, stats, busy_s, is_compiling):
                self.stats, self._busy_s, self._is_compiling = stats, busy_s, is_compiling

    def _deliver(self, request_id: int, event: TextEvent | LocalLLMError) -> None:
        stream = self._streams.get(request_id)
        if stream is None:
            return
        if stream.events.qsize() >= _MAX_UNREAD:
            self.forget(stream)
            stream.events.put_nowait(
                RequestError("the answer was read too slowly and has been dropped")
            )
            return
        stream.events.put_nowait(event)
        if isinstance(event, LocalLLMError):
            del self._streams[request_id]
        elif event.finish_reason is not None:
            stream.num_delivered += 1
            if stream.num_delivered == stream.num_samples:
                del self._streams[request_id]  # its place is free, even while it is still read

    def _end_all(self) -> None:
        """End all streams with an error: the engine is gone."""
        streams, self._streams, self.stats = self._streams, {}, Stats()
        for stream in streams.values():
            stream.events.put_nowait(
                EngineDownError(
                    f"the engine ended during request {stream.request_id}",
                    hint="ask again; the engine is restarting",
                )
            )
