"""`chat --remote`: the same command, with the model at a server."""

import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
from server.conftest import ROOT, Server
from small_server import SmallServer, models, reply, say_nothing, small_server, stream
from window import Window

Run = Callable[..., Any]
CHUNKS = [
    {"choices": [{"index": 0, "delta": {"content": "It is "}, "finish_reason": None}]},
    {"choices": [{"index": 0, "delta": {"content": "so."}, "finish_reason": None}]},
    {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]},
]
ASK = ("chat", "What is the KV cache?", "-n", "24")


@pytest.fixture
def localllm(monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{ROOT / 'kernels'}")

    def run(*arguments: str, stdin: str = "") -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            [sys.executable, "-m", "localllm", *arguments],
            input=stdin,
            capture_output=True,
            text=True,
            timeout=120,
        )

    return run


def test_a_server_answers_as_the_model_here(localllm: Run, server: Server) -> None:
    here = localllm(*ASK, "-m", "pocket", "--greedy")
    there = localllm(*ASK, "--remote", server.url, "--greedy")
    assert there.stdout == here.stdout
    assert there.returncode == 0
    described = json.loads(localllm(*ASK, "--remote", f"{server.url}/v1", "--json").stdout)
    assert described["model"] == "pocket"
    assert described["finish_reason"] == "length"
    assert described["usage"]["prompt_tokens"] > 10
    assert described["usage"]["drafted_tokens"] is None  # which the server does not tell
    told = localllm(*ASK, "--remote", server.url, "--why").stderr
    assert "from the server's cache" in told
    assert "only the server knows" in told
    raw = ("chat", "--raw", "Once upon a time", "-n", "12", "--greedy")
    assert localllm(*raw, "--remote", server.url).stdout == localllm(*raw, "-m", "pocket").stdout
    piped = localllm("chat", "--remote", server.url, "-s", "Be brief.", stdin="Hello")
    assert piped.returncode == 0
    seeded = [localllm(*ASK, "--remote", server.url, "--seed", "4").stdout for _ in range(2)]
    assert seeded[0] == seeded[1]


def test_forms_are_asked_for_there(localllm: Run, server: Server) -> None:
    answer = localllm(*ASK, "--remote", server.url, "--regex", "[0-9]{3}")
    assert answer.stdout.strip().isdigit()
    schema = '{"enum": ["red", "blue"]}'
    answer = localllm(*ASK, "--remote", server.url, "--json-schema", schema)
    assert json.loads(answer.stdout) in ("red", "blue")


def test_what_a_server_refuses_has_its_exit_code(
    localllm: Run, server: Server, serve: Callable[..., Server]
) -> None:
    cases = [
        (("--remote", "http://127.0.0.1:9"), 4, "cannot be reached"),
        (("--remote", "ftp://x"), 2, "must be like"),
        (("--remote", server.url, "-m", "other"), 3, "it has pocket"),
        (("--remote", server.url, "--logprobs", "1", "--json"), 2, "cannot be combined"),
        (("--remote", serve("--api-key", "secret").url), 3, "--api-key"),
    ]
    for flags, code, said in cases:
        answer = localllm(*ASK, *flags)
        assert (answer.returncode, answer.stdout) == (code, ""), answer.stderr
        assert said in answer.stderr
        assert "Traceback" not in answer.stderr
    long = localllm("chat", "--remote", server.url, stdin="word " * 5000)
    assert long.returncode == 8


def test_ctrl_c_ends_the_answer_there(localllm: Run, server: Server) -> None:
    asking = subprocess.Popen(
        [
            *(sys.executable, "-m", "localllm", "chat", "--remote", server.url),
            *("Go on.", "-n", "1900", "--ignore-eos"),
        ],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
    )
    assert asking.stdout is not None
    asking.stdout.read(20)
    asking.send_signal(signal.SIGINT)
    asking.communicate(timeout=30)
    assert asking.returncode == 130
    deadline = time.monotonic() + 20
    while httpx.get(f"{server.url}/health").json()["load"]["running"]:
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_a_conversation_with_a_server(server: Server, tmp_path: Path) -> None:
    command = ["-m", "localllm", "chat", "--remote", server.url, "--greedy", "-n", "12"]
    window = Window(command, 80, 30, tmp_path / "data")
    window.wait_for(r"\n> ?")
    window.say("Hello!")
    window.wait_for(r"Hello!(.|\n)*first token")
    window.say("/why")
    window.say("/regen")
    window.say("/continue")
    screen = window.wait_for(r"cannot be continued|is complete")
    assert "Traceback" not in screen
    window.say("/exit")
    assert window.exit_code() == 0


