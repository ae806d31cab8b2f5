"""Messages between two processes of localllm: dataclasses, as length-prefixed msgpack.

Values only, no code: neither side can make the other run anything by a message.
"""

import socket
import struct
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Generic, TypeVar
from zlib import crc32

import msgpack

from localllm.process.shapes import MessageError, OneOf

# A prompt of a million tokens takes at most 5 MB: msgpack needs at most 5 bytes for an id.
MAX_FRAME_BYTES = 64 << 20
_CHUNK = 1 << 16
_LENGTH = struct.Struct(">I")

M = TypeVar("M")


class Codec(Generic[M]):
    """Writes and reads the messages of one direction: a version, and the message (see OneOf).

    The version is a checksum of the names and types of all fields of all classes, so that messages
    from a process with other definitions are refused.
    """

    def __init__(self, classes: Sequence[type[M]]) -> None:
        self._classes = classes

    @cached_property  # made for the first message: many programs only look for an engine
    def _messages(self) -> OneOf:
        return OneOf(self._classes)

    @cached_property
    def _version(self) -> int:
        return crc32(self._messages.name.encode()) & 0xFFFF

    def pack(self, message: M) -> bytes:
        """A message, prefixed with its length."""
        body: bytes = msgpack.packb((self._version, self._messages.write((message,))))
        return _LENGTH.pack(len(body)) + body

    def unpack(self, body: bytes) -> M:
        """The message that was given to `pack`, from the bytes after its length.

        Raises: MessageError.
        """
        try:
            raw = msgpack.unpackb(body, use_list=False)
        except ValueError as error:
            raise MessageError(f"not msgpack: {error!s:.200}") from error
        if type(raw) is not tuple or len(raw) != 2:
            raise MessageError("not a message")
        if raw[0] != self._version:
            raise MessageError("a message of another version")
        (message,) = self._messages.read(raw[1], 1)
        found: M = message
        return found


class Unpacker(Generic[M]):
    """Reads messages from bytes as they arrive, in pieces of any size."""

    def __init__(self, codec: Codec[M], max_bytes: int = MAX_FRAME_BYTES) -> None:
        self._codec, self._max_bytes = codec, max_bytes
        self._pending = bytearray()

    def feed(self, data: bytes) -> Iterator[M]:
        """The messages that are complete now. Raises: MessageError for invalid bytes."""
        self._pending += data
        while len(self._pending) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._pending)
            if length > self._max_bytes:
                raise MessageError(f"a message of {length} bytes, over {self._max_bytes}")
            end = _LENGTH.size + length
            if len(self._pending) < end:
                return
            body = bytes(self._pending[_LENGTH.size : end])
            del self._pending[:end]
            yield self._codec.unpack(body)


def received(channel: socket.socket, unpacker: Unpacker[M]) -> Iterator[M]:
    """The messages that come through `channel`, until the other side closes it.

    Raises: MessageError, OSError.
    """
    while data := channel.recv(_CHUNK):
        yield from unpacker.feed(data)
