"""What the front and the engine of a server say to each other: length-prefixed msgpack.

Values only, no code: neither side can make the other run anything by what it sends.
"""

import struct
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

import msgpack

from localllm import errors
from localllm.completion import TextEvent, TokenInfo
from localllm.config import EngineConfig, SamplingParams
from localllm.engine.request import FinishReason, TokenLogprobs
from localllm.errors import LocalLLMError, RequestError
from localllm.grammar import Grammar
from localllm.prompt import Prompt
from localllm.speculation_config import SpeculationConfig
from localllm.thinking import Markers

# A prompt of a million tokens takes 5 MB at most: msgpack has no longer form for an id.
MAX_FRAME_BYTES = 64 << 20
_LENGTH = struct.Struct(">I")

Message = dict[str, Any]


def pack(message: Mapping[str, Any]) -> bytes:
    """A message with its length before it."""
    body: bytes = msgpack.packb(message)
    return _LENGTH.pack(len(body)) + body


class Unpacker:
    """Messages out of bytes as they arrive, in whatever pieces."""

    def __init__(self) -> None:
        self._pending = bytearray()

    def feed(self, data: bytes) -> Iterator[Message]:
        """The messages that are complete now. Raises: ValueError for what is no message."""
        self._pending += data
        while len(self._pending) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._pending)
            if length > MAX_FRAME_BYTES:
                raise ValueError(f"a message of {length} bytes")
            end = _LENGTH.size + length
            if len(self._pending) < end:
                return
            body = bytes(self._pending[_LENGTH.size : end])
            del self._pending[:end]
            message = msgpack.unpackb(body, strict_map_key=False)
            if not isinstance(message, dict):
                raise ValueError("a message that is no map")
            yield message


def config_to_wire(config: EngineConfig) -> Message:
    """See `config_from_wire`."""
    return asdict(config)


def config_from_wire(raw: Message) -> EngineConfig:
    """The configuration that `config_to_wire` was given."""
    return EngineConfig(**{**raw, "speculation": SpeculationConfig(**raw["speculation"])})


def prompt_to_wire(prompt: Prompt) -> Message:
    """See `prompt_from_wire`."""
    markers = None if prompt.markers is None else asdict(prompt.markers)
    return {
        "token_ids": list(prompt.token_ids),
        "markers": markers,
        "is_thinking": prompt.is_thinking,
        "num_context": prompt.num_context,
        "num_said": prompt.num_said,
        "marks": list(prompt.marks),
    }


def prompt_from_wire(raw: Message) -> Prompt:
    """The prompt that `prompt_to_wire` was given."""
    markers = raw["markers"]
    if markers is not None:
        markers = Markers(**{**markers, "silent": tuple(markers["silent"])})
    return Prompt(**{**raw, "markers": markers, "marks": tuple(raw["marks"])})


def params_to_wire(params: SamplingParams) -> Message:
    """See `params_from_wire`."""
    return asdict(params) | {"logit_bias": dict(params.logit_bias)}


def params_from_wire(raw: Message) -> SamplingParams:
    """The parameters that `params_to_wire` was given."""
    grammar = raw["grammar"]
    return SamplingParams(**{**raw, "grammar": None if grammar is None else Grammar(**grammar)})


def event_to_wire(event: TextEvent, request_id: int) -> list[Any]:
    """An event under the front's number of its request."""
    token = event.token
    logprobs = None if token is None or token.logprobs is None else token.logprobs
    return [
        request_id,
        event.sample,
        event.text,
        event.thinking,
        None if token is None else [token.token_id, token.is_draft],
        None if logprobs is None else [logprobs.logprob, [list(pair) for pair in logprobs.top]],
        event.finish_reason,
        None if event.error is None else error_to_wire(event.error),
        event.num_cached_tokens,
        event.num_drafted_tokens,
        event.time_s,
    ]


def event_from_wire(raw: list[Any]) -> TextEvent:
    """The event that `event_to_wire` was given."""
    request_id, sample, text, thinking, token, logprobs, reason, error, cached, drafted, at = raw
    values = None
    if logprobs is not None:
        values = TokenLogprobs(logprobs[0], tuple((pair[0], pair[1]) for pair in logprobs[1]))
    found = None if error is None else error_from_wire(error)
    return TextEvent(
        request_id=request_id,
        sample=sample,
        text=text,
        thinking=thinking,
        token=None if token is None else TokenInfo(token[0], values, token[1]),
        finish_reason=None if reason is None else FinishReason(reason),
        error=found if isinstance(found, RequestError) or found is None else _as_request(found),
        num_cached_tokens=cached,
        num_drafted_tokens=drafted,
        time_s=at,
    )


def error_to_wire(error: LocalLLMError) -> Message:
    """See `error_from_wire`."""
    return {
        "kind": type(error).__name__,
        "message": error.message,
        "where": error.where,
        "hint": error.hint,
        "param": getattr(error, "param", ""),
    }


def error_from_wire(raw: Message) -> LocalLLMError:
    """The error that `error_to_wire` was given."""
    kind = getattr(errors, str(raw["kind"]), None)
    told = {"where": raw["where"], "hint": raw["hint"]}
    if isinstance(kind, type) and issubclass(kind, RequestError):
        return kind(raw["message"], param=raw["param"], **told)
    if isinstance(kind, type) and issubclass(kind, LocalLLMError):
        return kind(raw["message"], **told)
    return LocalLLMError(raw["message"], **told)


def _as_request(error: LocalLLMError) -> RequestError:
    return RequestError(error.message, where=error.where, hint=error.hint)
