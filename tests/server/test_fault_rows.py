"""Rows of the table of faults that concern a server; the others' tests stand in their own files.

22 a step without memory: here, and tests/engine/test_step_faults.py
23 a full KV cache: tests/properties/test_exactness.py (preemption), test_soak.py
24 an engine that dies or hangs: test_server_faults.py, and here
25 a prompt that is too long: test_openai_client.py
30 grammars that are bombs: tests/answer/test_grammar.py, test_structured.py
31 clients that leave: test_server_faults.py
34, 35 an open address, a port in use: tests/cli/test_serve.py
"""

import asyncio
import json
import os
import signal
import socket
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from openai import OpenAI
from server.conftest import ROOT, Server
from server.test_server_faults import CHAT, assert_refused, golden, load_at_rest

from localllm.attach import engine_client
from localllm.attach.engine_client import EngineClient, EngineDownError
from localllm.attach.messages import EngineUse, ModelInfo, Pong, Ready, Stats
from localllm.engine.config import EngineConfig
from localllm.errors import LocalLLMError, StepMemoryError
from localllm.schedule.sampling_params import SamplingParams
from localllm.server.limits import LIMITS
from localllm.server.refusals import refusal_of
from localllm.text.prompt import Prompt

QUESTION = [{"role": "user", "content": "What is the KV cache?"}]


def connect(server: Server) -> socket.socket:
    address = urlsplit(server.url)
    return socket.create_connection((address.hostname, address.port), timeout=60)


def raw(server: Server, request: bytes) -> tuple[int, dict[str, Any]]:
    """Status and error of a request as it is written here."""
    with connect(server) as connection:
        connection.sendall(request)
        answer = b""
        while data := connection.recv(1 << 16):
            answer += data
    head, _, body = answer.partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(body)["error"]


def post(path: str, body: bytes, *headers: str) -> bytes:
    known = ("Host: localhost", "Content-Type: application/json", "Connection: close")
    lines = (f"POST {path} HTTP/1.1", *known, *headers)
    return "\r\n".join((*lines, "", "")).encode() + body


def second_request_that_never_ends(server: Server) -> int:
    """Behind one that was whole, on the same connection; the status that it gets."""
    with connect(server) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert b"200 OK" in connection.recv(1 << 16)
        connection.sendall(b"GET /hea")
        rest = b""
        while data := connection.recv(1 << 16):
            rest += data
        return int(rest.partition(b"HTTP/1.1 ")[2].split()[0])


def start_stream(server: Server, **body: Any) -> socket.socket:
    """A long stream that nobody reads yet."""
    asked = {"prompt": "Once", "max_tokens": 1900, "ignore_eos": True, "stream": True, **body}
    content = json.dumps(asked).encode()
    connection = connect(server)
    connection.sendall(post("/v1/completions", content, f"Content-Length: {len(content)}"))
    return connection


def test_row_22_a_step_without_memory_is_told_as_the_servers_fault() -> None:
    refusal = refusal_of(StepMemoryError("memory ran out in a step of this request"))
    assert (refusal.status, refusal.code) == (503, "out_of_memory")


def test_row_24_an_engine_that_hangs_is_replaced(
    server_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(server_home))
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{ROOT / 'kernels'}")

    async def run() -> None:
        engine = EngineClient("pocket", EngineConfig(), 8, 30, hangs_s=3.0)
        await engine.start()
        params = SamplingParams(max_tokens=1900, ignore_eos=True)
        stream = engine.submit(Prompt([5, 6, 7]), params)
        events = aiter(stream)
        await anext(events)
        os.kill(engine_pid(), signal.SIGSTOP)
        began = time.monotonic()
        ended: LocalLLMError | None = None
        while ended is None:
            try:
                await anext(events)
            except EngineDownError as error:
                ended = error
        assert "ended during request" in ended.message
        assert time.monotonic() - began < 20
        assert engine.state != "ready"
        while engine.state != "ready":
            await asyncio.sleep(0.05)
        again = [event async for event in engine.submit(Prompt([5]), SamplingParams(max_tokens=2))]
        assert again[-1].finish_reason is not None
        assert engine.num_restarts == 1
        await engine.stop()

    asyncio.run(asyncio.wait_for(run(), 120))


def test_an_engine_that_does_not_answer_is_called_unhealthy(
    server_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(server_home))
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{ROOT / 'kernels'}")
    monkeypatch.setattr(engine_client, "UNRESPONSIVE_S", 1.0)
    monkeypatch.setattr(engine_client, "PING_S", 0.2)

    async def run() -> None:
        engine = EngineClient("pocket", EngineConfig(), 8, 30)
        info = await engine.start()
        assert info.context_length
        os.kill(engine_pid(), signal.SIGSTOP)
        while engine.state != "unresponsive":
            await asyncio.sleep(0.02)
        os.kill(engine_pid(), signal.SIGCONT)
        while engine.state != "ready":
            await asyncio.sleep(0.02)
        await engine.stop()

    asyncio.run(asyncio.wait_for(run(), 60))


