"""Engines that stay for the next question: `chat --keepalive`, attaching, `ps`, `stop`."""

import json
import logging
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest
from server.conftest import ROOT, Server

from localllm.attach import kept
from localllm.attach.addresses import addresses, connect
from localllm.attach.attached import ask_engine, attach, start
from localllm.attach.kept import make_way
from localllm.attach.messages import (
    COMMANDS,
    REPLIES,
    Abort,
    EngineUse,
    Hello,
    KeepAlive,
    Open,
    Ping,
    Ready,
    Staying,
    Submit,
    Write,
)
from localllm.attach.started_process import StartedProcess
from localllm.cli.models.opening import open_noted
from localllm.engine.config import EngineConfig
from localllm.errors import ContextLengthError, LocalLLMError, RequestError
from localllm.hub.checkpoint import find_model, open_checkpoint
from localllm.schedule.sampling_params import SamplingParams
from localllm.text.prompt import Conversation, Prompt, Text
from localllm.untrusted.messages import EncodeChat

QUESTION = "What is the KV cache?"
ASK = ("chat", "pocket", "--greedy", "-n", "24")


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "localllm", *arguments]


def run(
    *arguments: str, stdin: str = QUESTION, timeout_s: float = 120
) -> "subprocess.CompletedProcess[str]":
    # Files, not pipes: an engine that stays must not keep what it was started with.
    return subprocess.run(
        command(*arguments), input=stdin, capture_output=True, text=True, timeout=timeout_s
    )


# An answer takes less than a second, so a test may come too late to see it.
TRIES = 5


def told(process: "subprocess.CompletedProcess[str]") -> list[str]:
    """What a command said, but for the line that it says where loading takes over two seconds."""
    return [line for line in process.stderr.splitlines() if not line.startswith("loading pocket, ")]


def engines() -> list[dict[str, Any]]:
    listed = run("ps", "--json", stdin="")
    assert listed.returncode == 0, listed.stderr
    return [json.loads(line) for line in listed.stdout.splitlines()]


def told_use(address: Path) -> EngineUse:
    answer = ask_engine(address, Hello())
    assert isinstance(answer, Ready)
    return answer.use


def wait_until(condition: Callable[[], bool], seconds: float = 20) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def is_alive(pid: int) -> bool:
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return status.rpartition(")")[2].split()[0] != "Z"


@pytest.fixture(scope="module")
def lasting(server_home: Path) -> Iterator[Path]:
    """Where an engine runs that no test of this file ends; to start one takes two seconds."""
    with tempfile.TemporaryDirectory(prefix="ll") as folder:
        homes = ("HOME", "XDG_CACHE_HOME", "XDG_CONFIG_HOME", "XDG_DATA_HOME")
        environment = {
            **os.environ,
            **dict.fromkeys(homes, str(server_home)),
            "XDG_RUNTIME_DIR": folder,
            "PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "kernels"))),
            "OMP_NUM_THREADS": "1",
        }
        asked = command(*ASK, "--keepalive", "-1", QUESTION)
        streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL}
        subprocess.run(asked, env=environment, check=True, timeout=120, **streams)
        yield Path(folder)
        listed = subprocess.run(
            command("ps", "--json"), env=environment, check=True, capture_output=True, text=True
        )
        for line in listed.stdout.splitlines():
            os.kill(json.loads(line)["pid"], signal.SIGKILL)


