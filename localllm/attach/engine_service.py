"""The engine in a process of its own, which engine_process.py starts.

The first message, from the process that started it, names the model (`Open`); an EngineLoop handles
all others.
"""

import logging
import os
import signal
import socket
import time
from contextlib import suppress
from functools import partial
from pathlib import Path

from localllm.answer.drafters import find_drafters
from localllm.answer.opening import load_text_engine
from localllm.answer.text_engine import TextEngine
from localllm.attach.addresses import leave, listen_at
from localllm.attach.engine_loop import EngineLoop
from localllm.attach.messages import (
    COMMANDS,
    REPLIES,
    Loading,
    ModelInfo,
    Open,
    Reply,
    Stop,
)
from localllm.errors import DeviceError, LocalLLMError
from localllm.hub.checkpoint import open_checkpoint
from localllm.operators.listener import Listener
from localllm.process.ending import end_with
from localllm.process.frames import Unpacker, received
from localllm.process.log_rate import LogRate
from localllm.process.messages import Failed

logger = logging.getLogger(__name__)


def describe(engine: TextEngine, asked: Open) -> ModelInfo:
    """What other processes need to know about a model."""
    context = engine.context
    return ModelInfo(
        name=asked.name,
        context_length=context.length,
        longer_context=context.longer,
        pid=os.getpid(),
        owner_pid=os.getppid() if asked.keepalive_s is None else None,
        started_s=time.time(),
        keeps_states=context.keeps_states,
    )


def _listener(channel: socket.socket) -> Listener:
    """A listener that forwards everything to the process that started this one."""

    def send(text: str, *, is_line: bool) -> None:
        logger.info("%s", text)
        _tell(channel, Loading(text, is_line))

    return Listener(partial(send, is_line=True), partial(send, is_line=False))


def _tell(channel: socket.socket, message: Reply) -> None:
    with suppress(OSError):  # a process that has gone needs no message
        channel.sendall(REPLIES.pack(message))


def run(channel: socket.socket) -> int:
    """Load the model that the first message names, and serve it; returns the exit code."""
    unpacker = Unpacker(COMMANDS)
    asked = next(received(channel, unpacker), None)
    if not isinstance(asked, Open):
        return 0
    if asked.keepalive_s is None:
        end_with(channel)
    logging.basicConfig(level=asked.log_level, format="%(levelname)s: engine: %(message)s")
    for handler in logging.getLogger().handlers:
        handler.addFilter(LogRate())
    try:
        found = open_checkpoint(asked.model, asked.config, is_warm=True)
        engine = load_text_engine(found, find_drafters(found), _listener(channel))
    except LocalLLMError as error:
        _tell(channel, Failed(error))
        return int(error.exit_code)
    loop = EngineLoop(engine, channel, describe(engine, asked), asked.keepalive_s)
    if asked.keepalive_s is not None:  # no server ends this process
        signal.signal(signal.SIGTERM, lambda *_: loop.receive(None, Stop()))
    address = None if asked.address is None else Path(asked.address)
    listener = None if address is None else listen_at(address)
    if listener is not None:
        loop.listen(listener)
    elif asked.keepalive_s is not None:
        loop.keep_for(0.0)  # no other program could find it
    try:
        loop.run(unpacker)
    except DeviceError as error:
        logger.error("%s", error)
        return int(error.exit_code)
    finally:
        if listener is not None and address is not None:
            leave(address, listener)
    engine.finish()
    return 0
