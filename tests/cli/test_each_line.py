"""`chat --each-line`: a line of stdout for each line of stdin, whatever is in them."""

import io
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from localllm.attach import remote_side_by_side
from localllm.cli.chat.each_line import in_one_line
from localllm.cli.input import input_lines
from localllm.cli.input.input_lines import InputLines
from localllm.errors import ExitCode

ROOT = Path(__file__).parents[2]
Run = Callable[..., Any]
FLAGS = ("-n", "6", "--temp", "1", "--seed", "5")


@pytest.fixture
def model(make_checkpoint: Callable[..., Path]) -> str:
    return str(make_checkpoint())


def rows(out: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in out.splitlines()]


def test_each_line_is_answered_as_by_a_command_of_its_own(localllm: Run, model: str) -> None:
    """Line N has the seed S + N - 1, whatever else is in the batch and however many are skipped."""
    lines = ["one", "two and more", "three", "four", "five"]
    flags = ("chat", model, "and then", *FLAGS[:-1])
    alone = [
        json.loads(localllm(*flags, str(5 + i), "--json", stdin=f"{line}\n".encode()).out)
        for i, line in enumerate(lines)
    ]
    piped = "\n".join(lines).encode()
    together = localllm(*flags, "5", "--json", "--each-line", stdin=piped)
    assert together.code == 0, together.err
    found = rows(together.out)
    assert [(row["line"], row["input"]) for row in found] == list(enumerate(lines, 1))
    for row, one in zip(found, alone, strict=True):
        for name in ("text", "finish_reason", "model"):
            assert row[name] == one[name]
        assert row["usage"]["prompt_tokens"] == one["usage"]["prompt_tokens"]
    as_text = localllm(*flags, "5", "--each-line", "--max-num-seqs", "2", stdin=piped)
    assert as_text.out.split("\n") == [*(in_one_line(one["text"]) for one in alone), ""]
    rest = localllm(*flags, "5", "--each-line", "--skip", "3", stdin=piped)
    assert rest.out.splitlines() == as_text.out.splitlines()[3:]


def test_a_line_that_fails_leaves_the_others(localllm: Run, model: str) -> None:
    long = json.dumps({"id": 7, "text": "many words " * 200})
    lines = [
        '\ufeff{"id": "a", "text": "one"}\r',
        "",
        "no JSON",
        "[1]",
        '{"id": "b", "text": 5}',
        long,
        '{"text": "last"}',
    ]
    flags = ("chat", "-m", model, "--each-line", "--field", "text", "--ctx", "128", *FLAGS)
    found = localllm(*flags, "--json", stdin="\n".join(lines).encode())
    assert found.code == ExitCode.FAILURE
    described = rows(found.out)
    assert [row["line"] for row in described] == [1, 2, 3, 4, 5, 6, 7]
    assert [row.get("id") for row in described] == ["a", None, None, None, None, 7, None]
    assert [row["line"] for row in described if "error" in row] == [3, 4, 5, 6]
    assert described[1] == {"line": 2, "input": "", "text": ""}
    assert described[6]["input"] == "last"
    for number in (3, 4, 5, 6):
        assert f"error: line {number}: " in found.err
    assert "4 of 7 lines failed" in found.err
    as_text = localllm(*flags, stdin="\n".join(lines).encode()).out.split("\n")
    assert [not line for line in as_text] == [False, *[True] * 5, False, True]


@pytest.mark.parametrize(
    "flags",
    [
        ("--each-line", "--stream-json"),
        ("--each-line", "--extract-code"),
        ("--each-line", "--why"),
        ("--each-line", "--continue"),
        ("--each-line", "--skip", "-1"),
        ("--skip", "1"),
        ("--field", "text"),
    ],
)
def test_what_cannot_be_combined_is_refused(localllm: Run, flags: tuple[str, ...]) -> None:
    outcome = localllm("chat", *flags, "-n", "1", stdin=b"hi\n")
    assert outcome.code == ExitCode.USAGE
    assert flags[-1 if len(flags) == 2 and flags[0] == "--each-line" else -2] in outcome.err
    assert not outcome.out


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("a\nb", "a b"),
        (" a \r\n\n  b\n", "a b"),
        ("a\u2028b\x0bc\x0cd\x85e\x1cf", "a b c d e f"),
        ("", ""),
        ('{\n  "a": 1\n}', '{ "a": 1 }'),
    ],
)
def test_an_answer_takes_one_line(text: str, line: str) -> None:
    assert in_one_line(text) == line


def test_a_form_holds_for_each_line(localllm: Run, model: str) -> None:
    flags = ("chat", model, "a digit", "--each-line", "--regex", "[0-9]{2}", "--greedy")
    found = localllm(*flags, stdin=b"one\ntwo\n")
    assert found.code == 0, found.err
    assert all(len(line) == 2 and line.isdigit() for line in found.out.splitlines())
    schema = '{"type": "object", "properties": {"name": {"type": "string"}}}'
    cut = localllm("chat", model, "--each-line", "--json-schema", schema, "-n", "1", stdin=b"x\n")
    assert (cut.code, cut.out) == (ExitCode.FAILURE, "\n")
    assert "error: line 1: " in cut.err


def test_no_lines_give_no_output(localllm: Run, model: str) -> None:
    assert localllm("chat", model, "--each-line", stdin=b"").code == 0
    past = localllm("chat", model, "--each-line", "--skip", "9", stdin=b"a\nb\n")
    assert (past.code, past.out) == (0, "")
    assert "leaves out all 2 lines" in past.err


