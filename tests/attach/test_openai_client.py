"""What a server may answer, and never does well: each is an error in clear words, and soon."""

import gzip
import json
import os
import shutil
import socket
import ssl
import subprocess
import sys
import threading
import time
import tracemalloc
from codecs import BOM_UTF8
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import repeat
from pathlib import Path
from typing import Any

import pytest
from small_server import Answer, event, head, models, reply, small_server, stream

from localllm.attach import openai_chunks, openai_client, remote
from localllm.attach.openai_client import Endpoint
from localllm.attach.remote import open_remote
from localllm.bench.remote import Server
from localllm.chat.conversation import ChatSession
from localllm.errors import ContextLengthError, ExitCode, LocalLLMError, RequestError
from localllm.schedule.sampling_params import SamplingParams

MODELS, CHAT = "/v1/models", "/v1/chat/completions"
DEEP = b'{"data":' + b"[" * 200_000
STREAM = ("Content-Type: text/event-stream", "Connection: close")
CHUNKED = ("Content-Type: text/event-stream", "Transfer-Encoding: chunked")
WORD = {"choices": [{"delta": {"content": "It"}}]}
END = {"choices": [{"delta": {}, "finish_reason": "stop"}]}


def without_end(*first: bytes, then: bytes) -> Callable[[], Iterator[bytes]]:
    """These bytes, and then the same ones again and again."""

    def pieces() -> Iterator[bytes]:
        yield from first
        yield from repeat(then)

    return pieces


def after(seconds: float, *pieces: bytes) -> Callable[[], Iterator[bytes]]:
    """The pieces, each after a pause."""

    def paused() -> Iterator[bytes]:
        for piece in pieces:
            time.sleep(seconds)
            yield piece

    return paused


def said(usage: object = None, **changed: object) -> bytes:
    """A stream whose only word is followed by a chunk with other things in it."""
    return stream(WORD, {**END, **changed}, {"choices": [], "usage": usage})


def of_models(**fields: object) -> bytes:
    return models({"data": [{"id": "small", **fields}]})