@pytest.fixture
def plain_server() -> Iterator[str]:
    """A server that streams, and counts no tokens; its address."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._send(json.dumps({"data": [{"id": "plain"}]}), "application/json")

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            lines = [json.dumps(chunk) for chunk in CHUNKS] + ["[DONE]"]
            self._send("".join(f"data: {line}\n\n" for line in lines), "text/event-stream")

        def _send(self, text: str, kind: str) -> None:
            self.send_response(200)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *arguments: object) -> None:
            pass

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=http.serve_forever, args=(0.01,), daemon=True).start()
    yield f"http://127.0.0.1:{http.server_port}"
    http.shutdown()
    http.server_close()


def test_figures_that_a_server_does_not_send_are_not_made_up(
    plain_server: str, tmp_path: Path
) -> None:
    command = ["-m", "localllm", "chat", "--remote", plain_server]
    window = Window(command, 80, 30, tmp_path / "data")
    window.wait_for(r"\n> ?")
    window.say("Is it?")
    screen = window.wait_for(r"It is so\.(.|\n)*the server reports no\s+token\s+counts")
    assert "prompt 0" not in screen
    assert "context" not in screen.rpartition("It is so.")[2]
    window.say("/stats")
    window.wait_for("prompt tokens +not reported")
    window.say("/why")
    window.wait_for("only the server knows why")
    window.say("/model")
    window.wait_for("plain, context unknown")
    window.say("/exit")
    assert window.exit_code() == 0


def test_an_answer_that_has_not_the_form_asked_for_is_a_failure(
    localllm: Run, plain_server: str
) -> None:
    asked = ("chat", "--remote", plain_server, "Is it?")
    assert localllm(*asked, "--regex", "It is .*").returncode == 0
    for form in (("--regex", "[0-9]+"), ("--format", "json")):
        outcome = localllm(*asked, *form)
        assert outcome.returncode == 1
        assert "does not match the requested format" in outcome.stderr


@pytest.fixture
def silent_server() -> Iterator[SmallServer]:
    """One that takes a question and says nothing."""

    with small_server({"/v1/chat/completions": say_nothing}) as running:
        yield running


def test_ctrl_c_ends_the_wait_for_a_server_that_says_nothing(
    localllm: Run, silent_server: SmallServer, tmp_path: Path
) -> None:
    asking = subprocess.Popen(
        [sys.executable, "-m", "localllm", "chat", "--remote", silent_server.url, "Is it?"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    silent_server.wait_until_asked()
    began = time.monotonic()
    asking.send_signal(signal.SIGINT)
    _, errors = asking.communicate(timeout=30)
    assert time.monotonic() - began < 1
    assert asking.returncode == 130
    assert b"Traceback" not in errors
    silent_server.asked.clear()
    command = ["-m", "localllm", "chat", "--remote", silent_server.url]
    window = Window(command, 80, 30, tmp_path / "data")
    window.wait_for(r"\n> ?")
    window.say("Is it?")
    silent_server.wait_until_asked()
    window.send("\x03")
    window.wait_for(r"interrupted\n+> ?", seconds=5)
    window.say("/exit")
    assert window.exit_code() == 0


# A window's title, the clipboard, and the sequence introducer of one character.
EVIL = "\x1b]0;evil\x07\x1b]52;c;ZXZpbA==\x07\x9b2J"
SHOWN = "␛]0;evil␇␛]52;c;ZXZpbA==␇"


def test_what_a_server_sends_never_reaches_the_terminal_as_commands(
    localllm: Run, tmp_path: Path
) -> None:
    name = f"small{EVIL}"
    answers = iter(
        [
            stream(
                {"choices": [{"delta": {"reasoning_content": f"Let me see.{EVIL}\n"}}]},
                {"choices": [{"delta": {"content": f"So **it** is.{EVIL}"}}]},
                {"choices": [{"delta": {}, "finish_reason": "stop"}]},
            ),
            stream({"error": {"message": f"first{EVIL}"}}),
            reply(json.dumps({"error": {"message": f"second{EVIL}"}}).encode(), "400 No"),
        ]
    )
    hostile: dict[str, Any] = {
        "/v1/models": models({"data": [{"id": name}]}),
        "/v1/chat/completions": lambda: [next(answers)],
    }
    with small_server(hostile) as server:
        command = ["-m", "localllm", "chat", "--remote", server.url]
        window = Window(command, 100, 50, tmp_path / "data", tells_cursor=True)
        window.wait_for(r"\n> ?")
        window.say("/think show")
        window.wait_for("thinking: the model's default")
        window.say("Is it?")
        window.wait_for(r"whole answer")
        for word in ("first", "second"):
            window.say(f"{word}?")
            window.wait_for(f"error: the server refuses: {word}␛")
        window.say("/model")
        window.wait_for("context unknown")
        window.say("/sessions")
        window.say("/exit")
        assert window.exit_code() == 0
        drawn = window.written
        assert drawn.count(SHOWN.encode()) >= 6
        for command_bytes in (b"\x1b]0;", b"\x1b]52", b"\xc2\x9b"):
            assert command_bytes not in drawn
        refused = localllm("chat", "--remote", server.url, "-m", "other", "Is it?")
        assert refused.returncode == 3
        assert f"it has small{SHOWN}" in refused.stderr
        assert "\x1b" not in refused.stderr + refused.stdout
