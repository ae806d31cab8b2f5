"""HTTP/1.1 as uvicorn speaks it, with an end to its patience, and refusals in OpenAI's form."""

import asyncio
import json
import sys
from http import HTTPStatus
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from localllm.server.guard import Refusal
from localllm.server.limits import LIMITS


class PatientProtocol(H11Protocol):
    """A connection on which no request arrives is closed after a while, and told so."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """See asyncio.Protocol."""
        super().connection_made(transport)
        self._waits: asyncio.TimerHandle | None = None
        self._watch()

    def data_received(self, data: bytes) -> None:
        """See asyncio.Protocol."""
        super().data_received(data)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        """See asyncio.Protocol."""
        if self._waits is not None:
            self._waits.cancel()
        super().connection_lost(exc)

    @property
    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _watch(self) -> None:
        """Wait for a request, or for the rest of it, but not for ever."""
        if self._is_answering:
            if self._waits is not None:
                self._waits.cancel()
            self._waits = None
        elif self._waits is None:
            self._waits = self.loop.call_later(LIMITS.idle_seconds, self._give_up)

    def send_400_response(self, msg: str) -> None:
        """What could not be read is refused, by a code that says why where that is known."""
        status = getattr(sys.exception(), "error_status_hint", 400)
        what = "the headers are too large" if status == 431 else "this is no HTTP request"
        self._refuse(Refusal(status, what))

    def _give_up(self) -> None:
        self._waits = None
        if not self._is_answering and not self.transport.is_closing():
            self._refuse(Refusal(408, f"no request came within {LIMITS.idle_seconds} s"))

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
