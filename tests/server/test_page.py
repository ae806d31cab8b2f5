"""The page at `/` and the conversations that it shows; see test_page_in_a_browser for the rest."""

import hashlib
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from server.conftest import ROOT, Server, page_token

from localllm.server.page import PAGE_PATHS

HTML = {"accept": "text/html,application/xhtml+xml,*/*;q=0.8"}
TURN = {
    "question": "What?",
    "answer": "That.",
    "thinking": "",
    "finish_reason": "stop",
    "model": "pocket",
    "figures": "5 tokens · 10.0/s",
}
PAGE = ROOT / "localllm" / "server" / "page"
VENDOR = PAGE / "vendor"


@pytest.fixture
def page(opened: tuple[Server, str]) -> Iterator[httpx.Client]:
    server, token = opened
    with httpx.Client(base_url=server.url, headers={"x-localllm-token": token}) as client:
        yield client


def test_a_browser_gets_the_page_and_others_some_lines(server: Server) -> None:
    page = httpx.get(server.url, headers=HTML)
    assert page.headers["content-type"].startswith("text/html")
    assert httpx.get(server.url).headers["content-type"].startswith("text/plain")


def test_only_the_pages_own_files_run_and_it_asks_nobody_else(server: Server) -> None:
    page, again = (httpx.get(server.url, headers=HTML) for _ in range(2))
    policy = dict(
        each.strip().split(" ", 1) for each in page.headers["content-security-policy"].split(";")
    )
    [nonce] = set(re.findall(r'nonce="([^"]+)"', page.text))
    assert policy["script-src"] == policy["style-src"] == f"'nonce-{nonce}'"
    assert nonce not in again.text
    assert policy["default-src"] == "'none'"
    assert policy["connect-src"] == "'self'"
    assert policy["frame-ancestors"] == "'none'"
    assert policy["require-trusted-types-for"] == "'script'"
    # Nothing of it comes from elsewhere, and no text of an answer becomes HTML.
    loaded = re.findall(r"(?:src|href|action)\s*=\s*[\"']([^\"'#]+)", page.text)
    assert loaded
    assert set(loaded) <= PAGE_PATHS
    for path in PAGE / "page.html", *PAGE.glob("*.js"):
        assert not re.search(
            r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|style=|onclick=",
            path.read_text(),
        ), path


