"""A question is on disk before it is asked, so that who is killed then finds it again."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fork_server import PATHS
from small_server import SmallServer, say_nothing, small_server
from window import Window

from localllm.chat.store import SessionStore
from localllm.chat.transcript import Transcript, Turn
from localllm.errors import ExitCode, LocalLLMError
from localllm.schedule.request import FinishReason
from localllm.user.places import sessions_file

Run = Callable[..., Any]
ANSWERED = Turn("How are you?", "small", "Fine.", "", FinishReason.STOP, (1,))


@pytest.fixture
def server() -> Iterator[SmallServer]:
    with small_server() as running:
        yield running


def questions(name: str) -> list[str]:
    store = SessionStore(sessions_file())
    found = [turn.question for turn in store.get(name).transcript.turns]
    store.close()
    return found


@pytest.fixture
def silent_server() -> Iterator[SmallServer]:
    """One that is asked and says nothing."""

    with small_server({"/v1/chat/completions": say_nothing}) as running:
        yield running


def test_a_question_is_on_disk_before_it_is_asked(
    localllm: Run, server: SmallServer, silent_server: SmallServer
) -> None:
    command = ["chat", "--remote", silent_server.url, "--session", "talk", "Is it?"]
    process = subprocess.Popen(
        [sys.executable, "-m", "localllm", *command],
        env={**os.environ, "PYTHONPATH": PATHS},
        stdin=subprocess.DEVNULL,
    )
    silent_server.wait_until_asked()
    process.kill()
    process.wait()
    assert questions("talk") == ["Is it?"]
    assert "Is it?" in localllm("sessions", "show", "talk").out
    # Another one is told of it, and does not take its place; the server never sees both.
    outcome = localllm("chat", "--remote", server.url, "--continue", "Was it?")
    assert outcome.code == 0
    assert "not answered: Is it?" in outcome.err
    assert questions("talk") == ["Is it?", "Was it?"]
    [asked] = [asked for asked in server.asked if asked.startswith(b"POST")]
    assert b"Was it?" in asked
    assert b"Is it?" not in asked


def test_a_conversation_is_called_by_its_question_rather_than_by_a_file(
    server: SmallServer, localllm: Run, tmp_path: Path
) -> None:
    (tmp_path / "a.txt").write_text("Once upon a time")
    asked = ("Who was it?", "-f", str(tmp_path / "a.txt"), "--session", "tale")
    assert localllm("chat", "--remote", server.url, *asked).code == 0
    assert questions("tale") == ["Once upon a time\n\nWho was it?"]
    assert [row.title for row in SessionStore(sessions_file()).rows()] == ["Who was it?"]


def test_a_question_of_a_conversation_is_on_disk_before_it_is_asked(
    silent_server: SmallServer, server: SmallServer, user_directories: Path
) -> None:
    command = ["-m", "localllm", "chat", "--remote", silent_server.url, "--session", "talk"]
    window = Window(command, 80, 30, user_directories)
    window.wait_for(r"\n> ?")
    window.say("Is it?")
    silent_server.wait_until_asked()
    window.close()
    assert questions("talk") == ["Is it?"]
    again = ["-m", "localllm", "chat", "--remote", server.url, "--session", "talk"]
    window = Window(again, 80, 30, user_directories)
    window.wait_for(r"not answered: Is it\?; /retry asks it")
    window.say("Was it?")
    window.wait_for(r"It is so\.")
    window.settle()
    window.close()
    assert questions("talk") == ["Is it?", "Was it?"]


def test_a_question_is_on_disk_while_its_model_is_loaded(
    localllm: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = SessionStore(sessions_file())
    store.create(Transcript("small", None, (ANSWERED,)), "talk")
    seen: list[list[str]] = []

    def load(*arguments: object, **options: object) -> None:
        seen.append(questions("talk"))
        raise LocalLLMError("no room for it")

    monkeypatch.setattr("localllm.cli.chat.request.open_noted", load)
    outcome = localllm("chat", "pocket", "Is it?", "--session", "talk")
    assert outcome.code == ExitCode.FAILURE
    assert seen == [["How are you?", "Is it?"]]
    # What was refused was not asked.
    assert questions("talk") == ["How are you?"]
    monkeypatch.setattr("localllm.cli.chat.request.open_noted", lambda *_, **__: load_new())

    def load_new() -> None:
        assert questions("new") == ["Is it?"]
        raise LocalLLMError("no room for it")

    assert localllm("chat", "pocket", "Is it?", "--session", "new").code == ExitCode.FAILURE
    assert store.find("new") is None