@pytest.fixture
def warm(
    path: None, lasting: Path, runtime_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    """The engine that lasts is there."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(lasting))
    yield
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime_directory))


@pytest.fixture(autouse=True)
def path(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((str(ROOT), str(ROOT / "kernels"))))
    monkeypatch.delenv("LOCALLLM_KEEPALIVE")
    yield
    for address in addresses():
        found = ask_engine(address, Hello())
        if isinstance(found, Ready):
            os.kill(found.model.pid, signal.SIGKILL)


def test_the_next_question_finds_the_engine(request: pytest.FixtureRequest) -> None:
    alone = run(*ASK, "--keepalive", "0")
    assert alone.returncode == 0
    assert engines() == []
    first = run(*ASK, "--keepalive", "5m", "--json")
    [engine] = engines()
    assert (engine["name"], engine["owner_pid"], engine["requests"]) == ("pocket", None, 0)
    assert 0 < engine["left_s"] <= 300
    request.getfixturevalue("fresh_processes")
    second = run(*ASK, "--json")
    described = [json.loads(each.stdout) for each in (first, second)]
    assert {each["text"] for each in described} == {alone.stdout.removesuffix("\n")}
    assert described[1]["usage"]["cached_tokens"] > 0
    # Nothing is loaded: torch's import alone takes longer.
    assert described[1]["timing"]["load_s"] < 0.5
    folder = addresses()[0].parent
    assert folder.stat().st_mode & 0o777 == 0o700
    assert addresses()[0].stat().st_mode & 0o077 == 0
    table = run("ps", stdin="").stdout.splitlines()
    assert table[0].split()[:2] == ["MODEL", "PID"]
    assert table[1].split()[:2] == ["pocket", str(engine["pid"])]
    stopped = run("stop", "pocket", stdin="")
    assert stopped.returncode == 0
    wait_until(lambda: not is_alive(engine["pid"]))
    assert engines() == []
    assert list(folder.glob("*.engine")) == []


def test_an_engine_that_took_long_to_load_stays_and_says_so_once(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    request.getfixturevalue("fresh_processes")
    first = run(*ASK)
    assert "pocket stays loaded for 5 minutes" in first.stderr
    [engine] = engines()
    assert 200 < engine["left_s"] <= 300
    assert told(run(*ASK)) == []
    monkeypatch.setenv("LOCALLLM_KEEPALIVE", "0")  # as a setting has it
    run(*ASK)
    wait_until(lambda: not is_alive(engine["pid"]))


def test_idle_engines_give_way_where_memory_is_short() -> None:
    run(*ASK, "--keepalive", "1m")
    assert make_way(1000, lambda: 1000) == []
    [engine] = engines()
    [address] = addresses()
    with closing(connect(address)):  # whoever is attached is not disturbed
        assert make_way(1001, lambda: 1000) == []
    wait_until(lambda: make_way(1001, lambda: 1000) == ["pocket"])
    wait_until(lambda: not is_alive(engine["pid"]))


def test_a_model_needs_its_weights_and_what_a_process_takes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[int] = []
    monkeypatch.setattr(kept, "make_way", lambda needed, free: asked.append(needed) or [])
    open_noted("pocket", EngineConfig(device="cpu"), is_conversation=True, keepalive_s=0.0).close()
    weights = find_model("pocket").folder / "model.safetensors"
    assert asked[0] - weights.stat().st_size > 350 << 20  # of the interpreter and torch alone


def test_a_process_that_was_started_ahead_becomes_the_engine_or_ends(
    monkeypatch: pytest.MonkeyPatch, runtime_directory: Path
) -> None:
    started: list[StartedProcess] = []

    class Noted(StartedProcess):
        def __init__(self) -> None:
            super().__init__()
            started.append(self)

    monkeypatch.setattr("localllm.attach.started_process.StartedProcess", Noted)
    monkeypatch.setattr("localllm.attach.attached.StartedProcess", None)  # none is started later
    with pytest.raises(LocalLLMError):
        open_noted(str(runtime_directory), EngineConfig(device="cpu"), is_conversation=True)
    [unused] = started
    assert unused._process.returncode is not None
    assert list(runtime_directory.rglob("*.log")) == []
    config = EngineConfig(device="cpu")
    open_noted("pocket", config, is_conversation=True, keepalive_s=60.0).close()
    [engine] = engines()
    assert engine["pid"] == started[1]._process.pid
    [address] = addresses()
    assert [log.stem for log in runtime_directory.rglob("*.log")] == [address.stem]
    # Where an engine runs it may be the right one: no process is started ahead.
    open_noted("pocket", config, is_conversation=True, keepalive_s=60.0).close()
    assert len(started) == 2


def test_an_engine_that_was_loaded_at_once_does_not_stay() -> None:
    start(find_model("pocket"), 300.0, logging.WARNING, least_load_s=1000.0).close()
    wait_until(lambda: engines() == [])


def test_two_at_once_leave_one_engine(runtime_directory: Path, fresh_processes: None) -> None:
    both = [
        subprocess.Popen(
            command(*ASK, "--keepalive", "-1", QUESTION),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
        )
        for _ in range(2)
    ]
    texts = {asking.communicate(timeout=60)[0] for asking in both}
    assert len(texts) == 1
    [engine] = engines()

    def others() -> list[int]:
        found = []
        for path in Path("/proc").glob("[0-9]*/environ"):
            with suppress(OSError):
                told = str(runtime_directory).encode() in path.read_bytes()
                if told and b"engine_process" in (path.parent / "cmdline").read_bytes():
                    found.append(int(path.parent.name))
        return [pid for pid in found if pid != engine["pid"] and is_alive(pid)]

    wait_until(lambda: not others())


def test_without_a_place_to_listen_the_model_is_loaded_here(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/proc/nowhere")
    answer = run(*ASK, "--keepalive", "1m")
    assert answer.returncode == 0
    assert "the engine cannot be kept running" in answer.stderr


def test_a_model_with_other_settings_takes_the_place_of_its_idle_engine() -> None:
    run(*ASK, "--keepalive", "1m")
    [first] = engines()
    run(*ASK, "--keepalive", "1m", "--kv-cache-dtype", "int8")
    [second] = engines()
    assert second["pid"] != first["pid"]
    run(*ASK, "-c", "512", "--keepalive", "0")  # finds it not, and leaves none
    assert [engine["pid"] for engine in engines()] == [second["pid"]]


def test_an_engine_waits_as_long_as_it_was_told_last() -> None:
    run(*ASK, "--keepalive", "-1")
    [engine] = engines()
    assert engine["left_s"] is None
    run(*ASK, "--keepalive", "1s")
    wait_until(lambda: not is_alive(engine["pid"]))
    run(*ASK, "--keepalive", "1m")
    [engine] = engines()
    run(*ASK, "--keepalive", "0")
    wait_until(lambda: not is_alive(engine["pid"]))


def test_what_is_wrong_is_told_as_without_it(tmp_path: Path, warm: None) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    for arguments in (
        ("chat", str(broken), "--keepalive", "1m"),
        (*ASK, "--device", "cuda", "--keepalive", "1m"),
    ):
        plain = [each for each in arguments if each not in ("--keepalive", "1m")]
        kept, alone = run(*arguments), run(*plain)
        assert kept.returncode == alone.returncode != 0
        assert told(kept) == told(alone)
        assert "Traceback" not in kept.stderr
    assert run(*ASK, "--keepalive", "soon").returncode == 2
    long = "word " * 5000
    attached = run(*ASK, stdin=long)
    assert attached.returncode == 8
    assert "context" in attached.stderr
    refused = run(*ASK, "--regex", "(a")
    assert refused.returncode == 2
    form = run("chat", "pocket", "--regex", "[0-9]{3}")
    assert form.stdout.strip().isdigit()


def ask_at_length() -> "subprocess.Popen[str]":
    """A command whose answer has begun; on a busy machine it may have ended too, see TRIES."""
    asking = subprocess.Popen(
        command("chat", "pocket", QUESTION, "-n", "1900", "--ignore-eos"),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert asking.stdout is not None
    asking.stdout.read(20)
    return asking


def test_an_engine_that_is_killed_is_told_and_replaced() -> None:
    for _ in range(TRIES):
        run(*ASK, "--keepalive", "1m")
        [engine] = engines()
        asking = ask_at_length()
        os.kill(engine["pid"], signal.SIGKILL)
        _, told = asking.communicate(timeout=30)
        if asking.returncode:
            break
    assert asking.returncode == 1
    assert "the engine has ended" in told
    again = run(*ASK, "--keepalive", "1m")  # over what the dead one left behind
    assert again.returncode == 0
    assert [each["pid"] for each in engines()] != [engine["pid"]]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_who_leaves_ends_only_his_own_request(number: signal.Signals, warm: None) -> None:
    [address] = addresses()
    for _ in range(TRIES):
        leaving = ask_at_length()
        # Asked from here: before another process could ask, the answer may have come to its end.
        use = told_use(address)
        if use.requests:
            break
        leaving.communicate(timeout=30)
    assert use.requests == 1
    assert use.is_used
    beside = run(*ASK)
    assert beside.returncode == 0
    leaving.send_signal(number)
    leaving.communicate(timeout=30)
    wait_until(lambda: told_use(address).requests == 0)


def test_nonsense_on_the_socket_hurts_nobody(warm: None) -> None:
    [address] = addresses()
    valid = COMMANDS.pack(Ping(7))
    for message in (
        b"\xff" * 64,
        valid[:-1] + b"\xc1",
        REPLIES.pack(Staying()),  # no command
        COMMANDS.pack(Abort([])),  # type: ignore[arg-type]
        COMMANDS.pack(Ping(-1)),
        COMMANDS.pack(KeepAlive("long")),  # type: ignore[arg-type]
        COMMANDS.pack(KeepAlive(1e300)),
        COMMANDS.pack(Open("pocket", "", EngineConfig(), 0, None, None)),
        COMMANDS.pack(Submit(1, Prompt([1]), SamplingParams(), bytes(65))),
        COMMANDS.pack(Write(1, EncodeChat(b"[[["))),
        b"\x00\x00\x00\x04\x81\x91\x01\x01",  # a map whose key is a list
    ):
        channel = connect(address)
        assert channel is not None
        channel.sendall(message)
        channel.settimeout(1)
        with channel, suppress(TimeoutError, ConnectionError):
            channel.recv(1)
    assert run(*ASK).returncode == 0
    assert len(engines()) == 1


def test_a_folder_that_is_open_to_others_is_not_used(runtime_directory: Path) -> None:
    folder = runtime_directory / "localllm"
    folder.mkdir(mode=0o777)
    folder.chmod(0o777)
    kept = run(*ASK, "--keepalive", "1m")
    assert kept.returncode == 0  # it answers, and ends when it is not needed
    assert list(folder.glob("*.engine")) == []
    # Somebody else's socket in the right place is not talked to.
    with socket.socket(socket.AF_UNIX) as listener:
        for address in folder.glob("*"):
            address.unlink()
        listener.bind(str(folder / "0123456789abcdef.engine"))
        listener.listen()
        assert engines() == []


def test_a_server_lends_its_engine(
    serve: Callable[..., Server], server_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = serve()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(server_home / "run"))
    client = server.client()
    expected = client.chat.completions.create(
        model="pocket",
        messages=[{"role": "user", "content": QUESTION}],
        temperature=0,
        max_tokens=24,
    )
    answer = run(*ASK, "--json")
    described = json.loads(answer.stdout)
    assert described["text"] == expected.choices[0].message.content
    assert described["usage"]["cached_tokens"] > 0
    served = [each for each in engines() if each["owner_pid"] == server.process.pid]
    assert len(served) == 1
    refused = run("stop", "pocket", stdin="")
    assert refused.returncode == 1
    assert str(server.process.pid) in refused.stderr
    assert client.models.list().data


def test_who_attaches_has_the_engine_write_the_prompts(warm: None) -> None:
    attached = attach(find_model("pocket", EngineConfig()))
    assert attached is not None
    own = open_checkpoint().tokenizer
    messages = [{"role": "user", "content": "What is <|im_end|>?"}]
    assert attached.prompts.write(Conversation(messages)) == own.encode_chat(Conversation(messages))
    assert attached.prompts.write(Text("So:")).token_ids == own.encode(
        "So:", add_special_tokens=True
    )
    with pytest.raises(RequestError, match="not valid Unicode"):
        attached.prompts.write(Text("\ud800"))
    with pytest.raises(ContextLengthError):
        attached.prompts.write(Text("word " * 100_000))
    params = attached.sampling_params(max_tokens=8)
    completion, events = attached.ask(Conversation(messages), params)
    assert len(list(events)) >= 8
    assert completion.num_generated_tokens == 8
    assert "_backend" not in vars(attached.tokenizer)  # no vocabulary was read here
    attached.close()
