"""Request bodies: limits on their size, time and number; and bodies that nobody reads."""

import asyncio
import json
from collections import Counter
from collections.abc import Iterable, Iterator, MutableMapping
from contextlib import suppress
from itertools import chain
from typing import Any

from localllm.server.guard import App, Receive, Scope, Send
from localllm.server.limits import LIMITS
from localllm.server.refusals import Refusal, too_large

# A client that is refused while it sends has this long to read why, and may send this much more.
_LINGER_S, _LINGER_BYTES = 1.0, 1 << 18
# Bodies up to this size are read however much others hold.
_SMALL_BYTES = 1 << 16
_PIECE_BYTES = 1 << 16


class BodyReader:
    """Reads bodies, and counts the bytes that are held at once."""

    def __init__(self) -> None:
        self._held = 0
        self._held_by: Counter[str] = Counter()

    async def read(self, receive: Receive, key: str = "") -> bytes | Refusal:
        """A whole body; a Refusal if it is too large or too slow, or others hold too much."""
        body = bytearray()
        try:
            async with asyncio.timeout(LIMITS.body_seconds):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        return Refusal(400, "the client has disconnected")
                    piece = message.get("body", b"")
                    self._held += len(piece)
                    self._held_by[key] += len(piece)
                    body += piece
                    if len(body) > LIMITS.body_bytes:
                        return too_large()
                    if self._is_full(key) and len(body) > _SMALL_BYTES:
                        return Refusal(
                            503,
                            "the server is busy reading other requests",
                            "server_error",
                            "overloaded",
                            headers={"Retry-After": "2"},
                        )
                    if not message.get("more_body"):
                        return bytes(body)
        except TimeoutError:
            return Refusal(408, f"the body did not arrive within {LIMITS.body_seconds} s")
        finally:
            self._held -= len(body)
            self._held_by[key] -= len(body)
            if not self._held_by[key]:
                del self._held_by[key]

    def _is_full(self, key: str) -> bool:
        of_key = self._held_by[key] if key else 0
        return self._held > LIMITS.bodies_bytes or of_key > LIMITS.bodies_bytes_of_a_key


def count_values(text: bytes) -> int:
    """An upper bound on the number of values in a JSON text, from its commas and brackets; it is
    not counted on above the limit.
    """
    return _count_marks(text, b",[{", LIMITS.json_values)


def count_names(text: bytes) -> int:
    """The same for the names in its objects, from its colons."""
    return _count_marks(text, b":", LIMITS.json_names)


def check_arguments(texts: Iterable[str]) -> None:
    """Check the arguments of calls, JSON within JSON, which are read for the template.

    Raises: ValueError for too many values or levels.
    """
    num_values = 0
    for text in texts:
        num_values += count_values(text.encode(errors="replace"))
        if num_values > LIMITS.json_values:
            raise ValueError(f"the arguments of calls have over {LIMITS.json_values:,} values")
        if text.count("[") + text.count("{") > LIMITS.argument_levels and not _is_flat(text):
            raise ValueError(f"the arguments of a call have over {LIMITS.argument_levels} levels")


def _is_flat(text: str) -> bool:
    """Whether a JSON text has few levels of lists and objects; one that is no JSON stays a text."""
    try:
        level = [json.loads(text)]
    except RecursionError:
        return False
    except ValueError:
        return True
    for _ in range(LIMITS.argument_levels + 1):
        level = [each for each in level if isinstance(each, list | dict)]
        if not level:
            return True
        inside = (part.values() if isinstance(part, dict) else part for part in level)
        level = list(chain.from_iterable(inside))
    return False


def _count_marks(text: bytes, marks: bytes, most: int) -> int:
    """How many of the `marks` a JSON text has, outside of its strings if there are over `most`."""
    count = _num_of(text, marks)
    if count <= most:
        return count
    count = 0
    for piece in _outside_of_strings(text):
        count += _num_of(piece, marks)
        if count > most:
            break
    return count


def _num_of(text: bytes, marks: bytes) -> int:
    return sum(text.count(mark) for mark in marks)


def _outside_of_strings(text: bytes) -> Iterator[bytes]:
    """A JSON text without its strings, in pieces: each holds all other threads up only shortly."""
    place, is_inside = 0, False
    while place < len(text):
        piece = text[place : place + _PIECE_BYTES].replace(b"\\\\", b"")
        place += _PIECE_BYTES
        if piece.endswith(b"\\"):
            place += 1  # what it escapes
        parts = piece.replace(b'\\"', b"").split(b'"')
        yield b"".join(parts[is_inside::2])
        is_inside ^= len(parts) % 2 == 0


class Closing:
    """An application that closes the connection if it answers before the whole body has arrived.

    To find the next request, the rest of the body would have to be read. It is read only for a
    moment, since a client that is still writing misses an answer if the connection closes at once.
    """

    def __init__(self, app: App) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        is_read = not _has_body(scope)

        async def receive_noted() -> MutableMapping[str, Any]:
            nonlocal is_read
            message = await receive()
            is_read = is_read or not message.get("more_body")
            return message

        async def send_closing(message: MutableMapping[str, Any]) -> None:
            if is_read:
                await send(message)
            elif message["type"] == "http.response.start":
                close = (b"connection", b"close")
                await send({**message, "headers": [*message.get("headers", []), close]})
            elif message.get("more_body"):
                await send(message)
            else:
                await send({**message, "more_body": True})
                await _drain(receive)
                await send({"type": "http.response.body", "body": b"", "more_body": False})

        await self._app(scope, receive_noted, send_closing)


def _has_body(scope: Scope) -> bool:
    headers = dict(scope["headers"])
    return b"transfer-encoding" in headers or headers.get(b"content-length", b"0") != b"0"


async def _drain(receive: Receive) -> None:
    num_bytes = 0
    with suppress(TimeoutError):
        async with asyncio.timeout(_LINGER_S):
            while num_bytes < _LINGER_BYTES:
                message = await receive()
                num_bytes += len(message.get("body", b""))
                if not message.get("more_body"):
                    return
