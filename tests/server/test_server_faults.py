"""What clients and the engine do wrong, and what the others notice of it: nothing."""

import json
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai import APIError, AuthenticationError, InternalServerError, OpenAI
from server.conftest import Server, end, start_server

from localllm.server.limits import LIMITS

QUESTION = [{"role": "user", "content": "What is the KV cache?"}]
CHAT = "/v1/chat/completions"


def golden(client: OpenAI) -> str:
    answer = client.chat.completions.create(
        model="pocket", messages=QUESTION, temperature=0, max_tokens=24
    )
    return answer.choices[0].message.content or ""


def load_at_rest(server: Any) -> dict[str, int]:
    """What the engine says of its load, once that is newer than what was done, and at rest."""
    time.sleep(2.5)
    deadline = time.monotonic() + 30
    while True:
        load: dict[str, int] = httpx.get(f"{server.url}/health").json()["load"]
        is_busy = load["running"] or load["waiting"] or load["used_blocks"]
        if not is_busy or time.monotonic() > deadline:
            return load
        time.sleep(0.2)


def assert_refused(response: httpx.Response, status: int) -> dict[str, Any]:
    assert response.status_code == status, response.text
    error = response.json()["error"]
    is_anthropic = response.request.url.path.startswith("/v1/messages")
    names = {"message", "type"} | (set() if is_anthropic else {"param", "code"})
    assert error.keys() == names
    assert error["message"]
    return dict(error)


def test_a_foreign_name_or_origin_is_refused_on_every_route(server: Any) -> None:
    port = urlsplit(server.url).port
    for path, method in (("/health", "GET"), ("/v1/models", "GET"), (CHAT, "POST"), ("/x", "GET")):
        for headers, status in (
            ({"Host": "evil.example"}, 400),
            ({"Host": f"evil.example:{port}"}, 400),
            ({"Origin": "http://evil.example"}, 403),
            ({"Origin": "http://localhost:1"}, 403),
            ({"Origin": "null"}, 403),
        ):
            found = httpx.request(method, server.url + path, headers=headers, json={})
            assert_refused(found, status)
            assert "access-control-allow-origin" not in found.headers
    assert httpx.get(f"{server.url}/health", headers={"Origin": server.url}).status_code == 200
    assert httpx.get(f"{server.url}/health", headers={"Host": f"localhost:{port}"}).is_success


@pytest.fixture(scope="module")
def locked_server(server_home: Path) -> Iterator[Server]:
    """One that asks for a key, and that the pages of one origin may ask."""
    keys = ("--api-key", "secret", "--api-key", "other")
    server = start_server(server_home, *keys, "--allowed-origin", "http://page.example")
    yield server
    assert end(server) == 143


def test_a_key_is_asked_for_on_every_route(locked_server: Server) -> None:
    server = locked_server
    for path in ("/health", "/v1/models", "/nothing"):
        assert_refused(httpx.get(server.url + path), 401)
    with pytest.raises(AuthenticationError) as caught:
        golden(server.client("wrong"))
    assert caught.value.code == "invalid_api_key"
    first, second = server.client("secret"), server.client("other")
    long = {"model": "pocket", "prompt": "word " * 300, "max_tokens": 1, "temperature": 0}

    def cached(client: OpenAI) -> int:
        usage = client.completions.create(**long).usage
        assert usage is not None
        assert usage.prompt_tokens_details is not None
        return usage.prompt_tokens_details.cached_tokens or 0

    # What one key has computed makes the other no faster.
    assert [cached(client) > 0 for client in (first, first, second, second)] == [
        False,
        True,
        False,
        True,
    ]


