"""Reads the replies of OpenAI-compatible servers, and checks every type in them."""

import json
from codecs import BOM_UTF8
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from localllm.errors import BusyError, ContextLengthError, ExitCode, LocalLLMError, RequestError

MAX_LINE_BYTES = 1 << 20
# Bytes allowed without an event in them: comments that keep a connection alive, or another format.
MAX_QUIET_BYTES = 1 << 20
MAX_STREAM_BYTES = 256 << 20
# A larger count is an error.
_MAX_COUNT = 1 << 53


@dataclass(frozen=True, slots=True)
class Usage:
    """A server's token counts; None for those that it does not report."""

    prompt_tokens: int | None
    cached_tokens: int | None
    completion_tokens: int | None


@dataclass(frozen=True, slots=True)
class Chunk:
    """One event of a streamed answer; `calls_tools`: it holds a part of a call."""

    text: str
    thinking: str
    finish_reason: str | None
    usage: Usage | None
    calls_tools: bool = False


def parse_json(data: bytes) -> Any:
    """Raises: ValueError, also for data that is not UTF-8 or is nested too deeply."""
    try:
        return json.loads(data.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise ValueError("it is not UTF-8") from error
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def read_models(data: bytes) -> dict[str, Mapping[str, Any]]:
    """A server's descriptions of its models, by name. Raises: ValueError."""
    found = _object(parse_json(data), "the list of models") or {}
    listed = found.get("data")
    if not isinstance(listed, list):
        raise ValueError("data is not a list")
    models = {}
    for each in listed:
        model = _object(each, "a model") or {}
        name = model.get("id")
        if not isinstance(name, str) or not name:
            raise ValueError(f"a model's id is {name!r:.40}")
        models[name] = model
    return models


def read_stream(pieces: Iterable[bytes], kind: str) -> Iterator[Chunk]:
    """The events of a streamed answer whose bytes come in pieces; `kind` is its content type.

    Raises: LocalLLMError, also if the server sends too many bytes.
    """
    num_chunks = quiet_bytes = 0
    whole = bytearray()
    for line in _lines(pieces):
        if num_chunks == 0:
            whole += line + b"\n"  # perhaps one object in the place of a stream
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
            raise LocalLLMError(f"the server sends over {MAX_QUIET_BYTES:,} bytes without an event")
    if not num_chunks and whole.lstrip().startswith(b"{"):
        chunk = read_chunk(bytes(whole))
        if chunk != Chunk("", "", None, chunk.usage):
            yield replace(chunk, finish_reason=chunk.finish_reason or "stop")
            return
    if not num_chunks:
        raise LocalLLMError(
            "the server does not answer like an OpenAI-compatible one",
            where=f"there is no event in its answer; content type: {kind:.100}",
        )


def read_chunk(data: bytes) -> Chunk:
    """Reads one event of a stream. Raises: LocalLLMError, also if the event reports an error."""
    try:
        found = _object(parse_json(data), "an event") or {}
        if found.get("error") is not None:
            raise refusal(found, 500)
        choices = found.get("choices") or []
        if not isinstance(choices, list):
            raise ValueError("choices is not a list")
        choice = (_object(choices[0], "a choice") if choices else None) or {}
        # `message`: of a server that does not stream
        delta = _object(choice.get("delta") or choice.get("message"), "delta") or {}
        text, thinking = _content(delta.get("content"))
        return Chunk(
            text or _text(choice.get("text")) or _text(delta.get("refusal")),
            _text(delta.get("reasoning_content")) or _text(delta.get("reasoning")) or thinking,
            _text(choice.get("finish_reason")) or None,
            _usage(_object(found.get("usage"), "usage")),
            bool(delta.get("tool_calls") or delta.get("function_call")),
        )
    except ValueError as error:
        raise LocalLLMError(
            "the server does not answer like an OpenAI-compatible one", where=f"{error!s:.200}"
        ) from error


def refusal(told: Any, status: int, key_hint: str = "") -> LocalLLMError:
    """A server's error reply as an error of ours."""
    error = told.get("error") if isinstance(told, dict) else None
    error = error if isinstance(error, dict) else {"message": error}
    said = error.get("message")
    reason = said if isinstance(said, str) and said else f"status {status}"
    message = f"the server refuses: {reason:.500}"
    if error.get("code") == "context_length_exceeded":
        return ContextLengthError(message)
    if status in (401, 403):
        return LocalLLMError(message, hint=key_hint, exit_code=ExitCode.MODEL)
    if status == 404:
        return LocalLLMError(message, exit_code=ExitCode.MODEL)
    if status in (429, 503):
        return BusyError(message, hint="ask again in a moment")
    return RequestError(message) if 400 <= status < 500 else LocalLLMError(message)


def _lines(pieces: Iterable[bytes]) -> Iterator[bytes]:
    rest, num_bytes = bytearray(), 0
    for piece in _without_mark(pieces):
        num_bytes += len(piece)
        if num_bytes > MAX_STREAM_BYTES:
            raise LocalLLMError(f"the server answers with over {MAX_STREAM_BYTES:,} bytes")
        start = len(rest)
        rest += piece
        end = rest.find(b"\n", start)
        while end >= 0:
            yield bytes(rest[:end])
            del rest[: end + 1]
            end = rest.find(b"\n")
        if len(rest) > MAX_LINE_BYTES:
            raise LocalLLMError(f"the server sends a line of over {MAX_LINE_BYTES:,} bytes")
    yield bytes(rest)


def _without_mark(pieces: Iterable[bytes]) -> Iterator[bytes]:
    """`pieces` without the byte-order mark that a stream may begin with."""
    left = iter(pieces)
    first = b""
    for piece in left:
        first += piece
        if len(first) >= len(BOM_UTF8):
            break
    yield first.removeprefix(BOM_UTF8)
    yield from left


def _usage(found: Mapping[str, Any] | None) -> Usage | None:
    if not found:
        return None
    details = _object(found.get("prompt_tokens_details"), "prompt_tokens_details") or {}
    return Usage(
        _count(found, "prompt_tokens"),
        _count(details, "cached_tokens"),
        _count(found, "completion_tokens"),
    )


def _object(value: Any, what: str) -> Mapping[str, Any] | None:
    if value is not None and not isinstance(value, dict):
        raise ValueError(f"{what} is not an object")
    return value


def _content(value: Any) -> tuple[str, str]:
    """A message's text and thoughts: one text, or a list of parts."""
    if not isinstance(value, list):
        return _text(value), ""
    text = thinking = ""
    for each in value:
        part = _object(each, "a part of the content") or {}
        text += _text(part.get("text"))
        inner = part.get("thinking")
        thinking += _content(inner)[0] if isinstance(inner, (list, str)) else ""
    return text, thinking


def _text(value: Any) -> str:
    if value is not None and not isinstance(value, str):
        raise ValueError(f"{value!r:.40} instead of a text")
    return value or ""


def _count(found: Mapping[str, Any], name: str) -> int | None:
    value = found.get(name)
    if value is None:
        return None
    if type(value) is not int or not 0 <= value <= _MAX_COUNT:
        raise ValueError(f"{name} is {value!r:.40}")
    return value