@pytest.fixture(autouse=True)
def _smaller(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bound in bytes is that of a test."""
    monkeypatch.setattr(openai_chunks, "MAX_STREAM_BYTES", 2 << 20)


def lose_patience_soon(monkeypatch: pytest.MonkeyPatch, *, has_begun: bool) -> None:
    """For servers that take too long; others may take as long as a busy machine makes them.
    `has_begun`: with their answer; what comes before it is such another.
    """
    monkeypatch.setattr(openai_client, "SHORT_REPLY_S", 2 if has_begun else 0.4)
    monkeypatch.setattr(openai_client, "SILENCE_S", 2 if has_begun else 0.6)
    monkeypatch.setattr(remote, "SILENCE_S", 0.4)


def ask(url: str) -> str:
    """What a server says, as `chat --remote` asks it."""
    session = ChatSession(open_remote(url, None, "secret"))
    completion, events = session.reply("Is it?", SamplingParams())
    try:
        for _ in events:
            pass
    finally:
        events.close()
    if completion.error is not None:
        raise completion.error
    return completion.text


HOSTILE: dict[str, tuple[str, Answer, str]] = {
    # The list of models.
    "models: a number": (MODELS, models(1), "does not answer like"),
    "models: a list": (MODELS, models([]), "does not answer like"),
    "models: data is null": (MODELS, models({"data": None}), "does not answer like"),
    "models: data is an object": (MODELS, models({"data": {"id": "x"}}), "does not answer like"),
    "models: a text in them": (MODELS, models({"data": ["small"]}), "does not answer like"),
    "models: null in them": (MODELS, models({"data": [None]}), "does not answer like"),
    "models: an id that is a number": (MODELS, of_models(id=7), "a model's id is 7"),
    "models: an id that is a list": (MODELS, of_models(id=[[]]), "a model's id is"),
    "models: an empty id": (MODELS, of_models(id=""), "a model's id is ''"),
    "models: none": (MODELS, models({"data": []}), "has no model"),
    "models: a length that is a text": (MODELS, of_models(max_model_len="long"), "max_model_len"),
    "models: a length below zero": (MODELS, of_models(max_model_len=-4), "max_model_len is -4"),
    "models: a length without end": (
        MODELS,
        reply(b'{"data":[{"id":"x","max_model_len":1e999}]}'),
        "max_model_len is inf",
    ),
    "models: not UTF-8": (MODELS, reply(b'{"data":[{"id":"\xff"}]}'), "it is not UTF-8"),
    "models: nested": (MODELS, reply(DEEP), "nested too deeply"),
    "models: a number of 5000 figures": (MODELS, reply(b'{"data":' + b"9" * 5000), "answer like"),
    "models: HTML": (MODELS, reply(b"<html>", kind="text/html"), "does not answer like"),
    "models: nothing": (MODELS, reply(b""), "does not answer like"),
    "models: no content": (MODELS, head("204 No Content"), "does not answer like"),
    "models: cut": (MODELS, head("200 OK", "Content-Length: 900") + b'{"data":', "broke"),
    "models: without end": (
        MODELS,
        without_end(head(), b'{"data":[', then=b"[],[],[],[],[],[]," * 4096),
        "answers with over 8,388,608 bytes",
    ),
    "models: a byte now and then": (
        MODELS,
        after(0.1, head(), *[b" "] * 50),
        "has not answered within",
    ),
    "models: silence": (MODELS, after(2.0, b""), "has not answered within"),
    # HTTP.
    "no HTTP": (CHAT, b"SSH-2.0-OpenSSH_9.6\r\n", "does not speak HTTP"),
    "a status that is none": (CHAT, b"HTTP/1.1 abc\r\n\r\n", "does not speak HTTP"),
    "nothing at all": (CHAT, b"", "does not speak HTTP: Server disconnected"),
    "a flood of fields": (
        CHAT,
        without_end(b"HTTP/1.1 200 OK\r\n", then=b"X: y\r\n" * 1000),
        "does not speak HTTP",
    ),
    "a field without end": (
        CHAT,
        without_end(b"HTTP/1.1 200 OK\r\nX: ", then=b"y" * 65536),
        "does not speak HTTP",
    ),
    "a head without end": (
        CHAT,
        without_end(then=b"HTTP/1.1 100 Continue\r\n\r\n" * 100),
        "has not answered within",
    ),
    "a head a byte at a time": (
        CHAT,
        after(0.1, *[b"H"] * 60),
        "has not answered within",
    ),
    "what is compressed": (
        CHAT,
        head("200 OK", "Content-Encoding: gzip", *STREAM) + gzip.compress(event(WORD) * 2),
        "there is no event",
    ),
    "chunks that are garbage": (CHAT, head("200 OK", *CHUNKED) + b"zz\r\nxx", "broke"),
    "chunks of a negative length": (
        CHAT,
        without_end(head("200 OK", *CHUNKED), b"-1\r\n", then=b"x" * 65536),
        "broke",
    ),
    "a chunk that is cut": (CHAT, head("200 OK", *CHUNKED) + b"ff\r\ndata: ", "broke"),
    "trailers without end": (
        CHAT,
        without_end(head("200 OK", *CHUNKED), b"0\r\n", then=b"X: y\r\n" * 1000),
        "broke",
    ),
    # The stream.
    "HTML": (CHAT, reply(b"<html>\n<p>hello\n", kind="text/html"), "content type: text/html"),
    "an object in the place of a stream": (CHAT, reply(b'{"choices":[]}'), "no event"),
    "an empty answer": (CHAT, reply(b""), "no event"),
    "an event that is no JSON": (CHAT, reply(b"data: so\n\n"), "answer like"),
    "an event that is a list": (CHAT, stream([]), "an event is not an object"),
    "an event that is a text": (CHAT, stream("so"), "an event is not an object"),
    "an event that is not UTF-8": (CHAT, reply(b'data: {"choices":"\xff"}\n\n'), "not UTF-8"),
    "an event that is nested": (CHAT, reply(b"data: " + DEEP + b"\n\n"), "nested too deeply"),
    "choices that are a text": (CHAT, stream({"choices": "so"}), "choices is not a list"),
    "choices that are an object": (CHAT, stream({"choices": {"0": 1}}), "choices is not a list"),
    "a choice that is a text": (CHAT, stream({"choices": ["so"]}), "a choice is not an object"),
    "a delta that is a text": (CHAT, stream({"choices": [{"delta": "so"}]}), "delta is no"),
    "a text that is a number": (
        CHAT,
        stream({"choices": [{"delta": {"content": 7}}]}),
        "7 instead of a text",
    ),
    "a text that is a list of numbers": (
        CHAT,
        stream({"choices": [{"delta": {"content": [7]}}]}),
        "a part of the content is not an object",
    ),
    "one object without an answer": (CHAT, reply(b'{"object": "so"}'), "does not answer like"),
    "one object with an error": (
        CHAT,
        reply(b'{"error": {"message": "broken"}, "choices": 0}'),
        "broken",
    ),
    "a call of a tool and no text": (
        CHAT,
        stream({"choices": [{"delta": {"tool_calls": [{"index": 0}]}}]}, END),
        "a call of a tool",
    ),
    "thoughts that are an object": (
        CHAT,
        stream({"choices": [{"delta": {"reasoning_content": {}, "reasoning": {"a": 1}}}]}),
        "instead of a text",
    ),
    "a reason that is a list": (
        CHAT,
        stream({"choices": [{"delta": {}, "finish_reason": ["stop"]}]}),
        "instead of a text",
    ),
    "usage that is a list": (CHAT, said([1]), "usage is not an object"),
    "a count that is a text": (CHAT, said({"prompt_tokens": "7"}), "prompt_tokens is '7'"),
    "a count that is true": (CHAT, said({"completion_tokens": True}), "completion_tokens is"),
    "a count below zero": (CHAT, said({"completion_tokens": -7}), "completion_tokens is -7"),
    "a count with a point": (CHAT, said({"prompt_tokens": 1.5}), "prompt_tokens is 1.5"),
    "a count without end": (
        CHAT,
        reply(event(WORD) + b'data: {"usage":{"prompt_tokens":1e999}}\n\n'),
        "prompt_tokens is inf",
    ),
    "a count that is no number": (
        CHAT,
        reply(event(WORD) + b'data: {"usage":{"prompt_tokens":NaN}}\n\n'),
        "prompt_tokens is nan",
    ),
    "a count of more than there is": (CHAT, said({"prompt_tokens": 10**30}), "prompt_tokens is"),
    "details that are a text": (
        CHAT,
        said({"prompt_tokens": 7, "prompt_tokens_details": "many"}),
        "prompt_tokens_details is not an object",
    ),
    "an answer that breaks off": (CHAT, reply(event(WORD)), "broke off its answer"),
    "an end without a reason": (CHAT, stream(WORD), "broke off its answer"),
    "a line without end": (
        CHAT,
        without_end(head("200 OK", *STREAM), b"data: ", then=b"x" * 65536),
        "a line of over 1,048,576 bytes",
    ),
    "comments without end": (
        CHAT,
        without_end(head("200 OK", *STREAM), then=b": alive\n\n" * 1000),
        "bytes without an event",
    ),
    "comments now and then": (
        CHAT,
        after(0.05, head("200 OK", *STREAM), *[b": alive\n\n"] * 100),
        "has said nothing for",
    ),
    "words without end": (
        CHAT,
        without_end(head("200 OK", *STREAM), then=event(WORD) * 100),
        "answers with over 2,097,152 bytes",
    ),
    "silence": (CHAT, after(3.0, b""), "has not answered within"),
    "silence in the middle": (
        CHAT,
        after(0.01, head("200 OK", *STREAM), event(WORD), *[b""] * 300),
        "has said nothing for",
    ),
    # Errors.
    "an error that is a number": (CHAT, reply(b"7", "500 No"), "status 500"),
    "an error that is a text": (CHAT, reply(b'{"error": "no room"}', "503 No"), "no room"),
    "an error whose message is a list": (
        CHAT,
        reply(b'{"error": {"message": [1], "code": [2]}}', "500 No"),
        "status 500",
    ),
    "an error that is not UTF-8": (CHAT, reply(b"\xff", "500 No"), "status 500"),
    "an error that is nested": (CHAT, reply(DEEP, "500 No"), "status 500"),
    "an error without end": (
        CHAT,
        without_end(head("500 No"), then=b"x" * 65536),
        "status 500",
    ),
    "an error that never comes": (CHAT, after(0.2, head("500 No"), *[b"x"] * 30), "status 500"),
    "an error in the middle": (CHAT, stream(WORD, {"error": {"message": "broken"}}), "broken"),
    "an error in the middle that is a list": (CHAT, stream(WORD, {"error": [1]}), "status 500"),
}


TOO_SLOW_LATER = ("comments now and then", "silence in the middle", "an error that never comes")
TOO_SLOW = (
    *TOO_SLOW_LATER,
    "models: a byte now and then",
    "models: silence",
    "a head without end",
    "a head a byte at a time",
    "silence",
)


@pytest.mark.parametrize("name", HOSTILE)
def test_what_a_server_must_not_answer_is_an_error_in_clear_words(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, answer, word = HOSTILE[name]
    if name in TOO_SLOW:
        lose_patience_soon(monkeypatch, has_begun=name in TOO_SLOW_LATER)
    began = time.monotonic()
    with small_server({path: answer}) as server, pytest.raises(LocalLLMError) as caught:
        ask(server.url)
    assert word in str(caught.value)
    assert time.monotonic() - began < 5
    assert len(str(caught.value)) < 1000


ODD_BUT_SOUND = {
    "comments, other fields and odd line ends": reply(
        b": alive\r\n\r\nevent: x\r\nid: 1\r\ndata:" + json.dumps(WORD).encode() + b"\r\n\r\n"
        b"data: \n\n" + event({"choices": [], "usage": None}) + event({**END, "error": None})
    ),
    "no [DONE]": reply(event(WORD) + event(END)),
    "the last line is open": reply(event(WORD) + event(END).strip()),
    "chunks": head("200 OK", *CHUNKED)
    + b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in (event(WORD), event(END)))
    + b"0\r\n\r\n",
    "usage without figures": stream(WORD, END, {"choices": [], "usage": {"prompt_tokens": None}}),
    "a byte-order mark": reply(BOM_UTF8 + event(WORD) + event(END)),
    "one object in the place of a stream": reply(
        json.dumps({"choices": [{"message": {"content": "It"}}]}, indent=1).encode()
    ),
    "one object behind a mark, as text": reply(
        BOM_UTF8 + json.dumps({"choices": [{"text": "It", "finish_reason": "stop"}]}).encode(),
        kind="text/plain",
    ),
    "parts": stream({"choices": [{"delta": {"content": [{"type": "text", "text": "It"}]}}]}, END),
    "a refusal": stream({"choices": [{"delta": {"content": None, "refusal": "It"}}]}, END),
    "text and a call of a tool": stream(
        {"choices": [{"delta": {"content": "It", "tool_calls": [{"index": 0}]}}]}, END
    ),
    "an unknown reason": stream(
        WORD, {"choices": [{"delta": None, "text": None, "finish_reason": "tool_calls"}]}
    ),
}


@pytest.mark.parametrize("answer", ODD_BUT_SOUND.values(), ids=ODD_BUT_SOUND)
def test_what_servers_do_answer_is_read(answer: bytes) -> None:
    with small_server({CHAT: answer}) as server:
        assert ask(server.url) == "It"


def of_words(*words: str) -> bytes:
    return stream(*({"choices": [{"delta": {"content": word}}]} for word in words), END)


@pytest.mark.parametrize(
    ("answer", "thinking", "text"),
    [
        (of_words("<th", "ink>\nIs", " it?\n</think>", "\n\nIt is."), "Is it?", "It is."),
        (of_words("\n<think>Is it?</think>It is."), "Is it?", "It is."),
        (of_words("[THINK]Is it?[/THINK]It is."), "Is it?", "It is."),
        (of_words("<think>Is it"), "Is it", ""),
        (of_words("<t", "able>"), "", "<table>"),
        (of_words("<"), "", "<"),
        (of_words("It is <think>."), "", "It is <think>."),
        (
            stream(
                {"choices": [{"delta": {"content": [{"type": "thinking", "thinking": [
                    {"type": "text", "text": "Is it?"}]}, {"type": "text", "text": "It is."}]}}]},
                END,
            ),
            "Is it?",
            "It is.",
        ),
    ],
)  # fmt: skip
def test_thoughts_that_a_server_leaves_in_the_answer_are_none_of_it(
    answer: bytes, thinking: str, text: str
) -> None:
    with small_server({CHAT: answer}) as server:
        model = open_remote(server.url, None, None)
        completion, events = ChatSession(model).reply("Is it so?", SamplingParams())
        for _ in events:
            pass
        assert (completion.thinking, completion.text) == (thinking, text)


def test_an_answer_ends_with_done_whatever_follows() -> None:
    answer = without_end(
        head("200 OK", *STREAM), event(WORD), event(END), b"data: [DONE]\n\n", then=event(WORD)
    )
    with small_server({CHAT: answer}) as server:
        assert ask(server.url) == "It"
        deadline = time.monotonic() + 5
        while any(thread.name == "remote-reader" for thread in threading.enumerate()):
            assert time.monotonic() < deadline  # the connection was let go
            time.sleep(0.01)


def test_a_line_without_end_takes_no_more_memory_than_a_line() -> None:
    answer = without_end(head("200 OK", *STREAM), b"data: ", then=b"x" * 65536)
    tracemalloc.start()
    try:
        with small_server({CHAT: answer}) as server, pytest.raises(LocalLLMError):
            ask(server.url)
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()


def test_a_reader_that_nobody_reads_ends() -> None:
    answer = without_end(head("200 OK", *STREAM), then=event(WORD) * 100)
    with small_server({CHAT: answer}) as server:
        model = open_remote(server.url, None, None)
        _, events = ChatSession(model).reply("Is it?", SamplingParams())
        next(events)
        began = time.monotonic()
        events.close()
        assert time.monotonic() - began < 0.2
        deadline = time.monotonic() + 5
        while any(thread.name == "remote-reader" for thread in threading.enumerate()):
            assert time.monotonic() < deadline
            time.sleep(0.01)


def heads(server: Any) -> list[bytes]:
    return [asked.partition(b"\r\n")[0] for asked in server.asked]


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_a_key_goes_to_no_other_origin(status: int) -> None:
    with small_server() as other:
        there = f"{other.url}/v1/models"
        moved = head(f"{status} Moved", f"Location: {there}", "Content-Length: 0")
        asked = head(f"{status} Moved", f"Location: {other.url}{CHAT}", "Content-Length: 0")
        with small_server({MODELS: moved}) as server, pytest.raises(LocalLLMError) as caught:
            ask(server.url)
        assert f"redirects to {there}" in caught.value.message
        assert caught.value.hint == f"if you trust that address, use it: {other.url}"
        assert caught.value.exit_code == ExitCode.NETWORK
        with (
            small_server({CHAT: asked}) as server,
            pytest.raises(LocalLLMError, match="redirects to"),
        ):
            ask(server.url)
        with (
            small_server({MODELS: moved}) as server,
            pytest.raises(LocalLLMError, match="redirects to"),
        ):
            Server.find(server.url, None, "secret")
        with small_server({"/v1/completions": asked}) as server, pytest.raises(LocalLLMError):
            list(Server(Endpoint.parse(server.url, "secret", "--url"), "m").complete("a", 1))
        assert other.asked == []


@pytest.mark.parametrize(
    "location",
    [
        "file:///etc/passwd",
        "ftp://127.0.0.1/x",
        "data:application/json,{}",
        "//127.0.0.1:9/v1/models",
        "http://localhost:{port}/v1/models",  # the same machine under another name
        "https://127.0.0.1:{port}/v1/models",
        "http://[::1",
        "http://127.0.0.1:99999/",
        "",
    ],
)
def test_a_redirect_leads_to_no_other_place(location: str) -> None:
    def moved() -> Iterator[bytes]:
        port = server.url.rpartition(":")[2]
        place = location.replace("{port}", port)
        yield head("302 Found", f"Location: {place}", "Content-Length: 0")

    with small_server({MODELS: moved}) as server:
        with pytest.raises(LocalLLMError, match="redirects to"):
            ask(server.url)
        assert len(server.asked) == 1


@pytest.mark.parametrize("path", [MODELS, CHAT])
@pytest.mark.parametrize(
    ("location", "hint"),
    [
        ("/api{path}", ""),
        ("{path}/?all=1", ""),
        ("{url}{path}/", ""),
        ("{url}/api{path}", "if you trust that address, use it: {url}/api"),
    ],
)
def test_a_redirect_on_the_same_server_is_told_and_not_followed(
    path: str, location: str, hint: str
) -> None:
    def moved() -> Iterator[bytes]:
        yield head("307 Moved", f"Location: {location.format(url=server.url, path=path)}")

    with small_server({path: moved}) as server:
        with pytest.raises(LocalLLMError, match="redirects to") as caught:
            ask(server.url)
        assert caught.value.hint == hint.format(url=server.url)
        assert [line.split()[1].decode() for line in heads(server)][-1] == path


def test_the_body_of_a_redirect_is_not_read() -> None:
    moved = without_end(head("302 Found", "Location: file:///x"), then=b"x" * 65536)
    with (
        small_server({MODELS: moved}) as server,
        pytest.raises(LocalLLMError, match="redirects to"),
    ):
        ask(server.url)


def test_proxies_are_for_other_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    with small_server() as server, small_server() as proxy:
        for name in ("http_proxy", "https_proxy", "all_proxy"):
            monkeypatch.setenv(name, proxy.url.replace("//", "//me:word@"))
        monkeypatch.delenv("no_proxy", raising=False)
        assert ask(server.url) == "It is so."
        assert proxy.asked == []
        with pytest.raises(LocalLLMError):
            ask("http://models.invalid/api")
        assert heads(proxy) == [b"GET http://models.invalid/api/v1/models HTTP/1.1"]
        assert b"Proxy-Authorization: Basic bWU6d29yZA==" in proxy.asked[0]
        with pytest.raises(LocalLLMError, match="cannot be reached"):
            ask("https://models.invalid")
        assert heads(proxy)[1] == b"CONNECT models.invalid:443 HTTP/1.1"
        assert b"secret" not in proxy.asked[1]
        monkeypatch.setenv("no_proxy", "models.invalid")
        with pytest.raises(LocalLLMError, match="cannot be reached"):
            ask("http://models.invalid")
        monkeypatch.setenv("no_proxy", "")
        for none in ("http://x:y", "socks9://127.0.0.1:9"):
            monkeypatch.setenv("http_proxy", none)
            with pytest.raises(LocalLLMError, match="a proxy in your environment") as caught:
                ask("http://models.invalid")
            assert "grep -i proxy" in caught.value.hint
        assert ask(server.url) == "It is so."
        assert len(proxy.asked) == 2


@pytest.mark.parametrize(
    "url",
    [
        *("", "x", "ftp://x", "file:///etc/passwd", "http://", "http://x:y", "http://x:99999"),
        *("http://[::1", "http://x/a b", "http://x/\x1b[2J", "http://x/ü"),
    ],
)
def test_what_is_no_address_of_a_server_is_refused(url: str) -> None:
    with pytest.raises(RequestError, match="--remote must be like"):
        open_remote(url, None, None)


def test_a_key_that_no_header_takes_is_refused_and_not_shown() -> None:
    for key in ("se\ncret", "secrät", "sec\x00ret", "sec\udcffret"):
        with pytest.raises(RequestError) as caught:
            open_remote("http://127.0.0.1:9", None, key)
        assert "sec" not in str(caught.value)
        assert "--api-key" in caught.value.hint


def test_what_a_server_refuses_has_its_kind() -> None:
    for status, exit_code in ((401, 3), (403, 3), (404, 3), (400, 2), (500, 1)):
        with small_server({CHAT: reply(b"{}", f"{status} No")}) as server:
            with pytest.raises(LocalLLMError, match=f"status {status}") as caught:
                ask(server.url)
            assert caught.value.exit_code == exit_code
    long = {"error": {"message": "too long", "code": "context_length_exceeded"}}
    for answer in (reply(json.dumps(long).encode(), "400 No"), stream(long)):
        with small_server({CHAT: answer}) as server, pytest.raises(ContextLengthError):
            ask(server.url)


def test_a_user_s_own_address_keeps_its_path(tmp_path: Path) -> None:
    answers = {f"/api{MODELS}": models(), f"/api{CHAT}": stream()}
    with small_server(answers) as server:
        for ending in ("/api", "/api/", "/api/v1", "/api/v1/"):
            assert ask(server.url + ending) == "It is so."
        assert b"Authorization: Bearer secret" in server.asked[0]
        assert b"Host: " + server.url.rpartition("/")[2].encode() in server.asked[0]


@pytest.fixture
def certificate(tmp_path: Path) -> Path:
    """A certificate of localhost, and its key, that only who is told of it trusts."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl makes the certificate")
    path = tmp_path / "localhost.pem"
    command = (
        "openssl req -x509 -nodes -newkey ec -pkeyopt ec_paramgen_curve:P-256 -subj /CN=localhost "
        f"-addext subjectAltName=DNS:localhost -keyout {path} -out {tmp_path}/alone.pem"
    )
    subprocess.run(command.split(), check=True, capture_output=True)
    path.write_text(path.read_text() + (tmp_path / "alone.pem").read_text())
    return path