def test_bodies_that_are_none(server: Any, client: OpenAI) -> None:
    text = golden(client)
    url = server.url + CHAT
    plain = {"Content-Type": "application/json"}
    assert_refused(httpx.post(url, content=b"{", headers=plain), 400)
    assert_refused(httpx.post(url, content=b"[" * 100_000, headers=plain), 400)
    assert_refused(httpx.post(url, content=b'{"a":' * 30_000, headers=plain), 400)
    assert_refused(httpx.post(url, content=b'{"a":' * 100_000, headers=plain), 413)
    assert_refused(httpx.post(url, content=b"\xff\xfe", headers=plain), 400)
    assert_refused(httpx.post(url, json=[]), 400)
    assert_refused(httpx.post(url, json={"messages": []}), 400)
    packed = {**plain, "Content-Encoding": "gzip"}
    assert_refused(httpx.post(url, content=b"{}", headers=packed), 415)
    assert_refused(httpx.get(url), 405)
    assert_refused(httpx.get(f"{server.url}/v1/nothing"), 404)
    big = b'{"messages":[{"role":"user","content":"' + b"x" * LIMITS.body_bytes + b'"}]}'
    assert_refused(httpx.post(url, content=big, headers=plain), 413)

    def pieces() -> Any:
        for start in range(0, len(big), 1 << 16):
            yield big[start : start + (1 << 16)]

    assert_refused(httpx.post(url, content=pieces(), headers=plain), 413)
    assert golden(client) == text


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(1 << 70), 1 << 70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3)
    ),
    max_leaves=6,
)
NAMES = [
    *("messages", "prompt", "temperature", "top_p", "top_k", "min_p", "n", "stop", "max_tokens"),
    *("max_completion_tokens", "seed", "logit_bias", "logprobs", "top_logprobs", "stream"),
    *("stream_options", "presence_penalty", "frequency_penalty", "repetition_penalty", "tools"),
    *("tool_choice", "response_format", "model", "user", "reasoning_effort", "echo", "best_of"),
    *("suffix", "tokens", "add_special_tokens", "chat_template_kwargs"),
]
bodies = st.dictionaries(st.sampled_from(NAMES), json_values, max_size=6)


@pytest.mark.parametrize("num_bodies", [50, pytest.param(150, marks=pytest.mark.slow)])
def test_whatever_a_body_holds_is_refused_in_form_or_answered(
    server: Any, client: OpenAI, num_bodies: int
) -> None:
    text = golden(client)
    paths = ["/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"]
    sound = {
        "messages": QUESTION,
        "prompt": "a",
        "max_tokens": 1,
        "tokens": [1, 2],
    }
    with httpx.Client(base_url=server.url) as http:

        @settings(max_examples=num_bodies, deadline=None)
        @given(st.sampled_from(paths), bodies, st.booleans())
        def ask(path: str, body: dict[str, Any], is_mutated: bool) -> None:
            if is_mutated:
                body = {**sound, **body}
            if body.get("n") in (2, 3, 4, 5, 6, 7, 8) or body.get("max_tokens") not in (None, 1):
                body["max_tokens"] = 1
            response = http.post(path, json=body)
            assert response.status_code < 500, (body, response.text)
            if response.status_code != 200:
                assert_refused(response, response.status_code)

        ask()
    assert golden(client) == text


def test_a_client_that_leaves_ends_its_request(server: Any, client: OpenAI) -> None:
    text = golden(client)
    address = (urlsplit(server.url).hostname, urlsplit(server.url).port)
    opened = []
    for is_streamed in 6 * (True, False):
        body = json.dumps(
            {
                "prompt": "word " * 50,
                "max_tokens": 1900,
                "ignore_eos": True,
                "stream": is_streamed,
                "n": 4,
            }
        )
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n"
            "Content-Type: application/json\r\n\r\n"
        )
        connection = socket.create_connection(address)
        connection.sendall((head + body).encode())
        opened.append(connection)
    time.sleep(0.5)
    for connection in opened:
        connection.close()
    found = load_at_rest(server)
    assert found["running"] == found["waiting"] == 0
    assert found["used_blocks"] == 0
    assert golden(client) == text


def test_an_engine_that_dies_ends_its_requests_and_comes_back(serve: Callable[..., Any]) -> None:
    server = serve()
    client = server.client()
    text = golden(client)
    [engine] = children(server.process.pid)

    def talk(number: int) -> tuple[float, str]:
        try:
            stream = client.completions.create(
                model="pocket",
                prompt=f"{number}",
                max_tokens=1900,
                stream=True,
                extra_body={"ignore_eos": True},
            )
            for _ in stream:
                pass
        except APIError as error:
            return time.monotonic(), str(error)
        return time.monotonic(), "no error"

    with ThreadPoolExecutor(16) as pool:
        talks = [pool.submit(talk, number) for number in range(16)]
        time.sleep(1.5)
        os.kill(engine, signal.SIGKILL)
        killed = time.monotonic()
        ends = [each.result() for each in talks]
    assert all("engine ended during request" in message for _, message in ends), ends
    assert max(at for at, _ in ends) - killed < 2
    found = httpx.get(f"{server.url}/health")
    assert found.status_code == 503
    assert found.json()["status"] == "starting"
    with pytest.raises(InternalServerError) as caught:
        golden(client)
    assert caught.value.status_code == 503
    deadline = time.monotonic() + 60
    while httpx.get(f"{server.url}/health").status_code != 200:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert golden(client) == text
    assert httpx.get(f"{server.url}/health").json()["restarts"] == 1


