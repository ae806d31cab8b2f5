"""The engine of a server, in a process of its own: `python -m localllm.server.engine_process FD`.

It reads commands from a socket and answers with events; what it is told first is the model. When
the other end is closed, it ends.

    open {model, config} → ready {…} | failed {error}
    submit {id, prompt, params, salt} → events, to the end of the request | refused {id, error}
    abort {id}
    ping {id} → pong {id, stats}
"""

import logging
import signal
import socket
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from queue import Empty, SimpleQueue
from threading import Timer
from typing import Any

from localllm.config import EngineConfig, SamplingParams
from localllm.errors import DeviceError, LocalLLMError, RequestError
from localllm.loaded_model import LoadedModel
from localllm.prompt import Prompt
from localllm.server.limits import LIMITS
from localllm.server.wire import (
    Message,
    Unpacker,
    error_to_wire,
    event_to_wire,
    pack,
    params_from_wire,
    prompt_from_wire,
)
from localllm.session import open_model
from localllm.speculation_config import SpeculationConfig
from localllm.text_engine import TextEngine

logger = logging.getLogger(__name__)
_CHUNK = 1 << 16


_TOO_LONG = f"the grammar could not be compiled within {LIMITS.grammar_seconds} s"


@dataclass(frozen=True, slots=True)
class _Asked:
    request_id: int
    prompt: Prompt
    params: SamplingParams
    salt: bytes


def config_to_wire(config: EngineConfig) -> Message:
    """See `config_from_wire`."""
    return asdict(config)


def config_from_wire(raw: Message) -> EngineConfig:
    """The configuration that `config_to_wire` was given."""
    return EngineConfig(**{**raw, "speculation": SpeculationConfig(**raw["speculation"])})


class EngineLoop:
    """Drives an engine by commands; the thread that runs it is the engine's only one."""

    def __init__(self, engine: TextEngine, channel: socket.socket) -> None:
        self._engine, self._channel = engine, channel
        self._commands: SimpleQueue[Message | None] = SimpleQueue()
        # The front's numbers of requests and the engine's; and those whose grammar is compiled,
        # beside the others' steps.
        self._own: dict[int, int] = {}
        self._compiling: set[int] = set()
        self._compilers = ThreadPoolExecutor(2, "grammar")
        self._is_over = False

    def receive(self, message: Message | None) -> None:
        """Take a command, from any thread; None: no more will come."""
        self._commands.put(message)

    def run(self) -> None:
        """Until there is nobody to answer. Raises: DeviceError."""
        has_idle_work = True
        while not self._is_over:
            is_busy = self._engine.engine.has_unfinished()
            if self._take_commands(waits=not is_busy and not has_idle_work):
                has_idle_work = True
            if self._is_over:
                return
            if self._engine.engine.has_unfinished():
                self._engine.step()
                self._send_events()
            elif has_idle_work:
                has_idle_work = self._engine.work_ahead()

    def _take_commands(self, *, waits: bool) -> bool:
        """Carry out what has come; whether anything had."""
        any_came = False
        while True:
            try:
                message = self._commands.get(block=waits and not any_came)
            except Empty:
                return any_came
            any_came = True
            if message is None:
                self._is_over = True
                return True
            self._carry_out(message)

    def _carry_out(self, message: Message) -> None:
        match message["type"]:
            case "submit":
                self._submit(message)
            case "compiled" | "late" if message["id"] in self._compiling:
                self._compiling.discard(message["id"])
                if message["type"] == "late":
                    self._refuse(message["id"], RequestError(_TOO_LONG, param="grammar"))
                elif message["error"] is not None:
                    self._refuse(message["id"], message["error"])
                else:
                    self._start(message["asked"])
            case "abort":
                self._compiling.discard(message["id"])
                own = self._own.pop(message["id"], None)
                if own is not None:
                    self._engine.forget(own)
            case "ping":
                self._send({"type": "pong", "id": message["id"], "stats": self._stats()})

    def _submit(self, message: Message) -> None:
        request_id = message["id"]
        try:
            asked = _Asked(
                request_id,
                prompt_from_wire(message["prompt"]),
                params_from_wire(message["params"]),
                message["salt"],
            )
        except RequestError as error:
            self._refuse(request_id, error)
            return
        if asked.params.grammar is None:
            self._start(asked)
        else:
            self._compiling.add(request_id)
            self._compilers.submit(self._compile, asked)

    def _start(self, asked: "_Asked") -> None:
        try:
            own = self._engine.submit(asked.prompt, asked.params, asked.salt)
        except RequestError as error:
            self._refuse(asked.request_id, error)
        else:
            self._own[asked.request_id] = own

    def _compile(self, asked: "_Asked") -> None:
        """Have a grammar compiled and kept, in a thread of its own."""
        assert asked.params.grammar is not None
        known = {"id": asked.request_id, "asked": asked}
        late = Timer(LIMITS.grammar_seconds, self.receive, [{"type": "late", **known}])
        late.daemon = True
        error: RequestError | None = None
        try:
            self._engine.prepare_grammars()
            late.start()
            self._engine.compile(asked.params.grammar, asked.prompt)
        except RequestError as refused:
            error = refused
        except Exception:
            logger.exception("in a grammar")
            error = RequestError("the grammar cannot be followed", param="grammar")
        late.cancel()
        self.receive({"type": "compiled", "error": error, **known})

    def _refuse(self, request_id: int, error: RequestError) -> None:
        self._send({"type": "refused", "id": request_id, "error": error_to_wire(error)})

    def _send_events(self) -> None:
        events: list[Any] = []
        for request_id, own in list(self._own.items()):
            while (event := self._engine.take(own)) is not None:
                events.append(event_to_wire(event, request_id))
            if not self._engine.is_open(own):
                self._engine.forget(own)
                del self._own[request_id]
        if events:
            self._send({"type": "events", "events": events})

    def _stats(self) -> Message:
        scheduler = self._engine.engine.scheduler
        pool = scheduler.pool
        running = len(scheduler.running)
        return {
            "running": running,
            "waiting": len(scheduler.unfinished()) - running,
            "used_blocks": pool.num_usable_blocks - pool.num_free_blocks,
            "blocks": pool.num_usable_blocks,
            "preemptions": scheduler.num_preemptions,
        }

    def _send(self, message: Message) -> None:
        try:
            self._channel.sendall(pack(message))
        except OSError:
            self._is_over = True  # nobody listens


