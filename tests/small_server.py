"""A server on loopback that answers with the bytes that it is told to."""

import json
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

# What comes for a path: bytes, or pieces of them, which may pause and need not end.
Answer = bytes | Callable[[], Iterable[bytes]]
MODELS = {"data": [{"id": "small"}]}
SAID = (
    {"choices": [{"index": 0, "delta": {"content": "It is "}, "finish_reason": None}]},
    {"choices": [{"index": 0, "delta": {"content": "so."}, "finish_reason": None}]},
    {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]},
)


@dataclass
class SmallServer:
    """Where it is, and what it was asked: heads with their bodies."""

    url: str
    asked: list[bytes] = field(default_factory=list)

    def wait_until_asked(self) -> None:
        """Until a question has come."""
        deadline = time.monotonic() + 20
        while not any(asked.startswith(b"POST") for asked in self.asked):
            assert time.monotonic() < deadline
            time.sleep(0.01)


def reply(body: bytes, status: str = "200 OK", kind: str = "application/json") -> bytes:
    """A whole answer of HTTP."""
    return head(status, f"Content-Type: {kind}", f"Content-Length: {len(body)}") + body


def head(status: str = "200 OK", *fields: str) -> bytes:
    """The head of one; without a length it goes on until the connection ends."""
    return "\r\n".join([f"HTTP/1.1 {status}", *fields, "\r\n"]).encode("latin-1")


def models(listed: object = MODELS) -> bytes:
    """The answer to `/v1/models`."""
    return reply(json.dumps(listed).encode())


def event(chunk: object) -> bytes:
    """One event of a stream."""
    return b"data: " + json.dumps(chunk).encode() + b"\n\n"


def stream(*chunks: Any) -> bytes:
    """A streamed answer of these chunks, `SAID` if there are none."""
    events = b"".join(map(event, chunks or SAID))
    return reply(events + b"data: [DONE]\n\n", kind="text/event-stream")


@contextmanager
def small_server(answers: Mapping[str, Answer] | None = None) -> Iterator[SmallServer]:
    """A server that has an answer for each path; it says `SAID` where there is none."""
    found = {"/v1/models": models(), "/v1/chat/completions": stream(), **(answers or {})}
    listening = socket.create_server(("127.0.0.1", 0))
    server = SmallServer(f"http://127.0.0.1:{listening.getsockname()[1]}")

    def serve(connection: socket.socket) -> None:
        with connection, suppress(OSError):
            asked = _read_request(connection)
            server.asked.append(asked)
            path = asked.split(b" ", 2)[1].decode() if b" " in asked else ""
            answer = found.get(path, reply(b"{}", "404 Not Found"))
            for piece in [answer] if isinstance(answer, bytes) else answer():
                connection.sendall(piece)
            connection.shutdown(socket.SHUT_WR)
            while connection.recv(65536):  # closed at once, it would be reset
                pass

    def accept() -> None:
        with suppress(OSError):
            while True:
                connection, _ = listening.accept()
                threading.Thread(target=serve, args=(connection,), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    yield server
    listening.shutdown(socket.SHUT_RDWR)
    listening.close()


def say_nothing() -> Iterator[bytes]:
    """An answer that does not come."""
    time.sleep(30)
    yield b""


def _read_request(connection: socket.socket) -> bytes:
    """Head and body, as far as they come."""
    data = b""
    while b"\r\n\r\n" not in data:
        piece = connection.recv(65536)
        if not piece:
            return data
        data += piece
    for line in data.split(b"\r\n\r\n")[0].lower().split(b"\r\n"):
        if line.startswith(b"content-length:"):
            whole = data.index(b"\r\n\r\n") + 4 + int(line.partition(b":")[2])
            while len(data) < whole:
                piece = connection.recv(65536)
                if not piece:
                    return data
                data += piece
    return data
