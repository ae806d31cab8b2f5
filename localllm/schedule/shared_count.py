"""A number in a file that several processes share; each locks it briefly to read and change it."""

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

# A lock is held for milliseconds only, but a process can be suspended while it holds one.
_PATIENCE_S = 0.1
_PAUSE_S = 0.002
_MAX_DIGITS = 20


class BusyError(Exception):
    """Another process has held the lock for too long."""


class SharedCount:
    """The number in a file, while this process has it locked."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def read(self) -> int | None:
        """The number as last written; None if there is none, or it is not valid."""
        text = os.pread(self._descriptor, _MAX_DIGITS + 1, 0)
        return int(text) if text.isdigit() and len(text) <= _MAX_DIGITS else None

    def write(self, value: int) -> None:
        """Change the number for all processes. Raises: OSError."""
        text = str(value).encode()
        os.ftruncate(self._descriptor, 0)
        os.pwrite(self._descriptor, text, 0)


@contextmanager
def shared_count(path: Path) -> Iterator[SharedCount]:
    """The number in the file `path`, locked while the block runs; the lock of a killed process is
    released.

    Raises: BusyError; OSError.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    descriptor = os.open(path, flags, 0o600)
    try:
        _lock(descriptor)
        yield SharedCount(descriptor)
    finally:
        os.close(descriptor)


def _lock(descriptor: int) -> None:
    end = time.monotonic() + _PATIENCE_S
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() > end:
                raise BusyError from None
        time.sleep(_PAUSE_S)