def test_a_step_that_takes_long_is_told_from_one_that_compiles() -> None:
    engine = EngineClient("pocket", EngineConfig(), 8, 30)
    engine._take(Ready(ModelInfo("x", 9, "", 1, None, 0.0), EngineUse(0, False, None, 0)))
    stats = Stats(running=1, waiting=0, used_blocks=1, blocks=2, preemptions=0)
    for busy_s, is_compiling, state in (
        (0.0, False, "ready"),
        (9.0, False, "ready"),
        (11.0, False, "unresponsive"),
        (11.0, True, "compiling"),
    ):
        engine._heard_s = time.monotonic()
        engine._take(Pong(0, stats, busy_s, is_compiling))
        assert engine.state == state


def engine_pid() -> int:
    """The engine's process, which this one started."""
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    [pid] = [
        int(child)
        for child in children
        if b"engine_process" in Path(f"/proc/{child}/cmdline").read_bytes()
    ]
    return pid


@pytest.mark.parametrize(
    ("param", "value"),
    [
        *(("n", value) for value in (0, 9, -1, 1.5, "2", 10**30)),
        *(("max_tokens", value) for value in (-2, 1.5, "9", 10**18)),
        *(("temperature", value) for value in (-0.1, 101, "hot", [])),
        *(("top_p", value) for value in (-0.1, 1.1)),
        *(("seed", value) for value in (1 << 70, 0.5)),
        *(("presence_penalty", value) for value in (2.1, -2.1)),
        *(("stop", value) for value in ("", ["a"] * 65, "x" * 257, [1])),
        *(("logit_bias", value) for value in ({"a": 1}, {"5": 101}, {"-1": 1}, {"99999": 1})),
    ],
)
def test_row_26_what_is_out_of_range_is_named(server: Server, param: str, value: Any) -> None:
    for path in (CHAT, "/v1/completions"):
        body = {"messages": QUESTION, "prompt": "a", "max_tokens": 1, param: value}
        error = assert_refused(httpx.post(server.url + path, json=body), 400)
        assert error["param"] == param
    nan = b'{"prompt": "a", "temperature": NaN}'
    response = httpx.post(
        f"{server.url}/v1/completions", content=nan, headers={"content-type": "application/json"}
    )
    assert_refused(response, 400)


@pytest.mark.parametrize("number", ["NaN", "-Infinity", "1e999", f"{'9' * 400}.0"])
def test_row_26_what_a_schema_says_is_finite(server: Server, number: str) -> None:
    tool = f'{{"type": "function", "name": "f", "parameters": {{"type": {number}}}}}'
    body = f'{{"input": "Hello", "max_output_tokens": 1, "tools": [{tool}]}}'
    response = httpx.post(
        f"{server.url}/v1/responses", content=body, headers={"content-type": "application/json"}
    )
    assert "no number beyond" in assert_refused(response, 400)["message"]


@pytest.mark.parametrize("prompt", [[-1], [6144], [0.5], [10**18], [], "", [[]], [5, "a"], None])
def test_row_27_tokens_that_are_none_are_refused(server: Server, prompt: Any) -> None:
    body = {"prompt": prompt, "max_tokens": 1}
    error = assert_refused(httpx.post(f"{server.url}/v1/completions", json=body), 400)
    assert error["param"] == "prompt"


def test_row_28_what_is_too_large_or_no_request(server: Server) -> None:
    packed = post("/tokenize", b"{}", "Content-Length: 2", "Content-Encoding: gzip")
    assert raw(server, packed)[0] == 415
    deep = b"[" * 100_000 + b"]" * 100_000
    assert raw(server, post("/tokenize", deep, f"Content-Length: {len(deep)}"))[0] == 400
    long = post("/tokenize", b"{}", "Content-Length: 2", "X: " + "y" * LIMITS.header_bytes)
    assert raw(server, long)[0] == 431
    for nonsense in (b"\x16\x03\x01\x02\x00\r\n\r\n", b"GET\r\n\r\n", b"\x00" * 64 + b"\r\n\r\n"):
        assert raw(server, nonsense)[0] == 400


@pytest.mark.slow
def test_row_28_what_is_too_slow(server: Server, client: OpenAI) -> None:
    text, head = golden(client), post("/tokenize", b"", "Content-Length: 2")
    began = time.monotonic()
    with ThreadPoolExecutor(8) as pool:
        # A head that never ends, and a body that never comes.
        slow = [b"POST /tokenize HTTP/1.1\r\nHost: loc", head + b"{"]
        later = pool.submit(second_request_that_never_ends, server)
        found = list(pool.map(lambda request: raw(server, request)[0], slow * 3))
        assert golden(client) == text  # meanwhile
    assert found == [408] * 6
    assert later.result() == 408
    assert time.monotonic() - began < LIMITS.idle_seconds + 15
    assert golden(client) == text


