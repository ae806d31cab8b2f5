"""Reads the lines of stdin as they come, each with a question in it."""

import io
import json
import os
import stat
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from queue import Empty, Queue
from typing import BinaryIO, cast

from localllm.cli.draw.output import note
from localllm.cli.input.user_input import SNIFFED_BYTES, looks_binary
from localllm.errors import LocalLLMError, RequestError

MAX_LINE_BYTES = 8 << 20
_CHUNK_BYTES = 1 << 16
# Lines read ahead; a longer input waits in its pipe or file.
_MAX_AHEAD = 16
# Names of the field that tells lines of JSON apart.
_IDS = ("id", "custom_id")


@dataclass(frozen=True, slots=True)
class InputLine:
    """A line of the input, counted from 1: its text, empty for a blank line, or what is wrong with
    it. `id` is that of a JSON object; `end` is its last byte's place in the input.
    """

    number: int
    text: str
    end: int
    id: str | int | None = None
    error: RequestError | None = None


class InputLines:
    """Lines of stdin, read in a thread of their own, so that waiting can be interrupted.

    `field`: each line is a JSON object, and this field holds its text. The first `num_skipped`
    lines are left out.
    """

    def __init__(self, field: str | None, num_skipped: int) -> None:
        self._field, self._num_skipped = field, num_skipped
        self._stream = _unbuffered_stdin()
        self.num_bytes = _size_of(self._stream)
        self.num_read = 0
        self._was_warned = False
        self._queue: Queue[InputLine | Exception | None] = Queue(_MAX_AHEAD)
        self.is_over = False
        threading.Thread(target=self._read, name="input-lines", daemon=True).start()

    def take(self, patience_s: float) -> InputLine | None:
        """The next line; None if none has come within `patience_s`, or the input `is_over`.

        Raises: LocalLLMError if the input cannot be read.
        """
        if self.is_over:
            return None
        try:
            found = self._queue.get(patience_s > 0, patience_s or None)
        except Empty:
            return None
        if isinstance(found, Exception):
            self.is_over = True
            raise LocalLLMError(f"stdin cannot be read: {found}") from found
        self.is_over = found is None
        return found

    def _read(self) -> None:
        try:
            for number, (data, end) in enumerate(self._split(), 1):
                self.num_read = number
                if number > self._num_skipped:
                    self._queue.put(self._line(number, data, end))
            self._queue.put(None)
        except Exception as error:  # take() raises it
            self._queue.put(error)

    def _split(self) -> Iterator[tuple[bytes, int]]:
        """Lines without their ends; one that is too long is cut just behind the limit."""
        rest, end = b"", 0
        while chunk := self._stream.read(_CHUNK_BYTES):
            first, *others = chunk.split(b"\n")
            rest = (rest + first)[: MAX_LINE_BYTES + 1]
            end += len(first)
            for each in others:
                end += 1
                yield rest, end
                rest, end = each, end + len(each)
        if rest:
            yield rest, end

    def _line(self, number: int, data: bytes, end: int) -> InputLine:
        try:
            text, id_ = self._content(self._decoded(data, is_first=number == 1))
        except RequestError as error:
            return InputLine(number, "", end, error=error)
        return InputLine(number, text, end, id_)

    def _decoded(self, data: bytes, *, is_first: bool) -> str:
        if len(data) > MAX_LINE_BYTES:
            raise RequestError(f"it is longer than {MAX_LINE_BYTES >> 20} MiB")
        if looks_binary(data[:SNIFFED_BYTES]):
            raise RequestError("it looks binary, not like text")
        try:
            text = data.decode("utf-8-sig" if is_first else "utf-8")
        except UnicodeDecodeError:
            text = data.decode("utf-8-sig" if is_first else "utf-8", errors="replace")
            if not self._was_warned:
                self._was_warned = True
                note("warning: stdin is not valid UTF-8; invalid bytes are replaced")
        return text.removesuffix("\r")

    def _content(self, line: str) -> tuple[str, str | int | None]:
        """The text of a line, and its id. Raises: RequestError."""
        if not line.strip():
            return "", None
        if self._field is None:
            return line, None
        try:
            found = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise RequestError("it is not JSON", where=f"{error!s:.100}") from error
        text = found.get(self._field) if isinstance(found, dict) else None
        if not isinstance(text, str):
            what = "no text in the field" if isinstance(found, dict) else "no object with a field"
            raise RequestError(f"it has {what} {self._field!r:.80}")
        ids = (found.get(name) for name in _IDS)
        id_ = next((each for each in ids if type(each) in (str, int)), None)
        return text if text.strip() else "", id_


def _unbuffered_stdin() -> BinaryIO:
    """stdin without a buffer, whose lock a thread that waits would hold at the program's end."""
    try:
        return cast(BinaryIO, io.FileIO(sys.stdin.fileno(), closefd=False))
    except (OSError, ValueError):  # not a file
        return sys.stdin.buffer


def _size_of(stream: BinaryIO) -> int | None:
    """Bytes of a file; None for a pipe."""
    try:
        found = os.fstat(stream.fileno())
    except (OSError, ValueError):
        return None
    return found.st_size if stat.S_ISREG(found.st_mode) else None
