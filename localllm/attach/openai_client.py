"""A client for OpenAI-compatible servers, ours or others.

The server is not trusted. Its replies are bounded in bytes and in time, and a redirect is an error,
so that a key and a question go only where the user sent them.
"""

import ipaddress
import json
import socket
import ssl
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import httpx

from localllm.attach.openai_chunks import Chunk, parse_json, read_models, read_stream, refusal
from localllm.errors import ExitCode, LocalLLMError, RequestError

CONNECT_S = 10.0
# Between two pieces of an answer: the prompt may be long and the machine slow.
SILENCE_S = 600.0
# For all of a list of models, or all of an error's body.
SHORT_REPLY_S = 60.0
MAX_JSON_BYTES = 8 << 20
MAX_ERROR_BYTES = 64 << 10
_PORTS = {"http": 80, "https": 443}
# What httpx raises; ValueError for an invalid host name.
_FAILURES = (httpx.HTTPError, OSError, ValueError)


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A server's URL, without `/v1`, and its API key.

    `key_hint`: how a user can give the key.
    """

    url: str
    api_key: str | None
    key_hint: str

    @classmethod
    def parse(
        cls, url: str, api_key: str | None, flag: str, key_hint: str = "--api-key KEY"
    ) -> "Endpoint":
        """The endpoint at `url`, which `flag` gave. Raises: RequestError."""
        try:
            parts = urlsplit(url.rstrip("/").removesuffix("/v1"))
            if parts.scheme not in _PORTS or not parts.hostname:
                raise ValueError("not an HTTP address")
            if not parts.path.isascii() or not parts.path.isprintable() or " " in parts.path:
                raise ValueError("not an HTTP path")
            host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
            port = "" if parts.port in (None, _PORTS[parts.scheme]) else f":{parts.port}"
            found = f"{parts.scheme}://{host}{port}{parts.path}"
            httpx.URL(found)  # httpx may refuse a host that urlsplit accepts
        except (ValueError, httpx.InvalidURL) as error:
            raise RequestError(
                f"{flag} must be like http://127.0.0.1:8000, found {url!r:.100}",
                param=flag.lstrip("-"),
            ) from error
        if api_key is not None and not (api_key.isascii() and api_key.isprintable()):
            raise RequestError("the key has a character that is not allowed in keys", hint=key_hint)
        return cls(found, api_key, key_hint)

    @property
    def name(self) -> str:
        """Host and port."""
        return urlsplit(self.url).netloc

    def models(self) -> dict[str, Mapping[str, Any]]:
        """The server's descriptions of its models, by name. Raises: LocalLLMError."""
        with self.request("/v1/models") as reply:
            body = reply.read(MAX_JSON_BYTES)
        try:
            return read_models(body)
        except ValueError as error:
            raise LocalLLMError(
                f"{self.url} does not answer like an OpenAI-compatible server",
                where=f"GET /v1/models: {error!s:.200}",
            ) from error

    def request(self, path: str, body: Mapping[str, Any] | None = None) -> "Reply":
        """The reply to a GET, or to a POST of `body`, once its headers have arrived.

        Raises: LocalLLMError if the server cannot be reached, refuses, or redirects.
        """
        client = self._client()
        try:
            question = client.build_request("GET", self.url + path)
            if body is not None:
                kind = {"Content-Type": "application/json"}
                data = json.dumps(body).encode()
                question = client.build_request("POST", self.url + path, headers=kind, content=data)
            reply = Reply(self.name, client, question)
            if 200 <= reply.status < 300:
                return reply
            told = None
            with suppress(ValueError, LocalLLMError):
                told = parse_json(reply.read(MAX_ERROR_BYTES))
            raise refusal(told, reply.status, self.key_hint)
        except BaseException:  # also Ctrl-C
            client.close()
            raise

    def _client(self) -> httpx.Client:
        """A client for one request. Raises: LocalLLMError for a proxy that cannot be used."""
        headers = {"Connection": "close", "User-Agent": "localllm"}
        headers["Accept-Encoding"] = "identity"  # compressed data has no bound in bytes
        if self.api_key is not None:
            headers["Authorization"] = f"Bearer {self.api_key}"
        parts = urlsplit(self.url)
        tls = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        if parts.scheme == "https":  # the system's certificates take a while to read
            tls = ssl.create_default_context()
        try:
            return httpx.Client(
                headers=headers,
                verify=tls,
                trust_env=not _is_loopback(parts.hostname or ""),  # the environment's proxies
                timeout=httpx.Timeout(SILENCE_S, connect=CONNECT_S),
                event_hooks={"response": [self._refuse_redirect]},
            )
        except (httpx.InvalidURL, ValueError, ImportError) as error:  # ImportError: SOCKS missing
            raise LocalLLMError(
                f"{self.name} cannot be reached: a proxy in your environment cannot be used",
                where=f"{error!s:.200}",
                hint="fix or unset the variable: env | grep -i proxy",
                exit_code=ExitCode.NETWORK,
            ) from error

    def _refuse_redirect(self, response: httpx.Response) -> None:
        """Raises: LocalLLMError for a redirect, before httpx reads its address."""
        if not response.has_redirect_location:
            return
        location = response.headers["Location"]
        base, is_api, _ = location.partition("/v1/")
        is_other = is_api and base != self.url and base.startswith(("http://", "https://"))
        raise LocalLLMError(
            f"{self.name} redirects to {location or 'nowhere':.300}",
            where="neither your key nor your question was sent there",
            hint=f"if you trust that address, use it: {base:.300}" if is_other else "",
            exit_code=ExitCode.NETWORK,
        )


