"""Clients that send too much, too slowly, or take nothing."""

import asyncio
import contextlib
import json
import logging
import socket
import threading
import time
from collections.abc import AsyncIterator, MutableMapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn
from server.conftest import Server, end, start_server

from localllm.process.log_rate import LINES, WINDOW_S, LogRate
from localllm.server import body_reader, protocol
from localllm.server.body_reader import BodyReader
from localllm.server.limits import LIMITS
from localllm.server.protocol import PatientProtocol
from localllm.server.refusals import Refusal

HEAD = "Host: localhost\r\nContent-Type: application/json\r\n"


def connect(url: str) -> socket.socket:
    host, port = url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=20)


def send_until_closed(connection: socket.socket, piece: bytes, seconds: float) -> int:
    """Bytes that were taken before the other side ended the connection."""
    taken, deadline = 0, time.monotonic() + seconds
    with contextlib.suppress(OSError):
        while time.monotonic() < deadline:
            taken += connection.send(piece)
    return taken


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (f"POST /v1/completions HTTP/1.1\r\n{HEAD}Content-Length: 99999999999\r\n\r\n", 413),
        (f"POST /nowhere HTTP/1.1\r\n{HEAD}Transfer-Encoding: chunked\r\n\r\n", 404),
        (f"GET /health HTTP/1.1\r\n{HEAD}Content-Length: 99999999999\r\n\r\n", 200),
        ("POST /tokenize HTTP/1.1\r\nHost: evil\r\nContent-Length: 99999999999\r\n\r\n", 400),
    ],
)
def test_the_body_of_what_is_answered_already_is_not_read_on(
    server: Server, head: str, status: int
) -> None:
    with connect(server.url) as connection:
        connection.sendall(head.encode())
        if status == 404:  # else it is no chunk
            connection.sendall(b"fffffff\r\n")
        answer = connection.recv(1 << 16)
        assert int(answer.split()[1]) == status
        assert b"connection: close" in answer.lower()
        began_s = time.monotonic()
        taken = send_until_closed(connection, b"x" * (1 << 16), 20)
        assert time.monotonic() - began_s < 5
        assert taken < 16 << 20  # what lies in the system's buffers
    log = server.log.read_text()
    assert "Traceback" not in log
    assert "LocalProtocolError" not in log


def test_a_client_that_sends_all_of_a_refused_body_reads_why(server: Server) -> None:
    for _ in range(20):
        headers = {"Content-Encoding": "gzip"}
        answer = httpx.post(f"{server.url}/tokenize", content=b"x" * 200_000, headers=headers)
        assert answer.status_code == 415


def test_a_body_that_goes_wrong_while_its_request_is_answered(server: Server) -> None:
    """The chunk that is none arrives with the head, so the answer is begun when it is read."""
    for path, size in (("/nowhere", b"zz"), ("/tokenize", b"zz"), ("/tokenize", b"1\r\nab")):
        with connect(server.url) as connection:
            head = f"POST {path} HTTP/1.1\r\n{HEAD}Transfer-Encoding: chunked\r\n\r\n"
            connection.sendall(head.encode() + b"2\r\n{}\r\n" + size + b"\r\n")
            answer = connection.recv(1 << 16)
            assert answer.startswith(b"HTTP/1.1 4")
    assert "Traceback" not in server.log.read_text()


def test_a_length_beside_chunks_is_refused(server: Server) -> None:
    with connect(server.url) as connection:
        head = f"POST /tokenize HTTP/1.1\r\n{HEAD}Content-Length: 2\r\nTransfer-Encoding: chunked"
        connection.sendall(f"{head}\r\n\r\n2\r\n{{}}\r\n0\r\n\r\n".encode())
        assert b" 400 " in connection.recv(1 << 16)


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ({"prompt": "a", "max_tokens": 1, "x": "a," * 4_000_000}, 200),
        ({"prompt": "a", "x": [[]] * 2_000_000}, 413),
        ({"prompt": [1] * 300_000}, 413),
    ],
)
def test_others_hardly_wait_for_a_large_body(
    server: Server, body: dict[str, Any], status: int
) -> None:
    content = json.dumps(body).encode()
    found: list[int] = []

    def send() -> None:
        headers = {"Content-Type": "application/json"}
        url = f"{server.url}/v1/completions"
        found.append(httpx.post(url, content=content, headers=headers, timeout=60).status_code)

    thread = threading.Thread(target=send)
    thread.start()
    slowest_s = 0.0
    while thread.is_alive():
        began_s = time.monotonic()
        assert httpx.get(f"{server.url}/health").status_code == 200
        slowest_s = max(slowest_s, time.monotonic() - began_s)
    assert found == [status]
    assert slowest_s < 1


def test_json_within_json_is_counted_too(server: Server) -> None:
    arguments = "[" + "[]," * 300_000 + "[]]"
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": arguments}}
    messages = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
    ]
    answer = httpx.post(f"{server.url}/v1/chat/completions", json={"messages": messages})
    assert answer.status_code == 400
    assert "262,144 values" in answer.json()["error"]["message"]


def test_functions_of_old_are_refused(server: Server) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}], "functions": [{"name": "f"}]}
    answer = httpx.post(f"{server.url}/v1/chat/completions", json=body)
    assert answer.status_code == 400
    assert "tools" in answer.json()["error"]["message"]


# -- bodies


def pieces(*sizes: int, pause_s: float = 0.0) -> Any:
    """What an application receives: a body in pieces, which goes on."""
    left = list(sizes)

    async def receive() -> MutableMapping[str, Any]:
        await asyncio.sleep(pause_s)
        size = left.pop(0)
        return {"type": "http.request", "body": b"x" * size, "more_body": bool(left)}

    return receive


