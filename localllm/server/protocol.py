"""uvicorn's HTTP/1.1, with timeouts, and refusals in OpenAI's format."""

import asyncio
import json
import sys
import time
from http import HTTPStatus
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from localllm.server.limits import LIMITS
from localllm.server.refusals import Refusal

# Seconds between checks that a client reads what it is sent; and the bytes that it has to read in
# LIMITS.idle_seconds.
_LOOK_S, _TAKEN_BYTES = 2.0, 1 << 16


class PatientProtocol(H11Protocol):
    """Closes a connection on which no request arrives for a while, with an error reply, and cuts
    one whose client reads nothing. Above `max_connections`, the one that has been idle longest is
    closed.
    """

    def __init__(
        self, *arguments: Any, max_connections: int = LIMITS.connections, **named: Any
    ) -> None:
        super().__init__(*arguments, **named)
        self._max_connections = max_connections
        self._waits: asyncio.TimerHandle | None = None
        self._looks: asyncio.TimerHandle | None = None
        self._since_s = self._taken_s = time.monotonic()
        self._unsent_bytes = self._taken_bytes = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """See asyncio.Protocol."""
        super().connection_made(transport)
        self._look()
        self._watch()
        self._make_room()

    def data_received(self, data: bytes) -> None:
        """See asyncio.Protocol."""
        super().data_received(data)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        """See asyncio.Protocol."""
        for timer in (self._waits, self._looks):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)

    @property
    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _make_room(self) -> None:
        """If there are too many connections, close the one that has been idle longest; if none is
        idle, this one.
        """
        known = [each for each in self.connections if isinstance(each, PatientProtocol)]
        # Closed connections are still listed for a moment.
        left = [each for each in known if not each.transport.is_closing()]
        if len(left) <= self._max_connections:
            return
        idle = [each for each in left if each is not self and not each._is_answering]
        if idle:
            min(idle, key=lambda each: each._since_s).transport.abort()
        else:
            self._refuse(Refusal(503, "too many connections", "server_error", "overloaded"))

    def _look(self) -> None:
        """Cut a client that reads nothing, or next to nothing, of what it is sent."""
        now, unsent = time.monotonic(), self.transport.get_write_buffer_size()
        self._taken_bytes += max(0, self._unsent_bytes - unsent)
        self._unsent_bytes = unsent
        if unsent == 0 or self._taken_bytes > _TAKEN_BYTES:
            self._taken_s, self._taken_bytes = now, 0
        elif now - self._taken_s > LIMITS.idle_seconds:
            self.transport.abort()
            return
        self._looks = self.loop.call_later(_LOOK_S, self._look)

    def _watch(self) -> None:
        """Wait for a request, or for the rest of it, but not forever."""
        self._since_s = time.monotonic()
        if self._is_answering:
            if self._waits is not None:
                self._waits.cancel()
            self._waits = None
        elif self._waits is None:
            self._waits = self.loop.call_later(LIMITS.idle_seconds, self._give_up)

    def send_400_response(self, msg: str) -> None:
        """Refuse a request that could not be read, with a status that says why if that is known."""
        if self._is_answering:
            # The body of a request that is being answered is invalid: the answer ends.
            self.cycle.disconnected = True
            self.cycle.message_event.set()
            if self.cycle.response_started:
                self.transport.abort()
                return
        status = getattr(sys.exception(), "error_status_hint", 400)
        what = "the headers are too large" if status == 431 else "this is not an HTTP request"
        self._refuse(Refusal(status, what))

    def _give_up(self) -> None:
        self._waits = None
        if not self._is_answering and not self.transport.is_closing():
            self._refuse(Refusal(408, f"no request arrived within {LIMITS.idle_seconds} s"))

    def _refuse(self, refusal: Refusal) -> None:
        body = json.dumps(refusal.content).encode()
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
            (b"connection", b"close"),
        ]
        status = refusal.status
        reason = HTTPStatus(status).phrase.encode()
        events: tuple[Any, ...] = (
            h11.Response(status_code=status, headers=headers, reason=reason),
            h11.Data(data=body),
            h11.EndOfMessage(),
        )
        for event in events:
            output = self.conn.send(event)
            if output is not None:
                self.transport.write(output)
        self.transport.close()