class _Endless(io.RawIOBase):
    """Lines without end; it counts what is read."""

    def __init__(self) -> None:
        self.num_read = 0

    def read(self, size: int = -1) -> bytes:
        self.num_read += 1
        return b"a line\n" * 1000


def test_an_input_without_end_is_read_no_further_than_needed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    endless = _Endless()
    monkeypatch.setattr(input_lines, "_unbuffered_stdin", lambda: endless)
    lines = InputLines(None, 2500)
    first = lines.take(10.0)
    assert first is not None
    assert (first.number, first.text, first.end) == (2501, "a line", 2501 * 7)
    time.sleep(0.1)
    assert endless.num_read == 3


def test_a_line_that_is_too_long_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(input_lines, "MAX_LINE_BYTES", 100)
    long = b"x" * 300_000
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(long + b"\nshort\n\xff\n")))
    lines = InputLines(None, 0)
    found = [lines.take(10.0) for _ in range(4)]
    assert [None if line is None else (line.text, line.error is None) for line in found] == [
        ("", False),
        ("short", True),
        ("\ufffd", True),
        None,
    ]
    assert lines.is_over


def start(*flags: str, **changes: Any) -> "subprocess.Popen[bytes]":
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}"}
    command = [sys.executable, "-m", "localllm", "chat", *flags]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, env=environment, **{**pipes, **changes})


def test_a_line_is_answered_before_the_next_one_comes_and_ctrl_c_says_how_to_go_on(
    model: str,
) -> None:
    with start(model, "--each-line", "-n", "2", "--greedy") as process:
        assert process.stdin is not None
        assert process.stdout is not None
        for _ in range(2):
            process.stdin.write(b"a line\n")
            process.stdin.flush()
            assert process.stdout.readline().endswith(b"\n")
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    assert process.returncode == ExitCode.SIGINT
    assert b"--skip 2 goes on" in err


def test_a_closed_pipe_ends_it_silently(model: str) -> None:
    with start(model, "--each-line", "-n", "2", "--ignore-eos") as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(b"a line\n" * 500)
        process.stdin.flush()
        process.stdout.readline()
        process.stdout.close()
        process.wait(60)
        assert process.stderr is not None
        err = process.stderr.read()
        process.stdin.close()
    assert process.returncode == ExitCode.CLOSED_PIPE
    assert b"error" not in err
    assert b"--skip" not in err


class _Echo(BaseHTTPRequestHandler):
    """Says the first word of a question; `busy` once; 400 for `bad`; the first one comes last."""

    def log_message(self, *words: object) -> None:
        pass

    def do_GET(self) -> None:
        self._reply(200, json.dumps({"data": [{"id": "small"}]}), "application/json")

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        word = asked["messages"][-1]["content"].split()[0]
        server: Any = self.server
        with server.lock:
            server.asked.append((word, asked.get("seed")))
            is_first_time = server.asked.count((word, asked.get("seed"))) == 1
        if word == "bad" or (word == "busy" and is_first_time):
            told = {"error": {"message": f"{word} it is"}}
            self._reply(400 if word == "bad" else 429, json.dumps(told), "application/json")
            return
        if word == "slow":
            server.others.wait(30)
        chunk = {"choices": [{"delta": {"content": f"{word}\nsaid"}, "finish_reason": "stop"}]}
        self._reply(200, f"data: {json.dumps(chunk)}\n\ndata: [DONE]\n\n", "text/event-stream")
        if word == "last":
            server.others.set()

    def _reply(self, status: int, body: str, kind: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body.encode())


@pytest.fixture
def echo() -> Iterator[Any]:
    server: Any = ThreadingHTTPServer(("127.0.0.1", 0), _Echo)
    server.lock, server.others, server.asked = threading.Lock(), threading.Event(), []
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def test_a_server_is_asked_side_by_side(
    localllm: Run, echo: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_side_by_side, "_PAUSES_S", (0.01, 0.01))
    url = f"http://127.0.0.1:{echo.server_address[1]}/v1"
    flags = ("chat", "--remote", url, "and?", "--each-line", "--seed", "3")
    found = localllm(*flags, stdin=b"slow\nbad\nbusy\n\nlast\n")
    assert found.out == "slow said\n\nbusy said\n\nlast said\n"
    assert found.code == ExitCode.FAILURE
    assert "line 2: the server refuses: bad it is" in found.err
    assert sorted(set(echo.asked)) == [("bad", 4), ("busy", 5), ("last", 7), ("slow", 3)]


def test_a_server_that_is_gone_ends_the_run_and_says_how_to_go_on(
    localllm: Run, echo: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"http://127.0.0.1:{echo.server_address[1]}"
    ask = remote_side_by_side.OnServer._ask

    def ask_once_gone(self: Any, answering: Any, asked: Any, params: Any) -> None:
        if asked.messages[-1]["content"].startswith("gone"):
            echo.shutdown()
            echo.server_close()
        ask(self, answering, asked, params)

    monkeypatch.setattr(remote_side_by_side.OnServer, "_ask", ask_once_gone)
    flags = ("chat", "--remote", url, "--each-line", "--max-num-seqs", "1")
    found = localllm(*flags, stdin=b"one\ngone\nthree\n")
    assert (found.code, found.out) == (ExitCode.NETWORK, "one said\n")
    assert "--skip 1 goes on" in found.err
