"""The client's side of OpenAI's interface: requests to a server, ours or another's.

The server is not trusted. What it answers is bounded in bytes and in time, and a redirect to
another origin is an error: a key and a question go only where their user sent them.
"""

import http.client
import ipaddress
import json
import socket
import threading
import time
from base64 import b64encode
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Any
from urllib.parse import SplitResult, unquote, urljoin, urlsplit
from urllib.request import getproxies, proxy_bypass

from localllm.errors import ExitCode, LocalLLMError, RequestError
from localllm.openai_chunks import Chunk, parse_json, read_chunk, refusal

CONNECT_S = 10.0
# Between two pieces of an answer: the prompt may be long, and the machine slow.
SILENCE_S = 600.0
# For a list of models, or what is said with an error, as a whole.
SHORT_REPLY_S = 60.0
MAX_LINE_BYTES = 1 << 20
# What may come without an event in it: comments that keep a connection, or no stream at all.
MAX_QUIET_BYTES = 1 << 20
MAX_STREAM_BYTES = 256 << 20
MAX_JSON_BYTES = 8 << 20
MAX_ERROR_BYTES = 64 << 10
_PIECE_BYTES = 64 << 10
_REDIRECTS = (301, 302, 303, 307, 308)
_MAX_REDIRECTS = 5
_PORTS = {"http": 80, "https": 443}


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where a server is, and the key that it wants; `path` is what stands before `/v1`.

    `key_hint`: how a user gives the key.
    """

    scheme: str
    host: str
    port: int
    path: str
    api_key: str | None
    key_hint: str

    @classmethod
    def parse(
        cls, url: str, api_key: str | None, flag: str, key_hint: str = "--api-key KEY"
    ) -> "Endpoint":
        """The endpoint at `url`, which `flag` gave. Raises: RequestError."""
        try:
            parts = urlsplit(url.rstrip("/").removesuffix("/v1"))
            scheme, host, port = _origin(parts)
            if not parts.path.isascii() or not parts.path.isprintable() or " " in parts.path:
                raise ValueError("no path of HTTP")
        except ValueError as error:
            raise RequestError(
                f"{flag} must be like http://127.0.0.1:8000, found {url!r:.100}",
                param=flag.lstrip("-"),
            ) from error
        if api_key is not None and not (api_key.isascii() and api_key.isprintable()):
            raise RequestError("the key has a character that no key has", hint=key_hint)
        return cls(scheme, host, port, parts.path, api_key, key_hint)

    @property
    def name(self) -> str:
        """Host and port."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == _PORTS[self.scheme] else f"{host}:{self.port}"

    @property
    def url(self) -> str:
        """Without the `/v1`."""
        return f"{self.scheme}://{self.name}{self.path}"

    def models(self) -> dict[str, Mapping[str, Any]]:
        """What the server says of its models, by their names. Raises: LocalLLMError."""
        with self.request("/v1/models") as reply:
            body = reply.read(MAX_JSON_BYTES)
        try:
            listed = parse_json(body)["data"]
            if not isinstance(listed, list):
                raise TypeError(f"data is {type(listed).__name__}")
            return {_model_name(each): each for each in listed}
        except (ValueError, LookupError, TypeError) as error:
            raise LocalLLMError(
                f"{self.url} does not answer as an OpenAI-compatible server",
                where=f"GET /v1/models: {error!s:.200}",
            ) from error

    def request(self, path: str, body: Mapping[str, Any] | None = None) -> "Reply":
        """The reply to a GET, or to a POST of `body`, when its head has come.

        Raises: LocalLLMError where the server cannot be reached, refuses, or leads elsewhere.
        """
        target = self.path + path
        for _ in range(_MAX_REDIRECTS):
            reply = self._send(target, body)
            if 200 <= reply.status < 300:
                return reply
            with reply:
                if reply.status not in _REDIRECTS:
                    raise self._refusal(reply)
                target = self._follow(target, path, reply.location, is_post=body is not None)
        raise LocalLLMError(f"{self.name} sends from one address to the next without end")

    def _send(self, target: str, body: Mapping[str, Any] | None) -> "Reply":
        headers = {"Accept": "*/*", "Connection": "close", "User-Agent": "localllm"}
        if self.api_key is not None:
            headers["Authorization"] = f"Bearer {self.api_key}"
        data = None
        if body is not None:
            data, headers["Content-Type"] = json.dumps(body).encode(), "application/json"
        connection, shown, more = self._connection(target)
        try:
            connection.connect()
            taken = connection.sock
            taken.settimeout(SILENCE_S)
            method, patience_s = ("GET", SHORT_REPLY_S) if data is None else ("POST", SILENCE_S)
            with _within(patience_s, taken, self.name):
                connection.request(method, shown, data, headers | more)
                return Reply(self.name, connection, taken, connection.getresponse())
        except OSError as error:
            connection.close()
            raise _unreachable(self.name, f"{error.strerror or error!s:.200}") from error
        except (ValueError, http.client.HTTPException) as error:
            connection.close()
            raise LocalLLMError(
                f"{self.name} does not answer in HTTP", where=f"{error!s:.200}"
            ) from error
        except BaseException:  # Ctrl-C
            connection.close()
            raise

    def _connection(self, target: str) -> tuple[http.client.HTTPConnection, str, dict[str, str]]:
        """A connection, by a proxy where the environment has one for the host; the target as it is
        written there, and fields for the head.
        """
        kind = http.client.HTTPSConnection if self.scheme == "https" else http.client.HTTPConnection
        try:
            proxy = self._proxy()
            if proxy is None:
                return kind(self.host, self.port, timeout=CONNECT_S), target, {}
            if not proxy.hostname:
                raise ValueError("it names no host")
            connection = kind(proxy.hostname, proxy.port or 80, timeout=CONNECT_S)
        except (ValueError, http.client.HTTPException) as error:
            why = f"the proxy that the environment names is none: {error!s:.100}"
            raise _unreachable(self.name, why) from error
        fields = {}
        if proxy.username is not None:
            secret = f"{unquote(proxy.username)}:{unquote(proxy.password or '')}"
            fields["Proxy-Authorization"] = f"Basic {b64encode(secret.encode()).decode()}"
        if self.scheme == "http":
            return connection, f"http://{self.name}{target}", fields
        connection.set_tunnel(self.host, self.port, fields)
        return connection, target, {}

    def _proxy(self) -> SplitResult | None:
        if _is_loopback(self.host) or proxy_bypass(self.name):
            return None
        found = getproxies()
        proxy = found.get(self.scheme) or found.get("all")
        if not proxy:
            return None
        return urlsplit(proxy if "//" in proxy else f"//{proxy}")

    def _follow(self, target: str, path: str, location: str, *, is_post: bool) -> str:
        """Where on this server a redirect leads. Raises: LocalLLMError for all others."""
        found = urlsplit("")
        with suppress(ValueError):
            found = urlsplit(urljoin(f"{self.scheme}://{self.name}{target}", location or "none:"))
        try:
            is_here = _origin(found) == (self.scheme, self.host, self.port)
        except ValueError:
            is_here = False
        if is_here and not is_post:
            return f"{found.path}?{found.query}" if found.query else found.path
        base = found._replace(path=found.path.removesuffix(path), query="", fragment="").geturl()
        raise LocalLLMError(
            f"{self.name} sends on to {location or 'nowhere':.300}",
            where="neither your key nor your question was sent there",
            hint=f"if you trust that address, give it: {base}" if found.scheme in _PORTS else "",
            exit_code=ExitCode.NETWORK,
        )

    def _refusal(self, reply: "Reply") -> LocalLLMError:
        try:
            told = parse_json(reply.read(MAX_ERROR_BYTES))
        except (ValueError, LocalLLMError):
            told = None
        return refusal(told, reply.status, self.key_hint)