def test_a_body_has_so_long_in_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body_reader, "LIMITS", replace(LIMITS, body_seconds=0.2))  # type: ignore[arg-type]
    began_s = time.monotonic()
    found = asyncio.run(BodyReader().read(pieces(*[1] * 1000, pause_s=0.05)))
    assert isinstance(found, Refusal)
    assert found.status == 408
    assert time.monotonic() - began_s < 2


def test_bodies_hold_so_much_together_and_small_ones_are_always_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(body_reader, "LIMITS", replace(LIMITS, bodies_bytes=1_000_000))
    readers = BodyReader()

    async def read_all() -> list[bytes | Refusal]:
        slow = [asyncio.create_task(readers.read(pieces(400_000, 1, pause_s=0.1))) for _ in "123"]
        await asyncio.sleep(0.15)
        small = await readers.read(pieces(100))
        return [small, *await asyncio.gather(*slow)]

    small, *large = asyncio.run(read_all())
    assert small == b"x" * 100
    assert sorted(each.status if isinstance(each, Refusal) else 200 for each in large) == [
        200,
        200,
        503,
    ]
    assert readers._held == 0


# -- connections


@contextlib.asynccontextmanager
async def running(answer: bytes, **options: Any) -> AsyncIterator[int]:
    """A server with this protocol, whose answer is always the same; its port."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": answer})

    def connect() -> asyncio.Protocol:
        return PatientProtocol(config, state, {}, **options)

    config = uvicorn.Config(app, lifespan="off", log_level="warning")
    config.load()
    state = uvicorn.server.ServerState()
    loop = asyncio.get_running_loop()
    serving = await loop.create_server(connect, "127.0.0.1", 0)
    async with serving:
        yield serving.sockets[0].getsockname()[1]


ASK = b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"


def test_a_client_that_takes_nothing_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "LIMITS", replace(LIMITS, idle_seconds=0.3))  # type: ignore[arg-type]
    monkeypatch.setattr(protocol, "_LOOK_S", 0.05)

    async def try_it() -> int:
        async with running(b"x" * (40 << 20)) as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 12)
            writer.write(ASK)
            await asyncio.sleep(1.5)
            found = 0
            with contextlib.suppress(ConnectionError):
                while data := await reader.read(1 << 20):
                    found += len(data)
            writer.close()
            return found

    assert asyncio.run(try_it()) < 40 << 20


@pytest.mark.parametrize("before", [b"", ASK])
def test_a_head_that_never_ends_is_given_up(before: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "LIMITS", replace(LIMITS, idle_seconds=0.3))  # type: ignore[arg-type]

    async def try_it() -> bytes:
        async with running(b"answer") as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(before)
            if before:
                await reader.readuntil(b"answer")
            writer.write(b"GET / HTTP/1.1\r\nHo")
            found = await asyncio.wait_for(reader.read(), 5)
            writer.close()
            return found

    assert b" 408 " in asyncio.run(try_it())


def test_a_client_that_takes_slowly_gets_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "LIMITS", replace(LIMITS, idle_seconds=1))  # type: ignore[arg-type]
    monkeypatch.setattr(protocol, "_LOOK_S", 0.05)

    async def try_it() -> int:
        async with running(b"x" * (10 << 20)) as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(ASK)
            found = 0
            while found < 10 << 20:
                piece = await reader.read(1 << 19)
                assert piece, "it was given up"
                found += len(piece)
                await asyncio.sleep(0.1)  # which takes twice as long as it may stand still
            writer.close()
            return found

    assert asyncio.run(try_it()) >= 10 << 20


def test_the_connection_that_was_idle_longest_makes_room() -> None:
    async def try_it() -> tuple[list[bytes], bytes]:
        async with running(b"answer", max_connections=4) as port:
            idle = []
            for _ in range(8):
                idle.append(await asyncio.open_connection("127.0.0.1", port))
                await asyncio.sleep(0.02)
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(ASK)
            answer = await asyncio.wait_for(reader.read(1000), 5)
            ends = []
            for other, _ in idle[:5]:
                with contextlib.suppress(ConnectionError):
                    ends.append(await asyncio.wait_for(other.read(1000), 5))
            for _, each in [*idle, (reader, writer)]:
                each.close()
            return ends, answer

    ends, answer = asyncio.run(try_it())
    assert set(ends) <= {b""}
    assert b"200 OK" in answer


def test_with_few_files_idle_connections_stop_nobody(server_home: Path) -> None:
    server = start_server(server_home, within=("prlimit", "--nofile=64:64"))
    idle = [connect(server.url) for _ in range(120)]
    began_s = time.monotonic()
    for _ in range(5):
        assert httpx.get(f"{server.url}/health", timeout=20).status_code == 200
        body = {"prompt": "a", "max_tokens": 4}
        answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=20)
        assert answer.status_code == 200
    assert time.monotonic() - began_s < 20
    for connection in idle:
        connection.close()
    assert end(server) == 143
    assert server.log.stat().st_size < 50_000


# -- the log


def test_lines_of_one_kind_are_counted_and_left_out() -> None:
    now = [0.0]
    rate, shown = LogRate(lambda: now[0]), list[str]()

    def log(name: str, text: str, *values: object) -> None:
        record = logging.LogRecord(name, logging.WARNING, "", 0, text, values, None)
        if rate.filter(record):
            shown.append(record.getMessage())

    for i in range(1000):
        log("a", "request %d is wrong", i)
    log("b", "request %d is wrong", 7)
    assert len(shown) == LINES + 1
    now[0] = WINDOW_S + 1
    log("a", "request %d is wrong", 1000)
    assert shown[-1] == "request 1000 is wrong (990 more like it were left out)"
    for i in range(5000):  # kinds do not add up
        log("a", f"{i}")
    assert len(rate._kinds) <= 1000