def test_what_is_under_way_is_finished_before_the_end(serve: Callable[..., Any]) -> None:
    server = serve()
    client = server.client()
    stream = client.completions.create(
        model="pocket",
        prompt="a",
        max_tokens=400,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    first = next(iter(stream))
    server.process.terminate()
    rest = list(stream)
    assert first.choices[0].finish_reason is None
    assert rest[-1].choices[0].finish_reason == "length"
    assert server.process.wait(timeout=30) == 143
    assert children(server.process.pid) == []


def children(pid: int) -> list[int]:
    """Processes of an engine that `pid` has started."""
    found = []
    for place in Path("/proc").glob("[0-9]*"):
        try:
            status, words = (place / "status").read_text(), (place / "cmdline").read_bytes()
        except OSError:  # it has ended
            continue
        if f"\nPPid:\t{pid}\n" in status and b"engine_process" in words:
            found.append(int(place.name))
    return found


@pytest.mark.parametrize("count", [24, pytest.param(40, marks=pytest.mark.slow)])
def test_many_at_once_each_get_what_they_get_alone(server: Any, client: OpenAI, count: int) -> None:
    prompts = [f"Number {i}: the cache" for i in range(count)]

    def complete(prompt: str) -> str:
        answer = client.completions.create(
            model="pocket", prompt=prompt, temperature=0, max_tokens=16
        )
        return answer.choices[0].text

    alone = [complete(prompt) for prompt in prompts]
    with ThreadPoolExecutor(count) as pool:
        assert list(pool.map(complete, prompts)) == alone


def test_a_page_of_an_allowed_origin_may_ask_and_read(locked_server: Server) -> None:
    page, server = {"Origin": "http://page.example"}, locked_server
    asked = httpx.options(server.url + CHAT, headers=page)
    assert asked.status_code == 204
    assert asked.headers["access-control-allow-origin"] == "http://page.example"
    assert "authorization" in asked.headers["access-control-allow-headers"]
    headers = {**page, "Authorization": "Bearer secret"}
    found = httpx.get(f"{server.url}/v1/models", headers=headers)
    assert found.status_code == 200
    assert found.headers["access-control-allow-origin"] == "http://page.example"
    assert_refused(httpx.get(f"{server.url}/v1/models", headers=page), 401)
    other = {"Origin": "http://other.example", "Authorization": "Bearer secret"}
    assert_refused(httpx.get(f"{server.url}/v1/models", headers=other), 403)
    # With a key any name will do.
    named = {"Host": "box.lan:8000", "Authorization": "Bearer secret"}
    assert httpx.get(f"{server.url}/v1/models", headers=named).status_code == 200


def test_ctrl_c_ends_the_engine_too(serve: Callable[..., Any]) -> None:
    server = serve()
    [engine] = children(server.process.pid)
    server.process.send_signal(signal.SIGINT)
    assert server.process.wait(timeout=30) == 130
    deadline = time.monotonic() + 5
    while Path(f"/proc/{engine}").exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_long_list_of_wrong_things_costs_no_more_than_one(server: Any) -> None:
    for path, body in (
        ("/detokenize", {"tokens": [-1] * 250_000}),
        ("/v1/completions", {"prompt": [-1] * 250_000}),
        ("/v1/completions", {"prompt": ["a", *[1.5] * 250_000]}),
        (CHAT, {"messages": [1] * 250_000}),
    ):
        began = time.monotonic()
        error = assert_refused(httpx.post(server.url + path, json=body, timeout=30), 400)
        assert time.monotonic() - began < 3
        assert len(error["message"]) < 600


def test_the_description_of_the_routes_is_whole(server: Any) -> None:
    document = httpx.get(f"{server.url}/openapi.json").json()
    assert {CHAT, "/v1/completions", "/tokenize", "/health"} <= document["paths"].keys()

    def check(value: Any) -> None:
        if isinstance(value, dict):
            if isinstance(value.get("$ref"), str):
                kind, _, name = value["$ref"].rpartition("/")
                assert kind == "#/components/schemas"
                assert name in document["components"]["schemas"]
            for each in value.values():
                check(each)
        elif isinstance(value, list):
            for each in value:
                check(each)

    check(document)