class Reply:
    """An answer whose head has come; what follows is read as it comes, and closed by who reads."""

    def __init__(
        self,
        name: str,
        connection: http.client.HTTPConnection,
        taken: socket.socket,
        response: http.client.HTTPResponse,
    ) -> None:
        """`taken`: the connection's socket, which it forgets when the server will close it."""
        self._name, self._connection, self._socket = name, connection, taken
        self._response = response

    def __enter__(self) -> "Reply":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def status(self) -> int:
        """The status of HTTP."""
        return self._response.status

    @property
    def location(self) -> str:
        """Where a redirect leads."""
        return self._response.headers.get("Location", "")

    def read(self, max_bytes: int) -> bytes:
        """All of a short reply. Raises: LocalLLMError for one that is too long, or too slow."""
        body = bytearray()
        with _within(SHORT_REPLY_S, self._socket, self._name):
            for piece in self._pieces():
                body += piece
                if len(body) > max_bytes:
                    raise LocalLLMError(f"{self._name} answers with over {max_bytes:,} bytes")
        return bytes(body)

    def chunks(self) -> Iterator[Chunk]:
        """A streamed answer, to its end. Raises: LocalLLMError."""
        num_chunks = quiet_bytes = 0
        for line in self._lines():
            name, _, value = line.partition(b":")
            value = value.strip()
            if name == b"data" and value == b"[DONE]":
                return
            if name == b"data" and value:
                yield read_chunk(value)
                num_chunks, quiet_bytes = num_chunks + 1, 0
                continue
            quiet_bytes += len(line) + 1
            if quiet_bytes > MAX_QUIET_BYTES:
                raise LocalLLMError(f"{self._name} sends on and on, and nothing of an answer")
        if not num_chunks:
            kind = self._response.headers.get("Content-Type", "none")
            raise LocalLLMError(
                f"{self._name} does not answer as an OpenAI-compatible server",
                where=f"there is no event in its answer; content type: {kind:.100}",
            )

    def hang_up(self) -> None:
        """Let the server know that nobody reads any more; for any thread."""
        _shut_down(self._socket)

    def close(self) -> None:
        """Let go of the connection."""
        self._response.close()
        self._connection.close()

    def _lines(self) -> Iterator[bytes]:
        rest, num_bytes = bytearray(), 0
        for piece in self._pieces():
            num_bytes += len(piece)
            if num_bytes > MAX_STREAM_BYTES:
                raise LocalLLMError(f"{self._name} answers with over {MAX_STREAM_BYTES:,} bytes")
            start = len(rest)
            rest += piece
            end = rest.find(b"\n", start)
            while end >= 0:
                yield bytes(rest[:end])
                del rest[: end + 1]
                end = rest.find(b"\n")
            if len(rest) > MAX_LINE_BYTES:
                raise LocalLLMError(f"{self._name} sends a line of over {MAX_LINE_BYTES:,} bytes")
        yield bytes(rest)

    def _pieces(self) -> Iterator[bytes]:
        try:
            while piece := self._response.read1(_PIECE_BYTES):
                yield piece
        except (OSError, ValueError, http.client.HTTPException) as error:
            raise LocalLLMError(
                f"the connection to {self._name} broke: {error!s:.200}", hint="ask again"
            ) from error


