"""The page at `/` and the conversations that it shows; see test_page_in_a_browser for the rest."""

import base64
import hashlib
import re
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from server.conftest import Server, page_token

HTML = {"accept": "text/html,application/xhtml+xml,*/*;q=0.8"}
TURN = {"question": "What?", "answer": "That.", "thinking": "", "finish_reason": "stop"}


@pytest.fixture
def page(opened: tuple[Server, str]) -> Iterator[httpx.Client]:
    server, token = opened
    with httpx.Client(base_url=server.url, headers={"x-localllm-token": token}) as client:
        yield client


def test_a_browser_gets_the_page_and_others_some_lines(server: Server) -> None:
    page = httpx.get(server.url, headers=HTML)
    assert page.headers["content-type"].startswith("text/html")
    assert httpx.get(server.url).headers["content-type"].startswith("text/plain")


def test_only_what_is_in_the_page_runs_and_it_asks_nobody_else(server: Server) -> None:
    page = httpx.get(server.url, headers=HTML)
    policy = dict(
        each.strip().split(" ", 1) for each in page.headers["content-security-policy"].split(";")
    )
    for tag, name in (("script", "script-src"), ("style", "style-src")):
        [inside] = re.findall(f"<{tag}>(.*?)</{tag}>", page.text, flags=re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(inside.encode()).digest()).decode()
        assert policy[name] == f"'sha256-{digest}'"
    assert policy["default-src"] == "'none'"
    assert policy["connect-src"] == "'self'"
    assert policy["frame-ancestors"] == "'none'"
    # Nothing of it comes from elsewhere, and no text of an answer becomes HTML.
    assert not re.search(r"(src|href|action)\s*=\s*[\"']", page.text.split("<script>")[0])
    assert not re.search(
        r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(", page.text
    )


def test_a_conversation_is_saved_continued_listed_and_removed(page: httpx.Client) -> None:
    body: dict[str, Any] = {"model": "pocket", "system": None, "turns": [TURN]}
    made = page.post("/page/conversations", json=body).json()
    assert made["revision"] == 0
    path = f"/page/conversations/{made['id']}"
    body |= {"turns": [TURN, {"question": "And why?"}], "revision": 0}
    assert page.post(path, json=body).json()["revision"] == 1
    # Another window, which has not seen that.
    late = page.post(path, json=body)
    assert (late.status_code, late.json()["error"]["code"]) == (409, "conflict")
    found = page.get(path).json()
    assert [turn["question"] for turn in found["turns"]] == ["What?", "And why?"]
    assert found["turns"][0]["answer"] == "That."
    [row] = page.get("/page/conversations").json()["conversations"]
    assert (row["title"], row["turns"]) == ("What?", 2)
    assert page.delete(path).status_code == 200
    assert page.get(path).status_code == page.delete(path).status_code == 404


@pytest.mark.parametrize(
    "body",
    [
        {"model": "pocket"},
        {"model": "pocket", "turns": [{"answer": "a"}]},
        {"model": "pocket", "turns": [{**TURN, "finish_reason": "tired"}]},
        {"model": "pocket", "turns": [], "revision": -1},
    ],
)
def test_what_is_no_conversation_is_refused(page: httpx.Client, body: dict[str, Any]) -> None:
    assert page.post("/page/conversations", json=body).status_code == 400


@pytest.mark.parametrize("token", [None, "", "wrong"])
def test_conversations_are_shown_to_the_token_alone(
    opened: tuple[Server, str], token: str | None
) -> None:
    headers = {} if token is None else {"x-localllm-token": token}
    for method, path in (
        ("GET", "/page/conversations"),
        ("GET", "/page/conversations/1"),
        ("DELETE", "/page/conversations/1"),
        ("GET", f"/page/conversations/{'9' * 5000}"),
    ):
        refused = httpx.request(method, opened[0].url + path, headers=headers)
        assert (refused.status_code, refused.json()["error"]["code"]) == (403, "no_token")


@pytest.mark.parametrize("number", ["9" * 5000, "9" * 19, "-1", "+1", "1.5", "x", "%D9%A1", "1_0"])
def test_what_is_no_number_is_no_conversation(page: httpx.Client, number: str) -> None:
    path = f"/page/conversations/{number}"
    body = {"model": "pocket", "turns": []}
    for found in (page.get(path), page.delete(path), page.post(path, json=body)):
        assert found.status_code == 404
        assert len(found.text) < 300


def test_without_open_there_is_no_token_that_fits(server: Server) -> None:
    found = httpx.get(f"{server.url}/page/conversations", headers={"x-localllm-token": "None"})
    assert found.status_code == 403


def test_the_guards_hold_for_the_page(serve: Callable[..., Server]) -> None:
    server = serve("--api-key", "secret", "--open")
    headers = {"x-localllm-token": page_token(server)}
    # The page alone needs no key: it asks for one.
    assert httpx.get(server.url, headers=HTML).status_code == 200
    assert httpx.get(server.url).status_code == 401
    rows = f"{server.url}/page/conversations"
    assert httpx.get(rows, headers=headers | HTML).status_code == 401
    allowed = headers | {"authorization": "Bearer secret"}
    assert httpx.get(rows, headers=allowed).status_code == 200
    foreign = allowed | {"origin": "http://elsewhere.example"}
    assert httpx.get(rows, headers=foreign).status_code == 403
    assert httpx.get(server.url, headers=HTML | {"origin": "null"}).status_code == 403


def test_a_name_that_resolves_to_this_machine_gets_no_page(server: Server) -> None:
    refused = httpx.get(server.url, headers=HTML | {"host": "rebound.example"})
    assert refused.status_code == 400
