"""What two processes of localllm say to each other: length-prefixed msgpack.

Values only, no code: neither side can make the other run anything by what it sends.
"""

import struct
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

import msgpack

from localllm import errors
from localllm.errors import LocalLLMError, RequestError
from localllm.text.prompt import Prompt
from localllm.text.thinking import Markers

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

    def __init__(self, max_bytes: int = MAX_FRAME_BYTES) -> None:
        self._pending = bytearray()
        self._max_bytes = max_bytes

    def feed(self, data: bytes) -> Iterator[Message]:
        """The messages that are complete now. Raises: ValueError for what is no message."""
        self._pending += data
        while len(self._pending) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._pending)
            if length > self._max_bytes:
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