def _model_name(listed: Any) -> str:
    name = listed["id"]
    if not isinstance(name, str) or not name:
        raise ValueError(f"a model's id is {name!r:.40}")
    return name


def _origin(parts: SplitResult) -> tuple[str, str, int]:
    """Scheme, host and port. Raises: ValueError where it is none of HTTP."""
    if parts.scheme not in _PORTS or not parts.hostname:
        raise ValueError("no address of HTTP")
    return parts.scheme, parts.hostname, parts.port or _PORTS[parts.scheme]


def _is_loopback(host: str) -> bool:
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _unreachable(name: str, why: str) -> LocalLLMError:
    return LocalLLMError(
        f"{name} cannot be reached: {why}",
        hint="is it running, and is this its address?",
        exit_code=ExitCode.NETWORK,
    )


@contextmanager
def _within(seconds: float, taken: socket.socket, name: str) -> Iterator[None]:
    """Cut a connection after so long, whatever it is doing: a server may send a byte a minute.

    Raises: LocalLLMError then.
    """
    began_s = time.monotonic()
    timer = threading.Timer(seconds, _shut_down, [taken])
    timer.daemon = True
    timer.start()
    try:
        yield
    except (OSError, ValueError, http.client.HTTPException, LocalLLMError):
        if time.monotonic() - began_s < seconds:
            raise
    finally:
        timer.cancel()
    if time.monotonic() - began_s >= seconds:
        raise LocalLLMError(
            f"{name} has not answered within {seconds:.0f} s", exit_code=ExitCode.NETWORK
        )


def _shut_down(taken: socket.socket) -> None:
    with suppress(OSError):
        # TLS would say goodbye first, and wait for the other side to.
        socket.socket.shutdown(taken, socket.SHUT_RDWR)
