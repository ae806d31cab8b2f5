"""One line for each request, for people and `grep`: who asked for what, how it went, what it took.

No text, key or address of a client is in it, and what clients choose is escaped.
"""

import threading
import time
from collections.abc import Callable, Mapping, MutableMapping
from queue import Empty, Full, Queue
from typing import Any
from urllib.parse import quote

from localllm.server.choice import Usage
from localllm.server.guard import App, Receive, Scope, Send

# Lines that wait to be written.
_MOST_WAITING = 1024
_ENDS_S = 1.0
_MOST_PATH_CHARS = 100
# What looks after a server asks for these every few seconds.
_QUIET = ("/health", "/metrics")
_GONE = 499  # as nginx has it: the client left before it had an answer


class RequestLog:
    """Writes the lines in a thread of its own: whoever reads them may be slow, or have stopped, and
    no answer waits for that.
    """

    def __init__(self, write: Callable[[str], None]) -> None:
        self._write = write
        self._lines: Queue[str] = Queue(_MOST_WAITING)
        self._num_lost = 0
        self._has_ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="request-log", daemon=True)
        self._thread.start()

    def add(self, scope: Mapping[str, Any], status: int | None, began_s: float) -> None:
        """Log a request that has ended; `status`: None if nothing was answered."""
        if scope["path"] in _QUIET and status == 200:
            return
        try:
            self._lines.put_nowait(line_of(scope, status or _GONE, time.monotonic() - began_s))
        except Full:
            self._num_lost += 1

    def close(self) -> None:
        """Write what is left, if that is soon done."""
        self._has_ended.set()
        self._thread.join(_ENDS_S)

    def _run(self) -> None:
        while True:
            try:
                line = self._lines.get(timeout=0.1)
            except Empty:
                if self._has_ended.is_set():
                    return
                continue
            lost, self._num_lost = self._num_lost, 0
            self._write(f"{line} ({lost} lines before it were lost)" if lost else line)


def logged(app: App, log: RequestLog) -> App:
    """The same application, with a line for each request."""

    async def call(scope: Scope, receive: Receive, send: Send) -> None:
        status: int | None = None
        began_s = time.monotonic()

        async def send_noted(message: MutableMapping[str, Any]) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await app(scope, receive, send_noted)
        finally:
            if scope["type"] == "http":
                log.add(scope, status, began_s)

    return call


def line_of(scope: Mapping[str, Any], status: int, seconds: float) -> str:
    """The line of a request; `scope["usage"]`: its tokens, if it got as far as that."""
    path = quote(scope["path"], safe="/:@-._~+")[:_MOST_PATH_CHARS]
    method = quote(scope["method"], safe="")[:16]
    parts = [time.strftime("%Y-%m-%d %H:%M:%S"), f"{method} {path} {status} {seconds:.2f} s"]
    usage: Usage | None = scope.get("usage")
    if usage is not None:
        model = quote(scope["model"], safe="/:@-._~+ ")
        tokens = f"prompt {usage.num_prompt} (cached {usage.num_cached})"
        parts += [model, tokens, f"completion {usage.num_completion}"]
    return "  ".join(parts)