class Reply:
    """A reply whose headers have arrived; its body is read as it comes. The reader closes it."""

    def __init__(self, name: str, client: httpx.Client, question: httpx.Request) -> None:
        """Send `question` to the server `name`; `client` is for this request alone.

        Raises: LocalLLMError.
        """
        self._name, self._client = name, client
        self._socket: socket.socket | None = None
        question.extensions["trace"] = self._watch
        try:
            with self._within(SHORT_REPLY_S if question.method == "GET" else SILENCE_S):
                self._response = client.send(question, stream=True)
        except _FAILURES as error:
            is_broken = isinstance(error, httpx.ProtocolError)
            what = "does not speak HTTP" if is_broken else "cannot be reached"
            by = "its proxy says " if isinstance(error, httpx.ProxyError) else ""
            said = f"{error!s:.200}"
            if said.startswith("["):  # the system's error number
                said = said.partition("] ")[2]
            raise LocalLLMError(
                f"{name} {what}: {by}{said}",
                hint="check that it is running, and that this is its address",
                exit_code=ExitCode.NETWORK,
            ) from error

    def __enter__(self) -> "Reply":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    def status(self) -> int:
        """The HTTP status."""
        return self._response.status_code

    def read(self, max_bytes: int) -> bytes:
        """All of a short reply. Raises: LocalLLMError if it is too long or too slow."""
        body = bytearray()
        with self._within(SHORT_REPLY_S):
            for piece in self._pieces():
                body += piece
                if len(body) > max_bytes:
                    raise LocalLLMError(f"{self._name} answers with over {max_bytes:,} bytes")
        return bytes(body)

    def chunks(self) -> Iterator[Chunk]:
        """The events of a streamed answer, to its end. Raises: LocalLLMError."""
        return read_stream(self._pieces(), self._response.headers.get("Content-Type", "none"))

    def hang_up(self) -> None:
        """Cut the connection, even while it is in use; any thread may call this."""
        if self._socket is not None:
            with suppress(OSError):
                # TLS would first say goodbye, and wait for the server to do the same.
                socket.socket.shutdown(self._socket, socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the connection."""
        self._client.close()

    def _pieces(self) -> Iterator[bytes]:
        try:
            yield from self._response.iter_raw()
        except _FAILURES as error:
            raise LocalLLMError(
                f"the connection to {self._name} broke: {error!s:.200}", hint="ask again"
            ) from error

    def _watch(self, event: str, info: Mapping[str, Any]) -> None:
        """Keep the socket once it is connected, and the one that TLS replaces it with."""
        if event.endswith(("connect_tcp.complete", "start_tls.complete")):
            self._socket = info["return_value"].get_extra_info("socket")

    @contextmanager
    def _within(self, seconds: float) -> Iterator[None]:
        """Hang up after `seconds`: a server may send a byte a minute. Then raises LocalLLMError."""
        began_s = time.monotonic()
        timer = threading.Timer(seconds, self.hang_up)
        timer.daemon = True
        timer.start()
        try:
            yield
        except (*_FAILURES, LocalLLMError):
            if time.monotonic() - began_s < seconds:
                raise
        finally:
            timer.cancel()
        if time.monotonic() - began_s >= seconds:
            raise LocalLLMError(
                f"{self._name} has not answered within {seconds:.0f} s", exit_code=ExitCode.NETWORK
            )


def _is_loopback(host: str) -> bool:
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
