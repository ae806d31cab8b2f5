"""What two processes of localllm say to each other: dataclasses, as length-prefixed msgpack.

Values only, no code: neither side can make the other run anything by what it sends.
"""

import struct
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Generic, TypeVar
from zlib import crc32

import msgpack

from localllm.process.shapes import MessageError, OneOf

# A prompt of a million tokens takes 5 MB at most: msgpack has no longer form for an id.
MAX_FRAME_BYTES = 64 << 20
_LENGTH = struct.Struct(">I")

M = TypeVar("M")


class Codec(Generic[M]):
    """Writes and reads the messages of one direction: a version, and the message (see OneOf).

    The version is made of the names and types of all fields of all classes, so whoever means
    something else by a message is not understood.
    """

    def __init__(self, classes: Sequence[type[M]]) -> None:
        self._classes = classes

    @cached_property  # made when a message comes or goes: many a program only looks for an engine
    def _messages(self) -> OneOf:
        return OneOf(self._classes)

    @cached_property
    def _version(self) -> int:
        return crc32(self._messages.name.encode()) & 0xFFFF

    def pack(self, message: M) -> bytes:
        """A message with its length before it."""
        body: bytes = msgpack.packb((self._version, self._messages.write((message,))))
        return _LENGTH.pack(len(body)) + body

    def unpack(self, body: bytes) -> M:
        """The message that `pack` was given, from what stands behind its length.

        Raises: MessageError.
        """
        try:
            raw = msgpack.unpackb(body, use_list=False)
        except ValueError as error:
            raise MessageError(f"no msgpack: {error!s:.200}") from error
        if type(raw) is not tuple or len(raw) != 2:
            raise MessageError("no message")
        if raw[0] != self._version:
            raise MessageError("a message of another version")
        (message,) = self._messages.read(raw[1], 1)
        found: M = message
        return found


class Unpacker(Generic[M]):
    """Messages out of bytes as they arrive, in whatever pieces."""

    def __init__(self, codec: Codec[M], max_bytes: int = MAX_FRAME_BYTES) -> None:
        self._codec, self._max_bytes = codec, max_bytes
        self._pending = bytearray()

    def feed(self, data: bytes) -> Iterator[M]:
        """The messages that are complete now. Raises: MessageError for what is none."""
        self._pending += data
        while len(self._pending) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._pending)
            if length > self._max_bytes:
                raise MessageError(f"a message of {length} bytes")
            end = _LENGTH.size + length
            if len(self._pending) < end:
                return
            body = bytes(self._pending[_LENGTH.size : end])
            del self._pending[:end]
            yield self._codec.unpack(body)
