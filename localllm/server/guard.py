"""Checks before every route: who may ask, from where, and how much.

Pages in a browser can reach loopback too, by a name that resolves to it or from a foreign origin.
So a server without keys still checks the name it was called by (Ollama's CVE-2024-28224).
"""

import hmac
import re
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

from localllm.server.limits import LIMITS
from localllm.server.page import PAGE_PATHS
from localllm.server.places import Places
from localllm.server.refusals import Refusal, as_response, busy_key, too_large

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

# Headers of answers that pages of an allowed origin may read.
_TO_PAGES = b"warning, retry-after, x-localllm-replica, x-localllm-moved-lines"
_LENGTH_DIGITS = 19
LOOPBACK_NAMES = ("localhost", "127.0.0.1", "::1")


@dataclass(frozen=True, slots=True)
class Access:
    """Who may ask. Without keys, everybody who calls the server by one of its names."""

    keys: Sequence[str] = ()
    hosts: Sequence[str] = LOOPBACK_NAMES
    origins: Sequence[str] = ()

    def salt(self, key: str) -> bytes:
        """Keeps the cached prefixes of one key's requests apart from those of other keys."""
        return sha256(key.encode()).digest() if self.keys else b""


class Guard:
    """Passes allowed requests on, and refuses the others."""

    def __init__(self, app: App, access: Access, places: Places) -> None:
        self._app, self._access, self._places = app, access, places

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        scope["path"] = plain_path(scope["path"])
        headers = {
            name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]
        }
        origin = headers.get("origin", "")
        if origin in self._access.origins:
            if scope["method"] == "OPTIONS":
                await _allow(send, origin, headers)
                return
            send = _with_origin(send, origin)
        refusal = self._check(scope["method"], scope["path"], headers)
        if refusal is not None:
            await as_response(refusal, scope["path"])(scope, receive, send)
            return
        key = _key(headers)
        scope["salt"] = self._access.salt(key)
        scope["key"] = key if self._access.keys else ""
        if scope["method"] != "POST":
            await self._app(scope, receive, send)
        elif self._places.take(scope["key"], 1):
            try:
                await self._app(scope, receive, send)
            finally:
                self._places.give_back(scope["key"], 1)
        else:
            await as_response(busy_key(), scope["path"])(scope, receive, send)

    def _check(self, method: str, path: str, headers: dict[str, str]) -> Refusal | None:
        if sum(len(name) + len(value) for name, value in headers.items()) > LIMITS.header_bytes:
            return Refusal(431, "the headers are too large")
        host = headers.get("host", "")
        # With keys, a page that calls this server by a name of its own cannot get in.
        if not self._access.keys and _hostname(host) not in self._access.hosts:
            message = f"{host!r:.100} is not a name of this server; --allowed-host adds a name"
            return Refusal(400, message, code="unknown_host")
        # The page holds nothing of anybody; it asks its reader for a key.
        is_page = method == "GET" and (
            path in PAGE_PATHS or (path == "/" and wants_page(headers.get("accept", "")))
        )
        origin = headers.get("origin")
        own = (f"http://{host}", f"https://{host}")
        is_foreign = origin is not None and origin not in (*own, *self._access.origins)
        # A page's request without an origin: browsers send none with some forms and links.
        is_foreign |= (
            origin is None
            and method not in ("GET", "HEAD")
            and headers.get("sec-fetch-site") in ("cross-site", "same-site")
        )
        if is_foreign:
            return Refusal(403, "requests from this origin are not allowed", code="bad_origin")
        if "content-length" in headers and "transfer-encoding" in headers:
            # A proxy in front of this server may believe the other header (RFC 9112, 6.1).
            return Refusal(400, "a body must have either a length or chunks")
        if self._access.keys and not is_page and not self._knows(_key(headers)):
            return Refusal(
                401,
                "the API key is missing or wrong",
                "authentication_error",
                "invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )
        if method not in ("POST", "PUT", "PATCH"):
            return None
        return _check_body(headers)

    def _knows(self, given: str) -> bool:
        # All keys are compared, each in constant time.
        found = [hmac.compare_digest(given.encode(), key.encode()) for key in self._access.keys]
        return any(found)


def _check_body(headers: dict[str, str]) -> Refusal | None:
    """The refusal of a body, by its headers. It is read as JSON whatever its type: `curl -d` sends
    that of a form, and many clients none.
    """
    encoding = headers.get("content-encoding", "identity").strip().lower()
    if encoding not in ("", "identity"):
        return Refusal(415, f"the body must not be compressed, found {encoding!r:.40}")
    if headers.get("content-type", "").strip().lower().startswith("multipart/"):
        return Refusal(415, "the body must be JSON, not the parts of a form")
    length = headers.get("content-length", "0")
    if len(length) > _LENGTH_DIGITS:  # int() refuses thousands of digits
        return too_large()
    return too_large() if length.isdecimal() and int(length) > LIMITS.body_bytes else None


def plain_path(path: str) -> str:
    """A path without doubled slashes and a last one, which come from base URLs with a slash."""
    return "/" + "/".join(filter(None, path.split("/")))


def wants_page(accept: str) -> bool:
    """Whether a browser asks, to show what it gets."""
    return "text/html" in accept


def _hostname(host: str) -> str:
    """The name in a Host header, without its port; empty if there is a user, path or final dot."""
    found = re.fullmatch(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9_.-]*[A-Za-z0-9_-])(:[0-9]{1,5})?", host)
    return found[1].strip("[]").lower() if found else ""


def _key(headers: dict[str, str]) -> str:
    """The key that OpenAI's clients send, or Anthropic's."""
    kind, _, key = headers.get("authorization", "").partition(" ")
    return key.strip() if kind.lower() == "bearer" else headers.get("x-api-key", "").strip()


def _with_origin(send: Send, origin: str) -> Send:
    """Allow pages of this origin to read the answer (the Fetch standard, CORS)."""

    async def send_with(message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            allowed = [
                (b"access-control-allow-origin", origin.encode()),
                (b"access-control-expose-headers", _TO_PAGES),
                (b"vary", b"Origin"),
            ]
            message["headers"] = [*message.get("headers", []), *allowed]
        await send(message)

    return send_with


async def _allow(send: Send, origin: str, asked: dict[str, str]) -> None:
    """Answer the preflight request that a browser sends before a request from that origin, which
    may send all headers: clients in a page have many of their own.
    """
    wanted = asked.get("access-control-request-headers", "authorization, content-type")
    headers = [
        (b"access-control-allow-methods", b"GET, POST, DELETE"),
        (b"access-control-allow-headers", wanted.encode("latin-1")),
        (b"access-control-max-age", b"600"),
    ]
    if asked.get("access-control-request-private-network") == "true":
        headers.append((b"access-control-allow-private-network", b"true"))
    start = {"type": "http.response.start", "status": 204, "headers": headers}
    await _with_origin(send, origin)(start)
    await send({"type": "http.response.body", "body": b""})