def test_each_file_of_the_page_is_served_and_nothing_else(server: Server) -> None:
    there = {f"/page/{path.relative_to(PAGE)}" for path in PAGE.rglob("*.*")}
    asides = {"/page/page.html", "/page/vendor/README.md"}
    assert {path for path in there - asides if not path.endswith(".LICENSE")} == PAGE_PATHS
    with httpx.Client(base_url=server.url) as client:
        for path in PAGE_PATHS:
            found = client.get(path)
            assert found.content == (PAGE / path.removeprefix("/page/")).read_bytes()
            assert found.headers["x-content-type-options"] == "nosniff"
            kind = found.headers["content-type"].partition(";")[0]
            suffixes = {".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}
            assert kind == suffixes[Path(path).suffix]
            known = {"if-none-match": found.headers["etag"]}
            assert client.get(path, headers=known).status_code == 304
        assert client.get("/page/vendor/README.md").status_code == 404


def test_the_libraries_are_as_they_were_published() -> None:
    rows = re.findall(r"\| `(\S+\.js)` \|.*`([0-9a-f]{64})`", (VENDOR / "README.md").read_text())
    assert {name for name, _ in rows} == {path.name for path in VENDOR.glob("*.js")}
    for name, digest in rows:
        assert hashlib.sha256((VENDOR / name).read_bytes()).hexdigest() == digest
        assert (VENDOR / name).with_suffix(".LICENSE").is_file()


def test_the_page_is_told_what_the_model_can_do(server: Server) -> None:
    told = httpx.get(f"{server.url}/page/model").json()
    assert told == {"id": "pocket", "context_length": 2048, "most_tokens": 2048, "thinks": False}


def saved(page: httpx.Client, *turns: dict[str, Any], **fields: Any) -> dict[str, Any]:
    body = {"model": "pocket", "turns": list(turns), **fields}
    return page.post("/page/conversations", json=body).raise_for_status().json()


def test_a_conversation_is_saved_continued_listed_and_removed(page: httpx.Client) -> None:
    made = saved(page, TURN)
    assert made["revision"] == 0
    path = f"/page/conversations/{made['id']}"
    # Only what is new is sent.
    body = {"model": "pocket", "turns": [{"question": "And why?"}], "keep": 1, "revision": 0}
    assert page.post(path, json=body).json() == {"id": made["id"], "revision": 1, "apart": False}
    found = page.get(path).json()
    assert [turn["question"] for turn in found["turns"]] == ["What?", "And why?"]
    assert found["turns"][0] == TURN
    [row] = page.get("/page/conversations").json()["conversations"]
    assert (row["title"], row["turns"]) == ("What?", 2)
    assert page.delete(path).status_code == 200
    assert page.get(path).status_code == page.delete(path).status_code == 404
    assert page.post(path, json=body).status_code == 404


def test_a_reloaded_page_joins_what_its_last_save_brought(page: httpx.Client) -> None:
    begun = {"question": "Why?", "answer": "Be"}
    made = saved(page, TURN, begun)
    path = f"/page/conversations/{made['id']}"
    # The page before it saved more of the answer, which this one knew, but not the revision.
    late = {"model": "pocket", "turns": [{**begun, "answer": "Beca"}], "keep": 1, "revision": 0}
    assert page.post(path, json=late).status_code == 200
    now = {"model": "pocket", "turns": [{**begun, "answer": "Because"}], "keep": 1, "revision": 0}
    conflict = page.post(path, json=now)
    assert (conflict.status_code, conflict.json()["error"]["code"]) == (409, "conflict")
    whole = {**now, "turns": [TURN, *now["turns"], {"question": "Yes?"}], "keep": 0}
    told = page.post(path, json=whole).json()
    assert told == {"id": made["id"], "revision": 2, "apart": False}
    assert [turn["answer"] for turn in page.get(path).json()["turns"]] == ["That.", "Because", ""]
    # What comes too late changes nothing.
    told = page.post(path, json={**late, "turns": [TURN, *late["turns"]], "keep": 0}).json()
    assert (told["id"], told["apart"]) == (made["id"], False)
    assert page.get(path).json()["turns"][1]["answer"] == "Because"
    page.delete(path)


def test_what_another_window_contradicts_is_kept_apart(page: httpx.Client) -> None:
    made = saved(page, TURN)
    path = f"/page/conversations/{made['id']}"
    one = {"model": "pocket", "turns": [TURN, {"question": "And why?"}], "revision": 0}
    assert page.post(path, json=one).json()["apart"] is False
    other = {"model": "pocket", "turns": [TURN, {"question": "And how?"}], "revision": 0}
    told = page.post(path, json=other).json()
    assert told["apart"] is True
    apart = f"/page/conversations/{told['id']}"
    assert page.get(path).json()["turns"][1]["question"] == "And why?"
    assert page.get(apart).json()["turns"][1]["question"] == "And how?"
    page.delete(path)
    page.delete(apart)


def test_a_draft_is_saved_once_however_often_it_is_sent(page: httpx.Client) -> None:
    first = saved(page, {"question": "Why?"}, draft="one")
    again = saved(page, {"question": "Why?", "answer": "So."}, draft="one")
    other = saved(page, {"question": "Why?"}, draft="two")
    assert again["id"] == first["id"] != other["id"]
    for made in (first, other):
        page.delete(f"/page/conversations/{made['id']}")
    # It was deleted: it is a new one.
    renewed = saved(page, {"question": "Why?"}, draft="one")
    assert renewed["id"] not in (first["id"], other["id"])
    page.delete(f"/page/conversations/{renewed['id']}")


def test_a_conversation_is_called_by_what_was_typed_until_it_is_renamed(page: httpx.Client) -> None:
    asked = {"question": "Sum it up.\n\nlong.txt:\n\nOnce upon a time", "answer": "Über alles."}
    made = saved(page, asked, title="Sum it up.")
    other = saved(page, TURN)

    def titles(containing: str = "") -> list[str]:
        found = page.get("/page/conversations", params={"containing": containing}).json()
        return [row["title"] for row in found["conversations"]]

    path = f"/page/conversations/{made['id']}"
    assert titles() == ["What?", "Sum it up."]
    assert titles("über") == titles("UPON a") == ["Sum it up."]
    assert page.post(f"{path}/name", json={"name": " Tale "}).json()["name"] == "Tale"
    assert titles("tale") == titles("upon") == ["Tale"]
    taken = page.post(f"/page/conversations/{other['id']}/name", json={"name": "Tale"})
    assert (taken.status_code, titles()) == (400, ["What?", "Tale"])
    assert page.post(f"{path}/name", json={"name": "12"}).status_code == 400
    page.post(f"{path}/name", json={"name": ""})
    assert titles("nothing at all") == []
    assert titles() == ["What?", "Sum it up."]
    for each in (made, other):
        page.delete(f"/page/conversations/{each['id']}")


@pytest.mark.parametrize(
    "body",
    [
        {"model": "pocket"},
        {"model": "pocket", "turns": [{"answer": "a"}]},
        {"model": "pocket", "turns": [{**TURN, "finish_reason": "tired"}]},
        {"model": "pocket", "turns": [], "draft": "x" * 65},
        {"model": "pocket", "turns": [{**TURN, "figures": "x" * 1001}]},
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
        ("GET", "/page/token"),
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
    # The page and its files alone need no key: it asks for one.
    assert httpx.get(server.url, headers=HTML).status_code == 200
    assert httpx.get(f"{server.url}/page/page.js").status_code == 200
    assert httpx.get(f"{server.url}/page/model").status_code == 401
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
