"""What holds for requests to any route: their paths, bodies, places and lines in the log."""

import re
import socket
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from openai import OpenAI
from server.conftest import Server, end, start_server
from server.test_hostile_http import connect

from localllm.server.choice import Usage
from localllm.server.limits import LIMITS
from localllm.server.request_log import RequestLog, line_of

ORIGIN = "http://page.example"
CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}


@pytest.fixture(scope="module")
def keyed(server_home: Any) -> Iterator[Server]:
    """A server with two keys, which answers to every name and makes embeddings."""
    keys = ("--api-key", "one", "--api-key", "other")
    more = ("--embeddings", "--any-model-name", "--max-num-seqs", "2", "--ctx", "512")
    server = start_server(server_home, *keys, *more)
    yield server
    end(server)


def key(name: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {name}"}


# -- paths


@pytest.mark.parametrize(
    ("path", "meant"),
    [
        ("/chat/completions", "/v1/chat/completions"),
        ("/v1/v1/chat/completions", "/v1/chat/completions"),
        ("/v1/chat/completion", "/v1/chat/completions"),
        ("/v1/health", "/health"),
        ("/v1/tokenize", "/tokenize"),
        ("/messages", "/v1/messages"),
        ("/api/chat", "/v1/chat/completions"),
        ("/api/tags", "/v1/models"),
        ("/completion", "/v1/completions"),
        ("/nothing/like/it", "the base URL ends with /v1"),
        ("/" + "x" * 8000, "the base URL ends with /v1"),
    ],
)
@pytest.mark.parametrize("kind", [{}, {"Content-Type": "text/plain"}])
def test_a_wrong_path_is_told_the_right_one(
    server: Server, path: str, meant: str, kind: dict[str, str]
) -> None:
    for answer in (
        httpx.post(f"{server.url}{path}", content=b"{}", headers=kind),
        httpx.get(f"{server.url}{path}"),
    ):
        assert answer.status_code == 404
        assert meant in answer.json()["error"]["message"]
        assert len(answer.text) < 600


def test_the_base_url_says_that_it_is_one(server: Server) -> None:
    for path in ("/v1", "/v1/"):
        assert "base URL" in httpx.get(server.url + path).json()["error"]["message"]


def test_slashes_too_many_are_no_other_path(server: Server) -> None:
    for path in ("/v1/models/", "//v1/models", "/v1//models", "/v1/models/pocket/", "/health/"):
        assert httpx.get(server.url + path).status_code == 200, path
    for path in ("//v1/chat/completions", "/v1/chat/completions/"):
        assert httpx.post(server.url + path, json=CHAT).status_code == 200
    client = OpenAI(base_url=f"{server.url}//v1/", api_key="none")
    assert client.models.list().data[0].id == "pocket"


def test_a_wrong_method_is_told_the_right_one(server: Server) -> None:
    found = httpx.get(f"{server.url}/v1/chat/completions")
    assert (found.status_code, found.headers["allow"]) == (405, "POST")
    assert "GET is not for /v1/chat/completions, only POST" in found.text
    assert httpx.options(f"{server.url}/v1/chat/completions").headers["allow"] == "POST"
    assert httpx.head(f"{server.url}/v1/models").status_code == 200


# -- bodies


@pytest.mark.parametrize(
    "kind",
    ["application/json; charset=utf-8", "application/x-www-form-urlencoded", "text/plain", "x", ""],
)
def test_a_body_is_read_as_json_whatever_its_type(server: Server, kind: str) -> None:
    content = b'{"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}'
    headers = {"Content-Type": kind} if kind else {}
    url = f"{server.url}/v1/chat/completions"
    assert httpx.post(url, content=content, headers=headers).status_code == 200
    refused = httpx.post(url, content=b"messages=hi", headers=headers)
    assert refused.status_code == 400
    assert "JSON" in refused.json()["error"]["message"]


def test_bodies_of_other_kinds_say_what_is_wrong(server: Server) -> None:
    url = f"{server.url}/v1/chat/completions"
    form = httpx.post(url, files={"file": b"x"})
    assert (form.status_code, "parts of a form" in form.text) == (415, True)
    packed = httpx.post(url, content=b"x", headers={"Content-Encoding": "gzip"})
    assert (packed.status_code, "compressed" in packed.text) == (415, True)


@pytest.mark.parametrize("site", ["cross-site", "same-site"])
def test_a_form_of_another_page_is_refused_even_without_an_origin(
    server: Server, site: str
) -> None:
    headers = {"Sec-Fetch-Site": site, "Content-Type": "text/plain"}
    url = f"{server.url}/v1/chat/completions"
    assert httpx.post(url, json=CHAT, headers=headers).status_code == 403
    assert httpx.get(f"{server.url}/v1/models", headers=headers).status_code == 200  # a link


def test_a_length_of_thousands_of_digits_is_too_large(server: Server) -> None:
    with connect(server.url) as connection:
        length = "9" * 5000
        head = f"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Length: {length}\r\n\r\n"
        connection.sendall(head.encode())
        assert connection.recv(1 << 16).split()[1] in (b"400", b"413")
    assert "Traceback" not in server.log.read_text()


# -- pages of other origins


def test_a_page_of_an_allowed_origin_may_send_what_its_client_sends(server_home: Any) -> None:
    server = start_server(server_home, "--allowed-origin", ORIGIN)
    asked = "authorization,content-type,x-stainless-lang,anthropic-version"
    headers = {
        "Origin": ORIGIN,
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": asked,
        "Access-Control-Request-Private-Network": "true",
    }
    found = httpx.options(f"{server.url}/v1/chat/completions", headers=headers)
    assert found.status_code == 204
    assert found.headers["access-control-allow-headers"] == asked
    assert found.headers["access-control-allow-private-network"] == "true"
    answer = httpx.post(
        f"{server.url}/v1/chat/completions", json={**CHAT, "odd": 1}, headers={"Origin": ORIGIN}
    )
    assert answer.headers["access-control-allow-origin"] == ORIGIN
    assert "warning" in answer.headers["access-control-expose-headers"]
    assert httpx.options(server.url, headers={"Origin": "http://evil.example"}).status_code == 403
    end(server)


# -- names


def test_every_name_is_answered_if_that_is_wanted(keyed: Server, server: Server) -> None:
    client = keyed.client("one")
    for name in ("gpt-4o", "claude-haiku-4-5"):
        answer = client.completions.create(model=name, prompt="a", max_tokens=1)
        assert answer.model == "pocket"
        assert client.models.retrieve(name).id == "pocket"
    refused = httpx.post(f"{server.url}/v1/chat/completions", json={**CHAT, "model": "gpt-4o"})
    assert refused.status_code == 404
    for word in ("'gpt-4o'", "'pocket'", "--any-model-name"):
        assert word in refused.json()["error"]["message"]


# -- places


def stream(server: Server, name: str) -> socket.socket:
    """A request whose answer has begun to be waited for."""
    body = '{"prompt": "a", "max_tokens": 400, "ignore_eos": true, "stream": true}'
    head = (
        "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
        f"Authorization: Bearer {name}\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    connection = connect(server.url)
    connection.sendall((head + body).encode())
    return connection


BODIES: dict[str, dict[str, object]] = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": {"prompt": "a", "max_tokens": 1},
    "/v1/responses": {"input": "a", "max_output_tokens": 1},
    "/v1/responses/input_tokens": {"input": "a"},
    "/v1/messages": {**CHAT, "model": "x"},
    "/v1/messages/count_tokens": {"messages": CHAT["messages"], "model": "x"},
    "/v1/embeddings": {"input": "a"},
    "/tokenize": {"prompt": "a"},
    "/detokenize": {"tokens": [1]},
}


def test_a_key_has_its_places_on_all_routes_together(keyed: Server) -> None:
    with httpx.Client(base_url=keyed.url, timeout=60) as http:

        def ask(path: str, name: str, body: object) -> int:
            return http.post(path, json=body, headers=key(name)).status_code

        opened = [stream(keyed, "one") for _ in range(LIMITS.requests_of_a_key)]
        deadline = time.monotonic() + 60
        try:
            while ask("/tokenize", "one", {"prompt": "a"}) != 429:
                assert time.monotonic() < deadline
            for path, body in BODIES.items():
                assert ask(path, "one", body) == 429, path
                if "token" in path:  # the others wait for the engine
                    assert ask(path, "other", body) == 200, path
            assert http.get("/health", headers=key("one")).status_code == 200
            for connection in opened[-8:]:
                connection.close()
            while ask("/tokenize", "one", {"prompt": "a"}) != 200:
                assert time.monotonic() < deadline
            # Eight more than the request itself are one too many.
            assert ask("/v1/completions", "one", {"prompt": ["a"] * 9, "max_tokens": 1}) == 429
            assert ask("/v1/embeddings", "one", {"input": ["a"] * 9}) == 429
        finally:
            for connection in opened:
                connection.close()
        while ask("/v1/embeddings", "one", {"input": ["a"] * 200}) != 200:
            assert time.monotonic() < deadline + 60  # and all places are given back


# -- the log


def test_each_request_has_a_line_without_secrets_or_text(keyed: Server) -> None:
    asked = {"prompt": "a secret text", "max_tokens": 3, "ignore_eos": True}
    for path in ("/v1/completions", "/v1/completions?token=sk-query", "/none%0aINFO%1b[31m"):
        url = f"{keyed.url}{path}"
        httpx.post(url, json=asked, headers=key("one"))
    httpx.get(f"{keyed.url}/v1/models", headers=key("sk-wrong-key"))
    httpx.get(f"{keyed.url}/health", headers=key("one"))
    deadline = time.monotonic() + 10
    while "/v1/models 401" not in keyed.log.read_text():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    log = keyed.log.read_text()
    when = r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d  "
    took = r" \d+\.\d\d s"
    tokens = r"  pocket  prompt \d+ \(cached \d+\)  completion 3$"
    line = f"{when}POST /v1/completions 200{took}{tokens}"
    assert len(re.findall(line, log, re.MULTILINE)) >= 2
    assert re.search(rf"{when}POST /none%0AINFO%1B%5B31m 404{took}$", log, re.MULTILINE)
    assert re.search(rf"{when}GET /v1/models 401{took}$", log, re.MULTILINE)
    for hidden in ("secret text", "sk-query", "sk-wrong-key", "GET /health", "\x1b", "INFO\x1b"):
        assert hidden not in log


def test_a_line_escapes_what_clients_choose() -> None:
    scope = {
        "path": "/\x1b]0;x\x07 \u202e\n" + "y" * 500,
        "method": "POST\n2026",
        "model": "my model\n\x1b",
        "usage": Usage(5, 3, 2),
    }
    line = line_of(scope, 200, 1.234)
    assert line.isascii()
    assert line.isprintable()
    assert len(line) < 250
    assert line.endswith(" 200 1.23 s  my model%0A%1B  prompt 5 (cached 3)  completion 2")


def test_no_line_is_printed_if_none_is_wanted(server_home: Any) -> None:
    server = start_server(server_home, "--quiet")
    assert httpx.post(f"{server.url}/v1/chat/completions", json=CHAT).status_code == 200
    end(server)
    assert "/v1/chat/completions 200" not in server.log.read_text()


def test_a_reader_who_has_stopped_holds_nobody_up() -> None:
    written: list[str] = []

    def write(line: str) -> None:
        written.append(line)
        time.sleep(2)

    log, began_s = RequestLog(write), time.monotonic()
    scope = {"path": "/v1/models", "method": "GET"}
    for _ in range(5000):
        log.add(scope, 200, began_s)
    log.add(scope, None, began_s)
    assert time.monotonic() - began_s < 1.5
    log.close()
    assert time.monotonic() - began_s < 3
    assert 1 <= len(written) < 10