def test_row_29_unknown_fields_are_told_and_let_pass(server: Server) -> None:
    body = {"prompt": "a", "max_tokens": 1, "wizardry": 3, "b\r\nSet-Cookie: x": 1, "user": "me"}
    for is_streamed in (False, True):
        answer = httpx.post(f"{server.url}/v1/completions", json={**body, "stream": is_streamed})
        assert answer.status_code == 200
        assert answer.headers["warning"].startswith('299 - "ignored: ')
        assert "wizardry" in answer.headers["warning"]
        assert "user" not in answer.headers["warning"]
        assert "set-cookie" not in answer.headers
    plain = httpx.post(f"{server.url}/v1/completions", json={"prompt": "a", "max_tokens": 1})
    assert "warning" not in plain.headers


def test_row_32_readers_that_do_not_read_hold_up_nobody(server: Server, client: OpenAI) -> None:
    text = golden(client)
    lazy = [start_stream(server, n=2) for _ in range(4)]
    try:
        assert golden(client) == text
    finally:
        for connection in lazy:
            connection.close()
    found = load_at_rest(server)
    assert found["running"] == found["waiting"] == found["used_blocks"] == 0


ODD = [
    "evil",
    "localhost.",
    "x?",
    "a@localhost",
    "evil@localhost",
    "localhost?x",
    "::1",
    "",
    "[::1",
]


@pytest.mark.parametrize("host", [*ODD, ""])
def test_row_33_names_that_are_not_ours_are_refused(server: Server, host: str) -> None:
    request = f"GET /health HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n"
    status, error = raw(server, request.encode())
    assert (status, error["type"]) == (400, "invalid_request_error")


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:80", "127.0.0.1:9", "[::1]", "[::1]:80"])
def test_row_33_our_own_names_are_known(server: Server, host: str) -> None:
    assert httpx.get(f"{server.url}/health", headers={"Host": host}).status_code == 200


def test_row_36_more_than_can_wait_are_told_to_come_back(serve: Callable[..., Server]) -> None:
    server = serve("--max-num-seqs", "2")
    opened = [start_stream(server) for _ in range(LIMITS.requests + 8)]
    try:
        deadline = time.monotonic() + 60
        while True:
            response = httpx.post(
                f"{server.url}/v1/completions", json={"prompt": "a", "max_tokens": 1}, timeout=60
            )
            if response.status_code == 429:
                break
            assert time.monotonic() < deadline, response.text
        assert_refused(response, 429)
        assert int(response.headers["retry-after"]) >= 1
    finally:
        for connection in opened:
            connection.close()
    deadline = time.monotonic() + 60
    while golden_or_none(server.client()) is None:
        assert time.monotonic() < deadline


def golden_or_none(client: OpenAI) -> str | None:
    try:
        return golden(client)
    except Exception:
        time.sleep(0.2)
        return None


def test_row_37_answers_under_way_are_ended_in_form(serve: Callable[..., Server]) -> None:
    server = serve("--grace", "1", "--max-num-seqs", "8")
    streams = [start_stream(server, n=2) for _ in range(3)]
    for stream in streams:
        assert b"200 OK" in stream.recv(1 << 12)
    server.process.send_signal(signal.SIGTERM)
    for stream in streams:
        text = b""
        while data := stream.recv(1 << 16):
            text += data
        assert b'"abort"' in text
        assert text.rstrip().endswith((b"data: [DONE]", b"data: [DONE]\r\n\r\n0", b"0"))
        assert b"data: [DONE]" in text[-80:]
    assert server.process.wait(timeout=30) == 143


def test_row_37_a_second_signal_ends_at_once(serve: Callable[..., Server]) -> None:
    server = serve("--grace", "60", "--max-num-seqs", "8")
    streams = [start_stream(server, n=2) for _ in range(3)]
    for stream in streams:
        assert b"200 OK" in stream.recv(1 << 12)
    began = time.monotonic()
    server.process.send_signal(signal.SIGTERM)
    time.sleep(0.5)
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(timeout=30) == 143
    assert time.monotonic() - began < 5


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": {"url": "http://127.0.0.1:9/cat.png"}},
        {"type": "image_url", "image_url": {"url": "file:///etc/passwd"}},
        {"type": "input_audio", "input_audio": {"data": "", "format": "wav"}},
    ],
)
def test_row_44_pictures_and_sound_are_refused_unopened(server: Server, part: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as trap:
        trap.settimeout(0.3)
        url = f"http://127.0.0.1:{trap.getsockname()[1]}/cat.png"
        if part.get("image_url", {}).get("url", "").startswith("http"):
            part = {**part, "image_url": {"url": url}}
        text = {"type": "text", "text": "What is this?"}
        body = {"messages": [{"role": "user", "content": [text, part]}]}
        error = assert_refused(httpx.post(server.url + CHAT, json=body), 400)
        assert error["code"] == "unsupported_modality"
        # The place is named as the client wrote it, without the types that its validation tries.
        assert error["message"] == "messages.0.content.1: localllm reads only text"
        with pytest.raises(TimeoutError):
            trap.accept()
