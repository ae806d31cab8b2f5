"""Request bodies: limits on their size, time and number; and bodies that nobody reads."""

import asyncio
import re
from collections.abc import MutableMapping
from contextlib import suppress
from typing import Any

from localllm.server.guard import App, Receive, Refusal, Scope, Send, too_large
from localllm.server.limits import LIMITS

# A client that is refused while it sends has this long to read why, and may send this much more.
_LINGER_S, _LINGER_BYTES = 1.0, 1 << 18
# Bodies up to this size are read however much others hold.
_SMALL_BYTES = 1 << 16
_JSON_TEXT = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"', re.DOTALL)


class Bodies:
    """Reads bodies, and counts the bytes that are held at once."""

    def __init__(self) -> None:
        self._held = 0

    async def read(self, receive: Receive) -> bytes | Refusal:
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
                    body += piece
                    if len(body) > LIMITS.body_bytes:
                        return too_large()
                    if self._held > LIMITS.bodies_bytes and len(body) > _SMALL_BYTES:
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


def count_values(text: bytes) -> int:
    """An upper bound on the number of values in a JSON text, from its commas and brackets."""
    if _num_marks(text) > LIMITS.json_values:
        text = _JSON_TEXT.sub(b"", text)
    return _num_marks(text)


def _num_marks(text: bytes) -> int:
    return text.count(b",") + text.count(b"[") + text.count(b"{")


class Closing:
    """An application that closes the connection if it answers before the whole body has arrived.

    To find the next request, the rest of the body would have to be read. It is read only for a
    moment, since a client that is still writing misses an answer if the connection closes at once.
    """

    def __init__(self, app: App) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
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