def describe(model: LoadedModel) -> Message:
    """What the front has to know of a model."""
    engine = model.text_engine.engine
    return {
        "type": "ready",
        "name": model.name,
        "context_length": engine.context_length,
        "longer_context": engine.way_to_longer_context,
    }


def _read(channel: socket.socket, loop: EngineLoop, unpacker: Unpacker) -> None:
    try:
        while data := channel.recv(_CHUNK):
            for message in unpacker.feed(data):
                loop.receive(message)
    except (OSError, ValueError):
        logger.debug("the channel is broken", exc_info=True)
    loop.receive(None)


def _first(channel: socket.socket, unpacker: Unpacker) -> Message | None:
    while data := channel.recv(_CHUNK):
        for message in unpacker.feed(data):
            return message
    return None


def main() -> int:
    """The process; returns its exit code."""
    # What ends the front may reach this process too, which ends only behind it.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    channel, unpacker = socket.socket(fileno=int(sys.argv[1])), Unpacker()
    asked = _first(channel, unpacker)
    if asked is None:
        return 0
    logging.basicConfig(level=asked["log_level"], format="%(levelname)s: engine: %(message)s")
    try:
        model = open_model(asked["model"], config_from_wire(asked["config"]))
    except LocalLLMError as error:
        failed = {"type": "failed", "error": error_to_wire(error), "code": int(error.exit_code)}
        channel.sendall(pack(failed))
        return int(error.exit_code)
    loop = EngineLoop(model.text_engine, channel)
    channel.sendall(pack(describe(model)))
    threading.Thread(target=_read, args=(channel, loop, unpacker), daemon=True).start()
    try:
        loop.run()
    except DeviceError as error:
        logger.error("%s", error)
        return int(error.exit_code)
    model.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
