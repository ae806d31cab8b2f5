"""Whoever talks to an engine or a worker that answers nonsense is told so, and nothing else."""

import socket
import threading
import time
from pathlib import Path

import pytest

from localllm.attach.attached import AttachedEngine, ask_engine
from localllm.attach.messages import COMMANDS, REPLIES, Hello, ModelInfo, Ping, Wrote
from localllm.engine.config import EngineConfig
from localllm.errors import LocalLLMError, RequestError
from localllm.hub.checkpoint import find_model
from localllm.process.messages import Failed
from localllm.schedule.sampling_params import SamplingParams
from localllm.text.prompt import Prompt
from localllm.untrusted.messages import OpenTexts, TokenCount
from localllm.untrusted.worker import StoppedError, Worker

NONSENSE = b"\x00\x00\x00\x01\xc1"
MODEL = ModelInfo("pocket", 128, "nothing", 1, None, 0.0)


@pytest.fixture
def channels() -> tuple[socket.socket, socket.socket]:
    return socket.socketpair()


@pytest.mark.parametrize("answer", [NONSENSE, COMMANDS.pack(Ping(1)), b""])
def test_an_engine_that_is_not_understood_is_none(answer: bytes, tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "an.engine"))
        listener.listen()

        def reply() -> None:
            channel, _ = listener.accept()
            with channel:
                channel.recv(1 << 16)
                channel.sendall(answer)

        thread = threading.Thread(target=reply)
        thread.start()
        assert ask_engine(tmp_path / "an.engine", Hello()) is None
        thread.join()


def test_nonsense_in_the_middle_ends_the_request_with_an_error(
    channels: tuple[socket.socket, socket.socket],
) -> None:
    ours, theirs = channels
    engine = AttachedEngine(ours, MODEL, find_model("pocket", EngineConfig()))
    theirs.sendall(NONSENSE)
    with pytest.raises(LocalLLMError, match="cannot be read"):
        engine.submit(Prompt([1]), SamplingParams())


def test_a_prompt_that_is_answered_by_something_else_is_refused(
    channels: tuple[socket.socket, socket.socket],
) -> None:
    ours, theirs = channels
    engine = AttachedEngine(ours, MODEL, find_model("pocket", EngineConfig()))
    refusal = RequestError("no", param="prompt", hint="another")
    theirs.sendall(REPLIES.pack(Wrote(0, TokenCount(3))) + REPLIES.pack(Wrote(1, Failed(refusal))))
    with pytest.raises(RequestError, match="could not be encoded") as found:
        engine.tokenizer.encode("text", add_special_tokens=True)
    assert found.value.where == "its process sent an unexpected reply"
    with pytest.raises(RequestError, match="no") as told:
        engine.tokenizer.encode("text", add_special_tokens=True)
    assert (told.value.param, told.value.hint) == ("prompt", "another")


def test_a_worker_that_is_not_understood_is_stopped(
    channels: tuple[socket.socket, socket.socket],
) -> None:
    ours, theirs = channels
    ours.settimeout(0.1)
    worker = Worker(OpenTexts("nowhere", None, 0))
    worker._channel = ours
    theirs.sendall(NONSENSE)
    with pytest.raises(StoppedError, match="unexpected reply"):
        worker._receive(time.monotonic() + 5, 5.0)
    assert worker._channel is None