def test_an_encrypted_connection_is_bounded_and_cut_as_others_are(
    certificate: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    listening = socket.create_server(("127.0.0.1", 0))
    ends: list[float] = []

    def serve() -> None:
        while True:
            connection, _ = listening.accept()
            with suppress(OSError), context.wrap_socket(connection, server_side=True) as secured:
                if secured.recv(65536).startswith(b"POST"):
                    secured.sendall(head("200 OK", *STREAM) + event(WORD))
                while secured.recv(65536):  # what follows does not come
                    pass
                ends.append(time.monotonic())

    threading.Thread(target=serve, daemon=True).start()
    url = f"https://localhost:{listening.getsockname()[1]}"
    endpoint = Endpoint.parse(url, "secret", "--remote")
    with pytest.raises(LocalLLMError, match="cannot be reached: certificate verify failed"):
        endpoint.models()
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    lose_patience_soon(monkeypatch, has_begun=False)
    with pytest.raises(LocalLLMError, match="has not answered within"):
        endpoint.models()
    monkeypatch.setattr(openai_client, "SILENCE_S", 60.0)
    with endpoint.request(CHAT, {}) as reply:
        chunks = reply.chunks()
        assert next(chunks).text == "It"
        threading.Timer(0.1, reply.hang_up).start()
        began = time.monotonic()
        assert list(chunks) == []
    deadline = time.monotonic() + 5
    while len(ends) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert ends[-1] - began < 2


def test_only_who_asks_a_server_loads_the_client() -> None:
    code = (
        "import sys, localllm.cli.main, localllm.cli.chat.ask_once, localllm.cli.repl.repl, "
        "localllm.chat.conversation, localllm.hub.download; print('httpx' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert done.stdout == "False\n"
