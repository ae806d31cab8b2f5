"""The engine in a process of its own: `python -m localllm.attach.engine_process FD`.

What it is told first, by whoever started it, is the model (`Open`); then it is an EngineLoop's.
"""

import logging
import os
import signal
import socket
import sys
import time
from contextlib import suppress
from functools import partial
from pathlib import Path

from localllm.answer.loaded_model import LoadedModel
from localllm.answer.opening import open_model
from localllm.answer.text_engine import TextEngine
from localllm.attach.addresses import leave, listen_at
from localllm.attach.engine_loop import EngineLoop
from localllm.attach.messages import (
    COMMANDS,
    REPLIES,
    Command,
    Loading,
    ModelInfo,
    Open,
    Reply,
    Stop,
)
from localllm.engine.listener import Listener
from localllm.errors import DeviceError, LocalLLMError
from localllm.process.ending import end_with
from localllm.process.frames import Unpacker
from localllm.process.log_rate import LogRate
from localllm.process.messages import Failed

logger = logging.getLogger(__name__)
_CHUNK = 1 << 16


def describe(model: LoadedModel, asked: Open) -> ModelInfo:
    """What others have to know of a model."""
    engine = model.text_engine
    return ModelInfo(
        name=asked.name or model.name,
        context_length=engine.context_length,
        longer_context=engine.way_to_longer_context,
        pid=os.getpid(),
        owner_pid=os.getppid() if asked.keepalive_s is None else None,
        started_s=time.time(),
    )


def _listener(channel: socket.socket) -> Listener:
    """Sends what it is told to whoever started this."""

    def send(text: str, *, is_line: bool) -> None:
        logger.info("%s", text)
        _tell(channel, Loading(text, is_line))

    return Listener(partial(send, is_line=True), partial(send, is_line=False))


def _tell(channel: socket.socket, message: Reply) -> None:
    with suppress(OSError):  # who is gone need not know
        channel.sendall(REPLIES.pack(message))


def _first(channel: socket.socket, unpacker: Unpacker[Command]) -> Command | None:
    while data := channel.recv(_CHUNK):
        for message in unpacker.feed(data):
            return message
    return None


def main() -> int:
    """The process; returns its exit code."""
    # What ends the front may reach this process too, which ends only behind it.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    channel, unpacker = socket.socket(fileno=int(sys.argv[1])), Unpacker(COMMANDS)
    asked = _first(channel, unpacker)
    if not isinstance(asked, Open):
        return 0
    if asked.keepalive_s is None:
        end_with(channel)
    logging.basicConfig(level=asked.log_level, format="%(levelname)s: engine: %(message)s")
    for handler in logging.getLogger().handlers:
        handler.addFilter(LogRate())
    try:
        model = open_model(asked.model, asked.config, _listener(channel))
    except LocalLLMError as error:
        _tell(channel, Failed(error))
        return int(error.exit_code)
    assert isinstance(model.text_engine, TextEngine)
    described = describe(model, asked)
    loop = EngineLoop(model.text_engine, channel, described, asked.keepalive_s)
    if asked.keepalive_s is not None:  # there is no front behind which it ends
        signal.signal(signal.SIGTERM, lambda *_: loop.receive(None, Stop()))
    address = None if asked.address is None else Path(asked.address)
    listener = None if address is None else listen_at(address)
    if listener is not None:
        loop.listen(listener)
    elif asked.keepalive_s is not None:
        loop.keep_for(0.0)  # nobody else would find it
    try:
        loop.run(unpacker)
    except DeviceError as error:
        logger.error("%s", error)
        return int(error.exit_code)
    finally:
        if listener is not None and address is not None:
            leave(address, listener)
    model.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
